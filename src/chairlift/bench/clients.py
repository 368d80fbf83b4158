"""The clients of a load, inside the engine's process: its source of requests and the sink of its outputs."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from chairlift.core.plan import Output, StepStats
from chairlift.core.ports import Add, Clock, Message
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.errors import ChairliftError
from chairlift.sim.workloads import Phase, WorkRequest


class Prompts:
    """Random tokens for each request: the same for the same seed, and no two prompts begin alike.

    So no prefix cache could help, even were it on. What the tokens are does not change the cost of computing them.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed

    def tokens(self, request: WorkRequest) -> list[int]:
        rng = random.Random(f"{self._seed}/{request.id}")
        return rng.choices(range(self._vocab_size), k=request.prompt_tokens)


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
        begin = clock.now()
        requests = phase.requests if self._closed else sorted(phase.requests, key=lambda request: request.arrival_s)
        # (when it is due, the request), in order; of a closed loop's later requests nobody knows yet when
        self._due = deque((begin + (0.0 if self._closed else request.arrival_s), request) for request in requests)
        self._later: deque[WorkRequest] = deque()
        if phase.clients is not None:
            while len(self._due) > phase.clients:
                self._later.appendleft(self._due.pop()[1])

    @property
    def done(self) -> bool:
        """Everything has been sent."""
        return not self._due and not self._later

    def take(self, idle: bool) -> Sequence[Message]:
        if idle and self._due:
            self._sleep(max(0.0, self._due[0][0] - self._clock.now()))
        messages: list[Message] = []
        while self._due and self._due[0][0] <= self._clock.now():
            arrival, planned = self._due.popleft()
            request = self._request(planned, arrival)
            self._on_send(request)
            messages.append(Add(request))
        return messages

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise ChairliftError(f"request {output.request_id} of the load failed: {output.error}")
            if output.finish_reason is not None and self._later:
                self._due.append((self._clock.now(), self._later.popleft()))

    def _request(self, request: WorkRequest, arrival: float) -> Request:
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        tokens = self._prompts.tokens(request)
        return Request(id=request.id, token_ids=tokens, num_prompt=len(tokens), params=params, seed=0, arrival=arrival)
