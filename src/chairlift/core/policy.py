"""What shares a step: batching policies. The mechanism is in scheduler.py; here are only decisions.

A policy of your own is a class that the engine is given by its import path (``--scheduler-policy mypkg.MyPolicy``). It
is called with a gate and an order, and most likely extends one of those below; see docs/policies.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar, cast

from chairlift.core.gates import Gate, Reserve, make_gate
from chairlift.core.order import Order
from chairlift.core.request import Request
from chairlift.errors import ConfigError

T = TypeVar("T")


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
    return _imported(name, gate, order)


def _imported(path: str, gate: Gate, order: Order) -> Policy:
    """An instance of the class at an import path, checked for what a policy must have."""
    module, _, name = path.replace(":", ".").rpartition(".")
    if not module:
        raise ConfigError(
            f"--scheduler-policy must be chunked, continuous, static or an import path such as mypkg.MyPolicy, "
            f"got {path!r}"
        )
    try:
        policy = getattr(importlib.import_module(module), name)(gate, order)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--scheduler-policy {path} cannot be used: {_one_line(error)}") from error
    missing = [part for part in (*Policy.__annotations__, "groups", "quota", "padding") if not hasattr(policy, part)]
    if missing:
        raise ConfigError(f"--scheduler-policy {path} is no policy: it lacks {', '.join(missing)}")
    return Checked(cast(Policy, policy), path)


class Checked:
    """Somebody's policy, held to what a policy may do: whatever it decides, no answer changes. Raises ConfigError,
    naming it, where it goes beyond."""

    def __init__(self, policy: Policy, path: str) -> None:
        self.gate, self.order = policy.gate, policy.order
        self.whole, self.holds = policy.whole, policy.holds
        self._policy = policy
        self._path = path

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        groups = self._ask("groups", lambda: list(self._policy.groups(waiting, running, slots)))
        for group in groups:
            if not isinstance(group, Group):
                raise self._error(f"groups() gave {group!r}, which is no Group")
            named = [*group.running, *group.partial]
            if len(set(map(id, named))) != len(named) or not set(map(id, named)) <= set(map(id, running)):
                raise self._error("groups() named a request twice, or one that does not run")
            yield group

    def quota(self, need: int, left: int) -> int:
        n = self._ask("quota", lambda: self._policy.quota(need, left))
        if not isinstance(n, int):
            raise self._error(f"quota() gave {n!r}, which is no whole number")
        return max(0, min(n, need, left))

    def padding(self, request: Request) -> int:
        n = self._ask("padding", lambda: self._policy.padding(request))
        return max(0, min(n, request.max_len - len(request.token_ids))) if isinstance(n, int) else 0

    def _ask(self, what: str, question: Callable[[], T]) -> T:
        try:
            return question()
        except Exception as error:
            raise self._error(f"{what}() raised {_one_line(error)}") from error

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"--scheduler-policy {self._path}: {what}")


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
