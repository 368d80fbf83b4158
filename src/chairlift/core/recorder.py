"""The flight recorder: the last steps, and from them what happened to a request and why it waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from chairlift.core.plan import Event, StepRecord
from chairlift.core.ports import LifeLine, Report, RequestView
from chairlift.core.request import Request, SequenceInfo

if TYPE_CHECKING:
    from chairlift.core.scheduler import Scheduler

MOST_STEPS = 2048

EVENTS = {
    "queued": "it came, and waits",
    "boarded": "it got a slot and KV blocks",
    "swapped in": "it got a slot, and its KV was copied back",
    "chunk": "a piece of its tokens was computed",
    "decode": "a token a step, or more with drafts that were right",
    "waits": "it is the next to board, and cannot",
    "preempted": "it lost its slot and its KV, which is computed again later",
    "swapped out": "it lost its slot; its KV was copied away",
    "ended": "it left",
}
"""What happens in a request's life, in words."""

REASONS = {
    "slots": "all --max-num-seqs sequences are taken",
    "tokens": "the token budget of the step (--max-num-batched-tokens) is used up",
    "blocks": "there are not enough free KV blocks (--kv-cache-memory)",
    "gate": "the admission gate foresees too little KV memory (--admission, --kv-cache-memory)",
    "slo": "steps would take longer than --slo-itl",
    "delay": "the engine waits for others to board with it (--max-batch-delay-ms)",
    "batch": "a static batch must end first (--scheduler-policy static)",
    "fairness": "other tenants were served less (--fair-tenants)",
    "order": "others come first (--order)",
}
"""For want of what a request waits, in words."""

EXPLANATIONS = EVENTS | REASONS


@dataclass(frozen=True, slots=True)
class _Step:
    """A step without its tokens: who was computed, and what happened."""

    step_id: int
    started: float
    sequences: tuple[SequenceInfo, ...]
    events: tuple[Event, ...]


class FlightRecorder:
    """A ring of the last steps: ids and counts, no tokens."""

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._steps: deque[_Step] = deque(maxlen=most_steps)
        self._boarding_seconds = 0.0  # between two boardings, lately
        self._last_boarding: float | None = None

    def add(self, record: StepRecord) -> None:
        plan = record.plan
        failed = len(record.result.tokens) < len(plan.items)
        sequences = () if failed else tuple([item.sequence for item in plan.items if not item.discard])
        self._steps.append(_Step(plan.step_id, record.started, sequences, record.events))
        for event in record.events:
            if event.what in ("boarded", "swapped in"):
                self._note_boarding(event.time)

    def _note_boarding(self, time: float) -> None:
        if self._last_boarding is not None:
            gap = max(0.0, time - self._last_boarding)
            self._boarding_seconds = 0.9 * self._boarding_seconds + 0.1 * gap if self._boarding_seconds else gap
        self._last_boarding = time

    def last(self, most: int) -> list[tuple[int, str]]:
        """The last steps, and whom each computed. Any thread may ask."""
        steps = list(self._steps)[-most:]
        return [(step.step_id, ", ".join(f"{s.request_id}.{s.index}" for s in step.sequences)) for step in steps]

    # -- what lives

    def report(self, question: int, request_id: str | None, scheduler: Scheduler, now: float) -> Report:
        """The answer to `chairlift.core.ports.Inspect`."""
        views = tuple(self._views(scheduler, now, request_id))
        return Report(question, views, () if request_id is None else self._life(request_id))

    def _life(self, request_id: str) -> tuple[LifeLine, ...]:
        life = _Life(request_id)
        for step in self._steps:
            life.read(step)
        return life.lines

    def _views(self, scheduler: Scheduler, now: float, request_id: str | None) -> Iterator[RequestView]:
        for request in scheduler.running.values():
            if request_id is None or request.id == request_id:
                yield self._view(request, now)
        first = None
        for position, request in enumerate(scheduler.waiting, 1):
            first = first or request
            if request_id is not None and request.id != request_id:
                continue
            if request is scheduler.boarding.head:
                reason = scheduler.boarding.binding
            else:
                reason = "order" if request.tenant == first.tenant else scheduler.reason_behind_others
            yield self._view(request, now, position, reason)

    def _view(
        self, request: Request, now: float, position: int | None = None, reason: str | None = None
    ) -> RequestView:
        known = position is not None and self._boarding_seconds > 0
        return RequestView(
            id=request.id,
            index=request.index,
            state=request.status.value,
            tenant=request.tenant,
            priority=request.priority,
            num_prompt=request.num_prompt,
            num_output=request.num_output,
            num_computed=request.num_computed,
            num_blocks=sum(block >= 0 for block in request.block_table),
            num_host_blocks=sum(block >= 0 for block in request.host_table),
            num_preemptions=request.num_preemptions,
            waited=max(0.0, now - request.queued_at),
            position=position,
            reason=reason,
            estimated_start=(position or 0) * self._boarding_seconds if known else None,
        )


class _Life:
    """What happened to a request's sequences, step by step; decodes in a row are one line.

    A step's record holds the events since the one before it. Some belong after what it computed: the ends that it
    brought, and, with several steps in flight, the planning of the next.
    """

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._begin_again()

    def _begin_again(self, begin: float | None = None) -> None:
        self._begin = begin
        self._lines: list[LifeLine] = []
        self._spans: dict[int, LifeLine] = {}  # of decodes, by sequence; they may go on
        self._chunks: set[tuple[int, int]] = set()  # step, sequence: told by an event of their own
        self._ended: set[int] = set()  # sequences; what was in flight for them counts for nothing

    @property
    def lines(self) -> tuple[LifeLine, ...]:
        return (*self._lines, *self._spans.values())

    def read(self, step: _Step) -> None:
        events = [event for event in step.events if event.request_id == self._id]
        for event in events:
            if event.step <= step.step_id:
                self._note(event)
        for sequence in step.sequences:
            if sequence.request_id == self._id:
                self._decode(step, sequence.index)
        for event in events:
            if event.step > step.step_id:
                self._note(event)

    def _note(self, event: Event) -> None:
        if event.what == "queued" or self._begin is None:  # an id may be used again
            self._begin_again(event.time)
        if event.what == "chunk":
            self._chunks.add((event.step, event.index))
        if event.what == "ended":
            self._ended.add(event.index)
        if span := self._spans.pop(event.index, None):
            self._lines.append(span)
        self._lines.append(
            LifeLine(self._since(event.time), event.step, event.step, event.index, event.what, event.detail)
        )

    def _decode(self, step: _Step, index: int) -> None:
        if index in self._ended or (step.step_id, index) in self._chunks:
            return
        others = len(step.sequences) - 1
        beside = f"beside {others} other" + ("" if others == 1 else "s")
        span = self._spans.get(index)
        if span and span.last_step == step.step_id - 1 and span.detail == beside:
            self._spans[index] = replace(span, last_step=step.step_id)
            return
        if span:
            self._lines.append(span)
        seconds = self._since(step.started)
        self._spans[index] = LifeLine(seconds, step.step_id, step.step_id, index, "decode", beside)

    def _since(self, time: float) -> float:
        if self._begin is None:
            self._begin = time
        return max(0.0, time - self._begin)
