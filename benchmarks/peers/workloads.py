"""The fixed requests of workload.json: greedy, end-of-sequence ignored, so that all lengths are exact."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("workload.json")
RATES = (1, 2, 4)  # requests/s of W-rate
WARM_UP_ROUND = 99


@dataclass(frozen=True, slots=True)
class Request:
    """``output`` tokens after the prompt ``ids``; ``due``: seconds after the start."""

    ids: tuple[int, ...]
    output: int
    due: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and how many may run at once."""

    name: str
    slots: int
    requests: tuple[Request, ...]

    def scaled(self, scale: float) -> Workload:
        """The first requests, that share of all; of a single request the beginning of its output."""
        if len(self.requests) > 1:
            return replace(self, requests=self.requests[: math.ceil(len(self.requests) * scale)])
        (only,) = self.requests
        return replace(self, requests=(replace(only, output=math.ceil(only.output * scale)),))

    def salted(self, round_: int) -> Workload:
        """The same requests, each with another first token in each round: no prefix cache helps a later round."""
        words = _read()["pool"]
        salted = (
            replace(request, ids=(words[(round_ * 101 + i * 7) % len(words)], *request.ids[1:]))
            for i, request in enumerate(self.requests)
        )
        return replace(self, requests=tuple(salted))

    def warm_up(self) -> Workload:
        """Two of its requests, short, so that nobody pays for what is slow only once."""
        short = tuple(replace(request, output=min(8, request.output), due=0.0) for request in self.requests[:2])
        return replace(self, requests=short).salted(WARM_UP_ROUND)


@cache
def _read() -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(FILE.read_text())
    return stored


@cache
def all_workloads() -> dict[str, Workload]:
    """By name, in the order of the table. W-rate's Poisson arrivals are one workload for each rate."""
    stored = _read()
    found = [
        Workload(name, slots, tuple(Request(tuple(r["ids"]), r["output_len"]) for r in stored[name]))
        for name, slots in (("W-single", 32), ("W-prefill", 32), ("W-batch", 32), ("W-long", 32), ("W-seed", 4))
    ]
    for rate in RATES:
        requests = (Request(tuple(r["ids"]), r["output_len"], r["arrival"] / rate) for r in stored["W-rate"])
        found.append(Workload(f"W-rate-{rate}", 32, tuple(requests)))
    return {workload.name: workload for workload in found}
