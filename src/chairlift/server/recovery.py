"""Who is sent to the next engine after one has ended, and who is to blame.

Of an engine's end nobody knows which request caused it, if any did, so all live requests go on in the next one. Who was
there at several ends in a row without gaining a token is a suspect. Suspects are tried one after the other, before
all others: who gains a token is free, and who goes on ending the engine, while it is alone there, is guilty. An engine
that was killed from outside says less against the one it had than one that ended by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.core.request import Request
from chairlift.server.journal import Entry

MOST_TOGETHER = 2  # ends of engines in a row, without a token between, before a request is a suspect
MOST_BLAME = 2.0  # before it is guilty: so many ends of its own, while it is alone
KILLED = 0.4  # of an end of its own: when somebody else ended the engine, as an administrator or a lack of memory does


class Recovery:
    """Sends requests to the engine, as far as there is one and nobody is on trial.

    Attributes:
        fruitful: the present engine has said something of a request.
    """

    def __init__(self, send: Callable[[Request], None]) -> None:
        self.fruitful = False
        self._send = send
        self._ready = True  # the engine takes requests; before the first one does, none are made
        self._there: set[Entry] = set()  # whom it has
        self._held: dict[Entry, None] = {}  # whom it does not have yet, suspects first
        self._on_trial: Entry | None = None

    @property
    def busy(self) -> bool:
        """Whether the engine has a request."""
        return bool(self._there)

    def submit(self, entry: Entry) -> None:
        """A new request."""
        if self._ready and self._on_trial is None:
            self._go(entry)
        else:
            self._held[entry] = None

    def begin(self) -> None:
        """The engine is ready for requests."""
        self._ready = True
        self._next()

    def heard(self, entry: Entry) -> None:
        """There is news of a request."""
        self.fruitful = True
        if entry is self._on_trial:
            self._next()

    def forget(self, entry: Entry) -> None:
        """A request has ended, or nobody wants to hear of it any more."""
        self._held.pop(entry, None)
        self._there.discard(entry)
        if entry is self._on_trial:
            self._next()

    def died(self, live: Sequence[Entry], killed: bool) -> list[Entry]:
        """The engine has ended, or was ``killed`` from outside. Of the ``live`` requests, by their arrival, returns
        those that are guilty: they are not sent again, and must be ended."""
        blame = 0.0 if len(self._there) > 1 else KILLED if killed else 1.0
        for entry in self._there:
            entry.died(blame)
        guilty = [entry for entry in live if entry.blame >= MOST_BLAME]
        self._ready, self._on_trial, self.fruitful = False, None, False
        self._there.clear()
        suspects = sorted((entry for entry in live if _suspect(entry)), key=lambda entry: -entry.deaths)
        others = (entry for entry in live if not _suspect(entry))
        self._held = dict.fromkeys(entry for entry in (*suspects, *others) if entry not in guilty)
        return guilty

    def _next(self) -> None:
        """The next suspect goes on trial; when there is none, all others go on."""
        self._on_trial = None
        while self._ready and self._held and self._on_trial is None:
            entry = next(iter(self._held))
            del self._held[entry]
            if _suspect(entry):
                self._on_trial = entry
            self._go(entry)

    def _go(self, entry: Entry) -> None:
        self._there.add(entry)
        for request in entry.requests():
            self._send(request)


def _suspect(entry: Entry) -> bool:
    return entry.deaths >= MOST_TOGETHER
