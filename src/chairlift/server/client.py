"""The engine as the API process uses it: submit requests, read what they produce, abort them, and know its health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from chairlift import log
from chairlift.core.plan import Output, StepStats
from chairlift.core.ports import Report
from chairlift.core.request import Request
from chairlift.errors import ChairliftError, EngineDead, NotReady
from chairlift.server import ipc
from chairlift.server.supervisor import EngineProcess

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
        self._open = {(request.id, index) for request in requests for index in request.outputs}
        self._ids = {request_id for request_id, _ in self._open}
        self._pending: list[News] = []
        self._wake: asyncio.Future[None] | None = None
        self._error: ChairliftError | None = None

    async def read(self) -> list[News]:
        """New outputs, in order; empty when every sample has ended. Raises EngineDead or ShuttingDown when no more can
        come."""
        while not self._pending:
            if not self._open:
                return []
            if self._error is not None:
                raise self._error
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        news, self._pending = self._pending, []
        return news

    def end(self, request_id: str, index: int) -> None:
        """Ends one sample now: what it would still say is not wanted."""
        if (request_id, index) in self._open:
            self._client.abort(request_id, index)
            self._close(request_id, index)

    def close(self) -> None:
        """Ends all that still runs, and frees what it holds in the engine. Harmless when all is over."""
        for request_id in {request_id for request_id, _ in self._open}:
            self._client.abort(request_id)
        self._open.clear()
        self._client.forget(self._ids)
        self._notify()

    def feed(self, news: News) -> None:
        key = (news.output.request_id, news.output.index)
        if key not in self._open:
            return
        self._pending.append(news)
        if news.output.finish_reason is not None:
            self._close(*key)
        self._notify()

    def fail(self, error: ChairliftError) -> None:
        self._error = error
        self._notify()

    def _close(self, request_id: str, index: int) -> None:
        self._open.discard((request_id, index))
        if not any(request_id == other for other, _ in self._open):
            self._client.forget([request_id])

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class EngineClient:
    """Talks to one engine. All methods belong to the event loop's thread.

    Attributes:
        phase: what the engine is doing until it is ready, in words.
        phases: finished phases of its start, with their seconds.
        ready: what it said when it became ready, or None.
        stats: its state after the last step.
        failure: why no request can be answered any more, or None.
        num_failed: submissions that ended for that.
        started: set when the engine is ready, or dead.
        dead: set when the engine is dead, and ``death`` says how it came to that.
    """

    def __init__(self, engine: EngineProcess, on_step: Callable[[StepStats], None] = lambda stats: None) -> None:
        self._engine = engine
        self._on_step = on_step
        self._streams: dict[str, Stream] = {}
        self._questions: dict[int, asyncio.Future[Report]] = {}
        self._question_ids = count()
        self.phase = "starting the engine"
        self.phases: list[tuple[str, float]] = []
        self.ready: ipc.Ready | None = None
        self.stats = StepStats()
        self.failure: ChairliftError | None = None
        self.num_failed = 0
        self.death = ""
        self.started = asyncio.Event()
        self.dead = asyncio.Event()

    def start(self) -> None:
        self._engine.watch(self._receive, self._exited)

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def submit(self, requests: list[Request]) -> Stream:
        """Sends requests to the engine. Raises EngineDead or ShuttingDown if they cannot be answered."""
        self.require_alive()
        stream = Stream(self, requests)
        for request in requests:
            self._streams[request.id] = stream
            self._engine.send(ipc.Add(self._engine.epoch, request))
        return stream

    def require_alive(self) -> None:
        """Raises EngineDead or ShuttingDown once there is no engine to ask."""
        if self.failure is not None:
            raise _again(self.failure)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._engine.send(ipc.Abort(self._engine.epoch, request_id, index))

    def pin(self, token_ids: Iterable[int]) -> None:
        """Has the engine compute and keep the KV of what prompts begin with. To be sent before all requests."""
        self._engine.send(ipc.Pin(self._engine.epoch, tuple(token_ids)))

    async def inspect(self, request_id: str | None = None) -> Report:
        """What the engine knows of a request, or of all that live. Raises as `submit` does, and NotReady if it is too
        busy."""
        self.require_alive()
        question = next(self._question_ids)
        answer = self._questions[question] = asyncio.get_running_loop().create_future()
        self._engine.send(ipc.Inspect(self._engine.epoch, question, request_id))
        try:
            return await asyncio.wait_for(answer, INSPECT_SECONDS)
        except TimeoutError:
            raise NotReady(
                f"the engine did not answer within {INSPECT_SECONDS:g} s; it may be in a long step, ask again"
            ) from None
        finally:
            del self._questions[question]

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)

    def fail(self, failure: ChairliftError) -> None:
        """Ends every open request with an error, and refuses new ones. The first reason given is kept."""
        self.failure = self.failure or failure
        streams = set(self._streams.values())
        self.num_failed += len(streams)
        for stream in streams:
            stream.fail(_again(self.failure))
        self._streams.clear()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(_again(self.failure))

    def _die(self, how: str) -> None:
        self.death = self.death or how
        self.fail(EngineDead(how))
        self.started.set()
        self.dead.set()

    def _receive(self, message: ipc.Message) -> None:
        match message:
            case ipc.Outputs(_, outputs, stats):
                now = time.monotonic()
                self.stats = stats
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
                self.phases.append((name, seconds))
                _log.info("engine: %s took %.2f s", name, seconds)
            case ipc.Ready():
                self.ready = message
                self.started.set()
            case ipc.Failed(_, error):
                self._die(error)

    def _exited(self, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._die(f"the engine process {how}")


def _again(error: ChairliftError) -> ChairliftError:
    """One for each who is told: an exception keeps the tracebacks of all who raised it."""
    return type(error)(str(error))
