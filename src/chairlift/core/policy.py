"""What shares a step: batching policies. The mechanism is in scheduler.py; here are only decisions.

A policy of your own is a class that the engine is given by its import path (``--scheduler-policy mypkg.MyPolicy``). It
is called with a gate and an order, and most likely extends one of those below; see docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from chairlift.core.gates import Gate, Reserve, make_gate
from chairlift.core.order import Order
from chairlift.core.request import Request


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates for one step: first these running requests, then, by their rank, those whose prompts are computed in
    part and, if ``boards``, the waiting queue."""

    running: Sequence[Request] = ()
    partial: Sequence[Request] = ()
    boards: bool = False


class Policy(Protocol):
    """Decides what shares a step.

    Attributes:
        gate: the admission gate.
        order: who boards first.
        whole: requests are computed all or nothing, so the token budget must hold the longest.
        holds: a finished request keeps its slot, and goes on computing, until all that run have finished.
    """

    gate: Gate
    order: Order
    whole: bool
    holds: bool

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        """Candidate groups; the first that yields a batch is the batch. ``slots`` is the most that may run."""
        ...

    def quota(self, need: int, left: int) -> int:
        """How many of the ``need`` tokens of a request to compute: at most ``left``, what is left in the step."""
        ...

    def padding(self, request: Request) -> int:
        """Tokens of padding to compute after the prompt."""
        ...


class Chunked:
    """Every step first serves all decodes, and fills what is left of the token budget with pieces of prompts."""

    whole = False
    holds = False

    def __init__(self, gate: Gate, order: Order) -> None:
        self.gate = gate
        self.order = order

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        # As num_remaining == 1, which would cost a call for each of them in each step.
        decodes = [r for r in running if len(r.token_ids) + r.num_pending - r.num_planned == 1]
        partial = [] if len(decodes) == len(running) else [r for r in running if r.num_remaining > 1]
        yield Group(decodes, partial, boards=True)

    def quota(self, need: int, left: int) -> int:
        return min(need, left)

    def padding(self, request: Request) -> int:
        return 0


class Continuous(Chunked):
    """Iteration-level scheduling with whole prompts: who waits is computed first, in a step of its own."""

    whole = True

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        yield Group(boards=True)
        yield Group([request for request in running if request.num_remaining == 1])

    def quota(self, need: int, left: int) -> int:
        return need if need <= left else 0


class Static(Continuous):
    """The baseline: a batch boards together, padded to its longest prompt, and leaves together.

    Rows that finish early are held and computed until the last one ends, and nobody boards meanwhile. Every row gets
    the memory of its greatest length.
    """

    holds = True

    def __init__(self) -> None:
        super().__init__(Reserve(), Order())
        self._boarding = False
        self._padded_prompt = 0

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        if not running:
            self._boarding = True
            self._padded_prompt = max((len(request.token_ids) for request in islice(waiting, slots)), default=0)
        if self._boarding:  # a large batch takes several steps to board
            yield Group(boards=True)
            self._boarding = False
        yield Group([request for request in running if request.num_remaining == 1])

    def padding(self, request: Request) -> int:
        return max(0, self._padded_prompt - len(request.token_ids))


def make_policy(name: str, *, admission: str | None = None, order: Order | None = None) -> Policy:
    """A policy by its name in the configuration, or by the import path of its class."""
    gate, order = make_gate(admission), order or Order()
    match name:
        case "static":
            return Static()
        case "continuous":
            return Continuous(gate, order)
        case "chunked":
            return Chunked(gate, order)
    from chairlift.core.own_policy import load  # which builds on this module

    return load(name, gate, order)
