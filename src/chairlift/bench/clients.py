"""The clients of a load, inside the engine's process: its source of requests and the sink of its outputs."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence

from chairlift.core.plan import Output, StepStats
from chairlift.core.ports import Add, Clock, Message, Report
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.errors import ChairliftError
from chairlift.sim.workloads import Phase, WorkRequest


class Prompts:
    """Random tokens for each request: the same for the same seed, and no two prompts begin alike, except for the
    tokens that requests are to share.

    So nothing else is found in a prefix cache. What the tokens are does not change the cost of computing them.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    def tokens(self, request: WorkRequest) -> list[int]:
        shared = self._draw("(shared)", request.shared_tokens)
        return shared + self._draw(request.id, request.prompt_tokens - len(shared))

    def _draw(self, name: str, count: int) -> list[int]:
        return random.Random(f"{self._seed}/{name}").choices(range(self._vocab_size), k=count)


class Clients:
    """Sends one phase of a load: open loop at the given times, closed loop as answers come in.

    Nothing is late because the engine is busy: a request's arrival is the moment when it was due, so the rest of a step
    that ran meanwhile counts as its waiting.
    """

    def __init__(
        self,
        phase: Phase,
        prompts: Prompts,
        clock: Clock,
        sleep: Callable[[float], None],
        on_send: Callable[[Request], None],
    ) -> None:
        """``sleep`` passes time when there is nothing to do: time.sleep, or a virtual clock's advance."""
        self._prompts = prompts
        self._clock = clock
        self._sleep = sleep
        self._on_send = on_send
        self._closed = phase.clients is not None
        self._tokens = 0  # of all answers so far
        begin = clock.now()
        at_once = [r for r in phase.requests if not r.after_tokens][: phase.clients]
        # (when it is due, a count, the request): a heap; of the later ones nobody knows yet when
        self._due = [(begin + (0.0 if self._closed else r.arrival_s), i, r) for i, r in enumerate(at_once)]
        heapq.heapify(self._due)
        sent = {request.id for request in at_once}
        later = [request for request in phase.requests if request.id not in sent]
        self._later = deque(sorted(later, key=lambda request: request.after_tokens))

    @property
    def done(self) -> bool:
        """Everything has been sent."""
        return not self._due and not self._later

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        if idle and not self._due and self._later:  # no more tokens will come: what waits for them is due now
            self._send_next()
        if idle and self._due:
            due = self._due[0][0] if until is None else min(until, self._due[0][0])
            self._sleep(max(0.0, due - self._clock.now()))
        elif idle and until is not None:
            self._sleep(max(0.0, until - self._clock.now()))
        messages: list[Message] = []
        while self._due and self._due[0][0] <= self._clock.now():
            arrival, _, planned = heapq.heappop(self._due)
            request = self._request(planned, arrival)
            self._on_send(request)
            messages.append(Add(request))
        return messages

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise ChairliftError(f"request {output.request_id} of the load failed: {output.error}")
            self._tokens += len(output.new_token_ids)
            if self._closed and output.finish_reason is not None and self._later:
                self._send_next()
        while not self._closed and self._later and self._later[0].after_tokens <= self._tokens:
            self._send_next()

    def answer(self, report: Report) -> None:
        raise AssertionError("these clients ask no questions")

    def _send_next(self) -> None:
        request = self._later.popleft()
        delay = 0.0 if self._closed else request.arrival_s
        heapq.heappush(self._due, (self._clock.now() + delay, -len(self._later), request))

    def _request(self, request: WorkRequest, arrival: float) -> Request:
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        tokens = self._prompts.tokens(request)
        return Request(
            id=request.id,
            token_ids=tokens,
            num_prompt=len(tokens),
            params=params,
            seed=0,
            arrival=arrival,
            tenant=request.tenant,
        )
