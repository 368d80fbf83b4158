"""The shadow executor with a time for each step, and with what can go wrong."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from chairlift.core.plan import BAD_LOGITS, BlockOp, BlockOpKind, StepPlan, StepResult
from chairlift.core.request import Request
from chairlift.core.scheduler import Scheduler
from chairlift.errors import StepFailed
from chairlift.sim.shadow import ShadowExecutor

from .clock import Clock
from .draw import World

if TYPE_CHECKING:
    from .client import Client


@dataclass(frozen=True, slots=True)
class _Handle:
    number: int  # of the step, failed submissions included
    plan: StepPlan
    inner: StepResult | StepPlan
    done_at: float  # in true time
    seconds: float
    swap_seconds: float


class Executor(ShadowExecutor):
    """A device that runs one step after the other."""

    client: Client
    scheduler: Scheduler

    def __init__(self, world: World, clock: Clock, before: Executor | None = None) -> None:
        """With the disk of an executor ``before``."""
        super().__init__(world.capacity, vocab_size=world.vocab_size, stop_rate=world.stop_rate)
        self.num_steps = 0
        self._world = world
        self._clock = clock
        self._faults = {(fault.kind, fault.number) for fault in world.faults}
        self._noise = Random(world.seed)
        self._free_at = 0.0
        self._num_swaps = 0
        self._flying: deque[StepPlan] = deque()
        self._broken: set[str] = set()
        self._disk: dict[int, bytes] = {}  # what a block on disk is known to hold, by its address
        if before is not None:
            host = world.capacity.num_host_blocks
            self._host[host:], self._disk = before._host[host:], before._disk

    # -- what clients may ask

    def knows(self, request_id: str) -> bool:
        return request_id in self._truths

    def is_running(self, request_id: str) -> bool:
        """Whether the request is in a step in flight."""
        return any(item.request_id == request_id for plan in self._flying for item in plan.items)

    def broke(self, request_id: str) -> bool:
        """Whether the request got logits that are no numbers."""
        return request_id in self._broken

    @property
    def disk_contents(self) -> list[tuple[int, bytes]]:
        """What the next engine may find on the disk."""
        host = self.capacity.num_host_blocks
        return [(address - host, content) for address, content in self._disk.items() if content]

    def seconds(self, tokens: int, positions: int) -> float:
        """Of a step, at most."""
        costs = self._world.costs
        return (costs.step + costs.token * tokens + costs.position * positions) * (1 + costs.noise)

    # -- the executor

    def expect(self, request: Request) -> None:
        super().expect(request)
        for undo in self._undo:  # what a step in flight drew for a former request of this name
            undo.drawn = [key for key in undo.drawn if key[0] != request.id]

    def submit(self, plan: StepPlan) -> _Handle:  # type: ignore[override]
        number, self.num_steps = self.num_steps, self.num_steps + 1
        self._check_plan(plan)
        self._flying.append(plan)
        if ("submit", number) in self._faults and plan.items:
            self._last_step = plan.step_id
            self._fail(plan)
            raise StepFailed(f"step {plan.step_id} could not begin")
        self._number = number
        inner = super().submit(plan)
        costs = self._world.costs
        tokens = positions = 0
        for item in plan.items:
            n = len(item.token_ids)
            tokens += n
            positions += n * item.start + n * (n + 1) // 2
            self._note_depth(item.request_id, item.end)
        seconds = self.seconds(tokens, positions) - costs.noise * self._noise.random() * costs.step
        swaps = sum(op.kind is not BlockOpKind.COPY for op in plan.block_ops)
        self._free_at = max(self._free_at, self._clock.true) + seconds + swaps * costs.swap
        return _Handle(number, plan, inner, self._free_at, seconds + swaps * costs.swap, swaps * costs.swap)

    def result(self, handle: _Handle) -> StepResult:  # type: ignore[override]
        self._clock.pass_until(handle.done_at)
        if handle.plan not in self._flying:
            raise StepFailed("void, since the one before it failed")
        for cancel in self.client.cancels_in_flight():
            self.client.put(self.scheduler.abort(cancel.id, cancel.index), self.scheduler.stats())
        if not isinstance(handle.inner, StepResult):
            self._fail(handle.plan)
            raise StepFailed(f"step {handle.plan.step_id} failed")
        self._flying.popleft()
        lost = {
            op.dst for op in handle.plan.block_ops if op.kind is BlockOpKind.SWAP_IN and op.src in handle.inner.damaged
        }
        for item in handle.plan.items:
            life = self.client.live.get(item.request_id)
            if life is not None and life.failures and lost.isdisjoint(item.block_table):
                index = 0 if item.params.use_beam_search else item.index
                if item.end >= life.failed_at.get(index, 0):
                    life.failures[index] = 0
        result = replace(handle.inner, seconds=handle.seconds, swap_seconds=handle.swap_seconds)
        return self._with_bad_logits(handle, result) if ("logits", handle.number) in self._faults else result

    def fails(self, plan: StepPlan) -> bool:
        return ("result", self._number) in self._faults and not self.client.is_done

    def damages(self, op: BlockOp) -> bool:
        """By a fault, or since a step that failed never wrote it to the disk: there every block is checked."""
        self._num_swaps += 1
        foreign = op.src >= self.capacity.num_host_blocks and self._disk.get(op.src) != op.content
        return foreign or ("swap", self._num_swaps - 1) in self._faults

    def _apply(self, op: BlockOp) -> bool:
        if op.kind is BlockOpKind.SWAP_OUT and op.dst >= self.capacity.num_host_blocks:
            self._disk[op.dst] = op.content
        return super()._apply(op)

    def _fail(self, plan: StepPlan) -> None:
        """All steps in flight never were."""
        ends = {(i.request_id, 0 if i.params.use_beam_search else i.index): i.end for i in plan.items}
        for (name, index), end in ends.items():
            if (life := self.client.live.get(name)) is not None:
                life.failures[index] += 1
                life.failed_at[index] = end
        self._forget_from(self._flying[0].step_id)
        self._flying.clear()
        self.client.stalled = 0
        self.client.coverage["failed steps"] += 1

    def _with_bad_logits(self, handle: _Handle, result: StepResult) -> StepResult:
        """The first draw of the step comes from nothing; with drafts, the last."""
        for i, (item, tokens) in enumerate(zip(handle.plan.items, result.tokens, strict=True)):
            if tokens and not item.discard:
                self._broken.add(item.request_id)
                bad = (*tokens[:-1], BAD_LOGITS) if item.num_drafts else (BAD_LOGITS, *tokens[1:])
                rows = (*result.tokens[:i], bad, *result.tokens[i + 1 :])
                return replace(result, tokens=rows)
        return result

    # -- what must be true of every plan

    def _check_plan(self, plan: StepPlan) -> None:
        settings = self._world.settings
        assert plan.num_tokens <= settings.max_num_batched_tokens, f"step {plan.step_id} exceeds the token budget"
        busy = [item for item in plan.items if not item.discard]
        if self.client.is_done:  # the farewell
            assert plan.block_ops and not plan.items, "an empty farewell"
            return
        assert len(busy) <= settings.max_num_seqs, f"step {plan.step_id} has {len(busy)} sequences"
        # Of a batch that is held, all but those that ended may have been preempted: a step lets it leave.
        assert busy or not self._flying, f"step {plan.step_id} computes nothing: {plan}"
        self._describe(plan)

    def _note_depth(self, request_id: str, depth: int) -> None:
        """A request that comes further than ever makes progress."""
        life = self.client.live.get(request_id)
        if life is not None and depth > life.deepest:
            life.deepest = depth
            self.client.stalled = 0

    def _describe(self, plan: StepPlan) -> None:
        coverage = self.client.coverage
        for op in plan.block_ops:
            coverage[op.kind.name] += 1
        for item in plan.items:
            coverage["drafts"] += item.num_drafts
            if item.num_samples != 1 or item.discard:
                if item.discard:
                    coverage["held rows" if item.num_samples else "padding"] += 1
                else:
                    coverage["forks" if item.num_samples else "chunks"] += 1
