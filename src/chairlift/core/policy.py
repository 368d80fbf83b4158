"""Who goes next: batching policies and admission gates. The mechanism is in scheduler.py; here are only decisions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from chairlift.core.kv import KVManager
from chairlift.core.request import Request
from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates for one step, in order: first these running requests, then, if ``boards``, the waiting queue."""

    running: Sequence[Request] = ()
    boards: bool = False


class Gate(Protocol):
    """Decides how much memory must be there for a request to board.

    Attributes:
        promises: those blocks are kept for the request, so that it is never preempted.
    """

    promises: bool

    def total(self, request: Request, kv: KVManager) -> int:
        """Blocks that must be there for the request altogether."""
        ...

    def headroom(self, kv: KVManager) -> int:
        """Blocks to leave available to those already running."""
        ...


class Optimistic:
    """Board while blocks last, but for a watermark; when they run out later, somebody is preempted.

    Even a part of a prompt boards only with room for all known tokens: else decodes soon push it out, and all was for
    nothing.
    """

    promises = False

    def __init__(self, watermark: float = 0.01) -> None:
        self.watermark = watermark

    def total(self, request: Request, kv: KVManager) -> int:
        return kv.blocks_for(len(request.token_ids))

    def headroom(self, kv: KVManager) -> int:
        return int(self.watermark * kv.pool.num_blocks)


class Reserve:
    """Board only with room for the greatest length. Never preempts."""

    promises = True

    def total(self, request: Request, kv: KVManager) -> int:
        return kv.full_blocks(request)

    def headroom(self, kv: KVManager) -> int:
        return 0


class Policy(Protocol):
    """Decides what shares a step.

    Attributes:
        gate: the admission gate.
        whole: requests are computed all or nothing, so the token budget must hold the longest.
        holds: a finished request keeps its slot, and goes on computing, until all that run have finished.
    """

    gate: Gate
    whole: bool
    holds: bool

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        """Candidate groups; the first that yields a batch is the batch. ``slots`` is the most that may run."""
        ...

    def quota(self, need: int, left: int) -> int:
        """How many of the ``need`` tokens of a request to compute, with ``left`` tokens left in the step."""
        ...

    def padding(self, request: Request) -> int:
        """Tokens of padding to compute after the prompt."""
        ...


class Static:
    """The baseline: a batch boards together, padded to its longest prompt, and leaves together.

    Rows that finish early are held and computed until the last one ends, and nobody boards meanwhile. Every row gets
    the memory of its greatest length.
    """

    whole = True
    holds = True

    def __init__(self) -> None:
        self.gate: Gate = Reserve()
        self._boarding = False
        self._padded_prompt = 0

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        if not running:
            self._boarding = True
            self._padded_prompt = max((request.num_prompt for request in islice(waiting, slots)), default=0)
        if self._boarding:  # a large batch takes several steps to board
            yield Group(boards=True)
            self._boarding = False
        yield Group(running)

    def quota(self, need: int, left: int) -> int:
        return need if need <= left else 0

    def padding(self, request: Request) -> int:
        return max(0, self._padded_prompt - request.num_prompt)


class Continuous:
    """Iteration-level scheduling with whole prompts: who waits is computed first, in a step of its own."""

    whole = True
    holds = False

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        yield Group(boards=True)
        yield Group(running)

    def quota(self, need: int, left: int) -> int:
        return need if need <= left else 0

    def padding(self, request: Request) -> int:
        return 0


class Chunked:
    """Every step first serves all decodes, and fills what is left of the token budget with pieces of prompts."""

    whole = False
    holds = False

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def groups(self, waiting: Iterable[Request], running: Sequence[Request], slots: int) -> Iterator[Group]:
        decodes = [request for request in running if request.num_remaining == 1]
        partial = [request for request in running if request.num_remaining > 1]
        yield Group(decodes + partial, boards=True)

    def quota(self, need: int, left: int) -> int:
        return min(need, left)

    def padding(self, request: Request) -> int:
        return 0


def make_policy(name: str, *, admission: str | None = None) -> Policy:
    """A policy by its name in the configuration; without ``admission``, optimistic where there is a choice."""
    gates = {"optimistic": Optimistic, "reserve": Reserve}
    admission = admission or "optimistic"
    if admission not in gates:
        raise ConfigError(f"--admission must be one of {', '.join(gates)}, got {admission!r}")
    gate: Gate = gates[admission]()
    match name:
        case "static":
            return Static()
        case "continuous":
            return Continuous(gate)
        case "chunked":
            return Chunked(gate)
    raise ConfigError(f"--scheduler-policy must be chunked, continuous or static, got {name!r}")
