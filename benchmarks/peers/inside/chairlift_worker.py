"""Chairlift in process, without server, HTTP and text: the pairing for engines that are measured in process.

    chairlift_worker.py MODEL SLOTS

A token's time is the end of the step that gave it. On standard input and output: see worker.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from worker import serve

from chairlift.config import EngineConfig
from chairlift.core.clock import WallClock
from chairlift.core.plan import Output, StepStats
from chairlift.core.ports import Add, Message, Report
from chairlift.core.request import Request, SamplingParams
from chairlift.engine_main import build_engine
from chairlift.errors import ChairliftError


class Load:
    """Source of the requests and sink of their outputs; between two loads it is empty."""

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock
        self._ids = count()
        self.waiting: list[Request] = []
        self.begin = 0.0
        self.answers: dict[str, dict[str, Any]] = {}
        self.open = 0

    def begin_with(self, requests: list[dict[str, Any]]) -> None:
        self.begin = self._clock.now()
        self.waiting = [self._request(request) for request in requests]
        self.answers = {request.id: {"times": [], "tokens": []} for request in self.waiting}
        self.open = len(requests)

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        if idle and self.waiting:
            time.sleep(max(0.0, self.waiting[0].arrival - self._clock.now()))
        now = self._clock.now()
        due = sum(request.arrival <= now for request in self.waiting)
        taken, self.waiting = self.waiting[:due], self.waiting[due:]
        return [Add(request) for request in taken]

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        now = self._clock.now() - self.begin
        for output in outputs:
            if output.error:
                raise ChairliftError(output.error)
            self.answers[output.request_id]["times"].append(now)
            self.answers[output.request_id]["tokens"] += output.new_token_ids
            self.open -= output.finish_reason is not None

    def answer(self, report: Report) -> None:
        """Nobody here has asked."""

    def _request(self, request: dict[str, Any]) -> Request:
        return Request(
            id=str(next(self._ids)),
            token_ids=request["ids"],
            num_prompt=len(request["ids"]),
            params=SamplingParams(max_tokens=request["output"], temperature=0.0, ignore_eos=True),
            seed=0,
            arrival=self.begin + request["due"],
        )


def main(model: str, slots: str) -> None:
    clock = WallClock()
    load = Load(clock)
    config = EngineConfig(model=model, max_num_seqs=int(slots), enable_prefix_caching=False)
    engine = build_engine(config, load, load, clock=clock)

    def run(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        load.begin_with(requests)
        while load.open:
            engine.step()
        return list(load.answers.values())

    serve(run)


if __name__ == "__main__":
    main(*sys.argv[1:])
