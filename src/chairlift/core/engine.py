"""The engine's loop: messages in, one model step, outputs out."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.core.plan import Output, StepRecord
from chairlift.core.ports import Abort, Add, Clock, Executor, Sink, Source
from chairlift.core.request import FinishReason
from chairlift.core.scheduler import Scheduler
from chairlift.errors import RequestRefused


class Engine:
    """Owns the scheduler and drives an executor. One thread calls `step` over and over; nothing else may touch it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        source: Source,
        sink: Sink,
        clock: Clock,
        recorder: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._source = source
        self._sink = sink
        self._clock = clock
        self._recorder = recorder

    def step(self) -> bool:
        """Takes what has arrived and runs one model step. Returns False if there was nothing to run."""
        ended = self._take_messages()
        if ended:
            self._sink.put(ended, self.scheduler.stats())
        if not self.scheduler.has_work:
            return False
        started = self._clock.now()
        plan = self.scheduler.schedule(started)
        if plan is None:
            raise RuntimeError("the scheduler has work, nothing is in flight, and it made no plan")
        result = self.executor.result(self.executor.submit(plan))
        now = self._clock.now()
        outputs = self.scheduler.commit(plan, result, now)
        stats = self.scheduler.stats()
        self._sink.put(outputs, stats)
        if self._recorder:
            self._recorder(StepRecord(plan, result, tuple(outputs), stats, started, now))
        return True

    def _take_messages(self) -> list[Output]:
        """Hands new messages to the scheduler; returns the ends that they caused."""
        ended: list[Output] = []
        for message in self._source.take(idle=not self.scheduler.has_work):
            match message:
                case Add(request):
                    try:
                        self.scheduler.add(request)
                    except RequestRefused as refusal:
                        ended += [
                            Output(
                                request.id, index, finish_reason=FinishReason.ERROR, error=str(refusal), refused=True
                            )
                            for index in request.samples
                        ]
                case Abort(request_id, index):
                    ended += self.scheduler.abort(request_id, index)
        return ended
