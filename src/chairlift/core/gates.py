"""Admission gates: how much memory must be there for a request to board."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chairlift.core.kv import Hit, KVManager
from chairlift.core.layout import NO_BLOCK
from chairlift.core.request import Request
from chairlift.errors import ConfigError


class Gate(Protocol):
    """Decides whether a request may board.

    Attributes:
        promises: the blocks of `total` are kept for the request, so that it is never preempted for want of memory.
        preempts: a request that boarded may have to make room for others later.
    """

    promises: bool
    preempts: bool

    def total(self, request: Request, kv: KVManager) -> int:
        """Blocks that must be there for the request altogether."""
        ...

    def headroom(self, kv: KVManager) -> int:
        """Blocks to leave available to those already running."""
        ...

    def fits(
        self,
        request: Request,
        hit: Hit,
        running: Sequence[Request],
        kv: KVManager,
        *,
        promised: bool,
        freed: int = 0,
    ) -> bool:
        """Whether all of them will have the memory they need, beyond what `total` asks for.

        Args:
            promised: the request gets all it may ever need at once.
            freed: blocks that others, who are not among the ``running``, give back before.
        """
        ...


class Optimistic:
    """Board while blocks last, but for a watermark; when they run out later, somebody is preempted.

    Even a part of a prompt boards only with room for all known tokens: else decodes soon push it out, and all was for
    nothing.
    """

    promises = False
    preempts = True

    def __init__(self, watermark: float = 0.01) -> None:
        self.watermark = watermark

    def total(self, request: Request, kv: KVManager) -> int:
        return kv.layout.held(len(request.token_ids), prefilling=True)

    def headroom(self, kv: KVManager) -> int:
        return int(self.watermark * kv.pool.num_blocks)

    def fits(
        self,
        request: Request,
        hit: Hit,
        running: Sequence[Request],
        kv: KVManager,
        *,
        promised: bool,
        freed: int = 0,
    ) -> bool:
        return True


class Reserve(Optimistic):
    """Board only with room for the greatest length. Never preempts."""

    promises = True
    preempts = False

    def headroom(self, kv: KVManager) -> int:
        return 0

    def total(self, request: Request, kv: KVManager) -> int:
        return kv.layout.full_blocks(request)


class ReservePrompt(Reserve):
    """Board only with room for the known tokens, which is kept until all of them are computed."""

    preempts = True

    def total(self, request: Request, kv: KVManager) -> int:
        return kv.layout.held(len(request.token_ids), prefilling=True)


MOST_SPANS = 16
"""Into how many the time to come is divided, so that a look ahead costs no more than so many sums."""


class Peak(Optimistic):
    """Board when the pool will hold the running requests and the newcomer at every moment to come.

    Decodes advance together, a token a step, so it is known when each of them will be at its greatest length and give
    its blocks back at the latest; the memory in use is greatest just before one of them ends. (LightLLM's scheduler
    estimates the same from typical lengths; here the bounds are certain.) A request whose prompt is still being
    computed counts as if it began to decode at once and never ended, since nobody knows when its prompt will be done.
    Blocks that several share are counted once, and as if never given back. So memory can only turn out to be more than
    foreseen, and nobody is preempted. Whatever `Reserve` would admit beside the same requests is admitted too.
    """

    preempts = False

    def headroom(self, kv: KVManager) -> int:
        return 0

    def fits(
        self,
        request: Request,
        hit: Hit,
        running: Sequence[Request],
        kv: KVManager,
        *,
        promised: bool,
        freed: int = 0,
    ) -> bool:
        if not running:
            return True  # alone it fits, or it would have been refused
        shared = {block for block in hit.table if block != NO_BLOCK}
        revived = sum(kv.pool.refs(block) == 0 for block in shared)
        # What was promised to somebody is not available, and so needs no looking ahead.
        futures = [_Future.of(other, kv, shared) for other in running if not other.reservation]
        room = kv.num_available + freed - revived
        if promised:
            room -= max(0, kv.layout.full_blocks(request) - kv.lasting(hit.table, 0))
        else:
            taken = kv.lasting(hit.table, 0)
            futures.append(_Future(kv, request, taken=taken, private=0, prefilling=True))
        if sum(future.growth(future.steps) for future in futures) <= room:
            return True
        # The moments before ends, in a few spans: all that ends in a span is counted as if it lasted through it.
        ends = sorted(future.steps + 1 for future in futures)
        size = max(1, -(-len(ends) // MOST_SPANS))
        spans = [ends[i : i + size] for i in range(0, len(ends), size)]
        return all(sum(future.blocks(span[0], span[-1]) for future in futures) <= room for span in spans)


class _Future:
    """What a request will hold, t steps from now, more than it holds today."""

    def __init__(self, kv: KVManager, request: Request, *, taken: int, private: int, prefilling: bool) -> None:
        known = len(request.token_ids) + request.num_pending
        self._kv = kv
        self._length = known - (0 if prefilling else 1)  # positions that have a block already, or must have at once
        self._prefilling = prefilling
        self._taken = taken  # fewer by what it must copy before it writes there
        self._private = private
        self._samples = request.num_samples
        self._prompt = request.num_prompt
        self.steps = max(0, request.max_len - known)

    @classmethod
    def of(cls, request: Request, kv: KVManager, shared: set[int]) -> _Future:
        """Of a running request; ``shared`` are the blocks that the newcomer will hold, too."""
        taken = kv.lasting(request.block_table, 1) - kv.blocks_to_copy(request)
        prefilling = request.num_remaining > 1 or request.num_samples > 1
        private = kv.private_blocks(request) - sum(
            kv.pool.refs(b) == 1 for b in shared.intersection(request.block_table)
        )
        return cls(kv, request, taken=taken, private=private, prefilling=prefilling)

    def growth(self, t: int) -> int:
        length = self._length + min(t, self.steps)
        layout = self._kv.layout
        held = layout.held(length, self._prefilling)
        if self._samples > 1:  # whole prompt blocks are shared, and a last one that is not whole is copied
            shared = layout.held(self._prompt - self._prompt % layout.block_size)
            held = max(held, shared + self._samples * (layout.held(length) - shared) + layout.num_groups)
        return max(0, held - self._taken)

    def blocks(self, first: int, last: int) -> int:
        """Most that it holds more than today in the steps ``first .. last``."""
        if first > self.steps + 1 and not self._prefilling:  # one step more, since the next may be planned already
            return -self._private
        return self.growth(last)


def make_gate(name: str | None) -> Gate:
    """A gate by its name in the configuration; None is optimistic."""
    gates: dict[str, type[Gate]] = {"optimistic": Optimistic, "reserve": Reserve, "peak": Peak}
    if (name or "optimistic") not in gates:
        raise ConfigError(f"--admission must be one of {', '.join(gates)}, got {name!r}")
    return gates[name or "optimistic"]()
