"""The engine as the API process uses it: submit requests, read what they produce, abort them, and know its health.

An engine that ends is followed by another one, which goes on with what was open (journal, recovery).
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from chairlift import log
from chairlift.core.plan import Capacity, Output, StepStats
from chairlift.core.ports import Report
from chairlift.core.request import FinishReason, Request
from chairlift.errors import ChairliftError, EngineDead, NotReady
from chairlift.server import ipc
from chairlift.server.journal import Entry
from chairlift.server.recovery import Recovery
from chairlift.server.supervisor import Supervisor

INSPECT_SECONDS = 5.0  # an engine answers between two steps

_log = log.get("client")


class ShuttingDown(ChairliftError):
    """The server was told to end, so the request is not answered any more."""


@dataclass(frozen=True, slots=True)
class News:
    """An output, and when it reached this process (seconds, monotonic)."""

    arrived: float
    output: Output


class Stream:
    """What the engine says about the requests of one submission.

    `read` returns everything that has come since the last call, at most one call a step, so a reader that is slow gets
    larger pieces, never a longer queue of wake-ups. What may pile up is bounded by the length of the requests.
    """

    def __init__(self, client: EngineClient, requests: Iterable[Request]) -> None:
        self._client = client
        self.entries = {request.id: Entry(request) for request in requests}
        self._pending: list[News] = []
        self._wake: asyncio.Future[None] | None = None
        self._error: ChairliftError | None = None

    async def read(self) -> list[News]:
        """New outputs, in order; empty when every sample has ended. Raises EngineDead or ShuttingDown when no more can
        come."""
        while not self._pending:
            if not any(entry.is_open for entry in self.entries.values()):
                return []
            if self._error is not None:
                raise self._error
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        news, self._pending = self._pending, []
        return news

    def end(self, request_id: str, index: int) -> None:
        """Ends one sample now: what it would still say is not wanted."""
        entry = self.entries[request_id]
        if index in entry.open:
            entry.end(index)
            self._client.abort(request_id, index)
            if not entry.is_open:
                self._client.forget([request_id])

    def close(self) -> None:
        """Ends all that still runs, and frees what it holds in the engine. Harmless when all is over."""
        for request_id, entry in self.entries.items():
            if entry.is_open:
                entry.end()
                self._client.abort(request_id)
        self._client.forget(self.entries)
        self._notify()

    def feed(self, news: News) -> None:
        entry = self.entries[news.output.request_id]
        if not entry.feed(news.output):
            return
        self._pending.append(news)
        self._client.heard(entry)
        self._notify()

    def fail(self, error: ChairliftError) -> None:
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class EngineClient:
    """Talks to the engine there is. All methods belong to the event loop's thread.

    Attributes:
        phase: what the engine is doing until it is ready, in words.
        phases: finished phases of its start, with their seconds.
        ready: what the engine, or the one before it, said when it became ready; None before the first was.
        restarting: an engine has ended, and the next one is not ready.
        num_steps: how often an engine has told of a step.
        stats: the engine's state after its last step.
        failure: why no request can be answered any more, or None.
        num_failed: submissions that ended for that.
        started: set when the first engine is ready, or all is over.
        dead: set when there will be no engine any more, and ``death`` says how it came to that.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        on_step: Callable[[StepStats], None] = lambda stats: None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_change`` is called when an engine has ended, and when the next one is ready."""
        self._supervisor = supervisor
        self._on_step = on_step
        self._on_change = on_change
        self._recovery = Recovery(lambda request: self._send(ipc.Add(self._supervisor.epoch, request)))
        self._streams: dict[str, Stream] = {}
        self._questions: dict[int, asyncio.Future[Report]] = {}
        self._question_ids = count()
        self._pinned: list[tuple[int, ...]] = []
        self._last_words = ""
        self.phase = "starting the engine"
        self.phases: list[tuple[str, float]] = []
        self.ready: ipc.Ready | None = None
        self.restarting = False
        self.num_steps = 0
        self.stats = StepStats()
        self.failure: ChairliftError | None = None
        self.num_failed = 0
        self.death = ""
        self.started = asyncio.Event()
        self.dead = asyncio.Event()

    def start(self) -> None:
        self._supervisor.watch(self._receive, self._exited)

    @property
    def capacity(self) -> Capacity:
        """What the engine has reserved. To be asked for only once it was ready."""
        assert self.ready is not None
        return self.ready.capacity

    @property
    def busy(self) -> bool:
        """Whether the engine has something to compute."""
        return self._recovery.busy and not self.restarting

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def submit(self, requests: list[Request]) -> Stream:
        """Sends requests to the engine, or to the next one if it has ended. Raises EngineDead or ShuttingDown if they
        cannot be answered."""
        self.require_alive()
        stream = Stream(self, requests)
        for request_id, entry in stream.entries.items():
            self._streams[request_id] = stream
            self._recovery.submit(entry)
        return stream

    def require_alive(self) -> None:
        """Raises EngineDead or ShuttingDown once there is no engine to ask, and will be none."""
        if self.failure is not None:
            raise _again(self.failure)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._send(ipc.Abort(self._supervisor.epoch, request_id, index))

    def pin(self, token_ids: Iterable[int]) -> None:
        """Has the engine compute and keep the KV of what prompts begin with. To be sent before all requests."""
        self._pinned.append(tuple(token_ids))
        self._send(ipc.Pin(self._supervisor.epoch, self._pinned[-1]))

    async def inspect(self, request_id: str | None = None) -> Report:
        """What the engine knows of a request, or of all that live. Raises as `submit` does, and NotReady if it is too
        busy, or just being replaced."""
        self.require_alive()
        if self.restarting:
            raise NotReady(f"the engine is being replaced: {self.phase}")
        question = next(self._question_ids)
        answer = self._questions[question] = asyncio.get_running_loop().create_future()
        self._send(ipc.Inspect(self._supervisor.epoch, question, request_id))
        try:
            return await asyncio.wait_for(answer, INSPECT_SECONDS)
        except TimeoutError:
            raise NotReady(
                f"the engine did not answer within {INSPECT_SECONDS:g} s; it may be in a long step, ask again"
            ) from None
        finally:
            del self._questions[question]

    def heard(self, entry: Entry) -> None:
        """A stream has taken news of one of its requests."""
        self._recovery.heard(entry)
        if not entry.is_open:
            self.forget([entry.request.id])

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                self._recovery.forget(stream.entries[request_id])

    def fail(self, failure: ChairliftError) -> None:
        """Ends every open request with an error, and refuses new ones. The first reason given is kept."""
        self.failure = self.failure or failure
        streams = set(self._streams.values())
        self.num_failed += len(streams)
        for stream in streams:
            stream.fail(_again(self.failure))
        self._streams.clear()
        self._fail_questions(self.failure)

    # -- inside

    def _send(self, message: ipc.Message) -> None:
        self._supervisor.send(message)

    def _receive(self, message: ipc.Message) -> None:
        match message:
            case ipc.Outputs(_, outputs, stats):
                now = time.monotonic()
                self.stats = stats
                self.num_steps += 1
                for output in outputs:
                    if stream := self._streams.get(output.request_id):
                        stream.feed(News(now, output))
                self._on_step(stats)
            case ipc.Answer(_, report):
                answer = self._questions.get(report.question)
                if answer is not None and not answer.done():
                    answer.set_result(report)
            case ipc.Phase(_, name, None):
                self.phase = name
            case ipc.Phase(_, name, seconds):
                assert seconds is not None
                if not self.restarting:
                    self.phases.append((name, seconds))
                _log.info("engine: %s took %.2f s", name, seconds)
            case ipc.Ready():
                self._begin(message)
            case ipc.Failed(_, error):
                self._last_words = error

    def _begin(self, ready: ipc.Ready) -> None:
        """The engine, the first one or its successor, is ready."""
        self.ready = ready
        if self.restarting:
            self.restarting = False
            _log.info("the engine is back; it goes on with %d open requests", len(self._streams))
            self._on_change()
        for token_ids in self._pinned:
            self._send(ipc.Pin(self._supervisor.epoch, token_ids))
        self._recovery.begin()
        self.started.set()

    def _exited(self, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        death, self._last_words = self._last_words or f"the engine process {how}", ""
        live = [stream.entries[request_id] for request_id, stream in self._streams.items()]
        fruitful = self._recovery.fruitful
        killed = -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) and not self._supervisor.was_stuck
        guilty = self._recovery.died(live, killed)
        if self.ready is None or self.failure is not None:
            self._die(death)
            return
        if over := self._supervisor.give_up(fruitful or bool(guilty)):
            self._die(f"{death}; {over}")
            return
        _log.error("%s; it is replaced, and %d open requests go on in the next one", death, len(live) - len(guilty))
        for entry in guilty:
            self._fail_one(entry, f"the engine ended again and again while it computed this request alone ({death})")
        if not self._supervisor.resumes:
            self._fail_open(EngineDead(death))
        self._fail_questions(NotReady(f"{death}, and is being replaced"))
        self.restarting, self.phase = True, "replacing the engine"
        self.stats = StepStats()
        self._on_change()
        self._supervisor.replace()

    def _die(self, how: str) -> None:
        self.death = self.death or how
        self.fail(EngineDead(how))
        self.started.set()
        self.dead.set()

    def _fail_one(self, entry: Entry, error: str) -> None:
        """Ends one request with an error, as the engine would have."""
        stream = self._streams[entry.request.id]
        _log.error("request %s ends: %s", entry.request.id, error)
        for index in entry.open:
            output = Output(entry.request.id, index, finish_reason=FinishReason.ERROR, error=error)
            stream.feed(News(time.monotonic(), output))

    def _fail_open(self, error: ChairliftError) -> None:
        for stream in set(self._streams.values()):
            stream.fail(_again(error))
            self.forget(stream.entries)

    def _fail_questions(self, error: ChairliftError) -> None:
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(_again(error))


def _again(error: ChairliftError) -> ChairliftError:
    """One for each who is told: an exception keeps the tracebacks of all who raised it."""
    return type(error)(str(error))
