"""The engine's loop: messages in, one model step, outputs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from chairlift.core.plan import Output, StepPlan, StepRecord, StepResult
from chairlift.core.ports import Abort, Add, Clock, Executor, Inspect, Pin, Sink, Source
from chairlift.core.recorder import FlightRecorder
from chairlift.core.request import FinishReason
from chairlift.core.scheduler import Scheduler
from chairlift.errors import RequestRefused, StepFailed

MOST_DEPTH = 2  # a plan may build on the draws of the one before it, and no earlier ones


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    handle: Any
    started: float


class Engine:
    """Owns the scheduler and drives an executor. One thread calls `step` over and over; nothing else may touch it.

    Args:
        depth: most steps in flight. 1: a step is planned when the one before is done. 2: while it runs.
        recorder: told of each step that was committed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        source: Source,
        sink: Sink,
        clock: Clock,
        recorder: Callable[[StepRecord], None] | None = None,
        *,
        depth: int = 1,
    ) -> None:
        if not 1 <= depth <= MOST_DEPTH:
            raise ValueError(f"depth must be from 1 to {MOST_DEPTH}, got {depth}")
        if depth > 1 and scheduler.settings.num_speculative_tokens:
            raise ValueError("with drafts nobody knows how far a step comes before it is done: depth must be 1")
        self.scheduler = scheduler
        self.executor = executor
        self.flight_recorder = FlightRecorder()
        self._source = source
        self._sink = sink
        self._clock = clock
        self._recorder = recorder
        self._depth = depth
        self._in_flight: deque[_Flight] = deque()
        self._beginning: tuple[_Flight, ...] = ()  # the one that is being submitted, which may take as long as it does
        self._now = clock.now()

    def step(self) -> bool:
        """Takes what has arrived, plans a step if one can begin, and finishes the oldest if as many run as may.

        Returns False if there was nothing to do.
        """
        ended = self._take_messages()
        ended += self.scheduler.expire(self._time())
        if ended:
            self._sink.put(ended, self.scheduler.stats())
        if not self.scheduler.has_work and not self._in_flight:
            return False
        begun = self._begin_step()
        if self._in_flight and (not begun or len(self._in_flight) == self._depth):
            self._finish_step()
        return True

    def describe(self, most: int = 8) -> list[str]:
        """The last steps and those in flight, a line each: ids and counts. For when a step is stuck, so any thread may
        ask."""
        lines = [f"step {step} was done: {who}" for step, who in self.flight_recorder.last(most)]
        for flight in (*self._in_flight, *self._beginning):
            parts = ", ".join(
                f"{item.sequence.request_id}.{item.sequence.index} ({len(item.token_ids)} tokens from {item.start})"
                for item in flight.plan.items
            )
            ops = f", after {len(flight.plan.block_ops)} block operations" if flight.plan.block_ops else ""
            lines.append(
                f"step {flight.plan.step_id} began {self._clock.now() - flight.started:.1f} s ago{ops}: {parts}"
            )
        return lines

    def close(self) -> None:
        """Keeps what can be kept for the next run, and closes the executor. Live requests get no answer."""
        try:
            while self._in_flight:
                self._discard(self._in_flight.popleft())
            plan = self.scheduler.farewell()
            if plan is not None:
                with suppress(StepFailed):  # then it is not kept
                    self.executor.result(self.executor.submit(plan))
        finally:
            self.executor.close()

    def _begin_step(self) -> bool:
        started = self._time()
        plan = self.scheduler.schedule(started)
        if plan is None:
            if not self._in_flight and self.scheduler.wake_at is None and self.scheduler.has_work:
                raise RuntimeError(
                    "the scheduler has work, nothing is in flight, and it made no plan "
                    f"(policy {self.scheduler.policy!r})"
                )
            return False
        self._beginning = (_Flight(plan, None, started),)
        try:
            self._in_flight.append(_Flight(plan, self.executor.submit(plan), started))
        except StepFailed as failure:
            self._recover(self._beginning[0], failure)
        self._beginning = ()
        return True

    def _finish_step(self) -> None:
        flight = self._in_flight.popleft()
        try:
            result = self.executor.result(flight.handle)
        except StepFailed as failure:
            self._recover(flight, failure)
            return
        now = self._time()
        record = self._publish(flight, result, self.scheduler.commit(flight.plan, result, now), now)
        if self._recorder:
            self._recorder(record)

    def _publish(self, flight: _Flight, result: StepResult, outputs: list[Output], now: float) -> StepRecord:
        """What came of a step goes out, and into the flight recorder."""
        stats = self.scheduler.stats()
        self._sink.put(outputs, stats)
        events = self.scheduler.take_events()
        record = StepRecord(flight.plan, result, tuple(outputs), stats, flight.started, now, events)
        self.flight_recorder.add(record)
        return record

    def _recover(self, failed: _Flight, failure: StepFailed) -> None:
        """A step failed: all others in flight are waited for and thrown away, and all is computed again."""
        while self._in_flight:
            self._discard(self._in_flight.popleft())
        outputs = self.scheduler.fail(failed.plan, str(failure))
        nothing = StepResult(failed.plan.step_id, (), ())
        self._publish(failed, nothing, outputs, self._time())

    def _discard(self, flight: _Flight) -> None:
        with suppress(StepFailed):
            self.executor.result(flight.handle)

    def _take_messages(self) -> list[Output]:
        """Hands new messages to the scheduler; returns the ends that they caused."""
        ended: list[Output] = []
        wake_at = self.scheduler.wake_at if self.scheduler.has_work else None
        idle = not self._in_flight and (wake_at is not None or not self.scheduler.has_work)
        for message in self._source.take(idle, wake_at):
            match message:
                case Add(request):
                    try:
                        ended += self.scheduler.add(request, self._time())
                    except RequestRefused as refusal:
                        ended += [
                            Output(
                                request.id, index, finish_reason=FinishReason.ERROR, error=str(refusal), refused=True
                            )
                            for index in request.outputs
                        ]
                case Abort(request_id, index):
                    ended += self.scheduler.abort(request_id, index)
                case Inspect(question, request_id):
                    self._sink.answer(self.flight_recorder.report(question, request_id, self.scheduler, self._time()))
                case Pin(token_ids):
                    self.scheduler.pin(token_ids)
        return ended

    def _time(self) -> float:
        """The clock's time; should the clock go back, time stands still."""
        self._now = max(self._now, self._clock.now())
        return self._now
