"""What --max-batch-delay-ms gives and costs, when requests come in bursts."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

from chairlift.bench.case import Column, Numbers, Target, Variant, rounded_up, whole
from chairlift.bench.cases.slo import parse_times
from chairlift.bench.metrics import measure
from chairlift.bench.trace import RequestTrace, StepTrace, Trace
from chairlift.config import EngineConfig, option
from chairlift.errors import ParameterError
from chairlift.sim.workloads import Phase, Workload, WorkRequest

if TYPE_CHECKING:
    from chairlift.bench.lab import Lab

NONE = "no delay"
MOST_MS = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Whether an idle engine had better wait for a burst's other requests (--max-batch-delay-ms), or begin at once."""

    bursts: int = option(24, "Bursts; each comes to an idle engine, when the one before has been answered.")
    burst: int = option(8, "Requests of a burst.")
    spread_ms: float = option(10.0, "The requests of a burst come at random moments of so many ms.")
    max_batch_delay_ms: str = option("5,20", "Delays in ms to compare with none.")
    prompt: int = option(32, "Tokens of each prompt.")
    output: int = option(32, "Tokens of each output.")
    max_num_seqs: int = option(16, "Most sequences that run at once. So many waiting would end a delay.")

    name: ClassVar[str] = "delay"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("first_step", "in first\nstep", "1"),
        Column("second_step", "by the\nsecond", "1"),
        Column("mean_ttft_s", "TTFT\nmean, ms", "ms"),
        Column("p99_ttft_s", "TTFT\nP99, ms", "ms"),
        Column("first_ttft_s", "TTFT of\n1st, ms", "ms"),
        Column("burst_s", "a burst,\nms", "ms"),
    )
    notes: ClassVar[str] = (
        "In first step: requests that the first step of a burst computes, on average; by the second: those who are "
        "aboard then. TTFT is that of all requests, and that of the first of each burst alone. A burst lasts from its "
        "first arrival to its last answer. Without a delay the first request is computed alone, and whoever comes "
        "meanwhile boards when its step ends, not when its answer does: continuous batching is not one in, one out. So "
        "a delay gains no more than that one step; it is worth that where a step for one takes about as long as a step "
        "for all. The first of each burst pays: it waits for the delay, in full unless max-num-seqs requests come, and "
        "then for the prompts of those who boarded with it. A request that comes alone pays the delay for nothing."
    )

    def __post_init__(self) -> None:
        whole("bursts", self.bursts, 1, 1000)
        whole("burst", self.burst, 1, 1024)
        whole("prompt", self.prompt, 1, 2**16)
        whole("output", self.output, 1, 2**16)
        whole("max_num_seqs", self.max_num_seqs, self.burst, 1024)
        parse_times(self.max_batch_delay_ms, "max_batch_delay_ms", most=MOST_MS)
        if not 0 <= self.spread_ms <= MOST_MS:
            raise ParameterError("spread_ms", f"--spread-ms must be from 0 to {MOST_MS:g}, got {self.spread_ms:g}")

    def config(self, base: EngineConfig) -> EngineConfig:
        return replace(
            base,
            max_model_len=rounded_up(self.prompt + self.output, base.block_size),
            max_num_seqs=self.max_num_seqs,
            # room for a whole burst in a step: nothing but time is to decide who boards in which
            max_num_batched_tokens=max(512, self.burst * self.prompt, self.max_num_seqs),
        )

    def variants(self, lab: Lab, config: EngineConfig, seed: int) -> Sequence[Variant]:
        load = self._load(seed)
        delays = parse_times(self.max_batch_delay_ms, "max_batch_delay_ms", most=MOST_MS)
        delayed = [Variant(f"delay of {ms:g} ms", load, replace(config, max_batch_delay_ms=ms)) for ms in delays]
        return [Variant(NONE, load, config), *delayed]

    def _load(self, seed: int) -> Workload:
        rng = random.Random(seed)
        return Workload("delay", tuple(self._burst(rng, n + 1) for n in range(self.bursts)), self.max_num_seqs)

    def _burst(self, rng: random.Random, number: int) -> Phase:
        """Arrivals of a Poisson process of which it is known how many come: drawn evenly, and put in order."""
        arrivals = sorted(rng.uniform(0, self.spread_ms / 1000) for _ in range(self.burst))
        requests = (WorkRequest(f"{number}-{i + 1}", self.prompt, self.output, at) for i, at in enumerate(arrivals))
        return Phase(f"burst {number}", tuple(requests))

    def numbers(self, variant: Variant, trace: Trace) -> Numbers:
        metrics = measure(trace)
        delay = variant.config.max_batch_delay_ms / 1000
        bursts = [[trace.requests[r.id] for r in phase.requests] for phase in variant.workload.phases]
        steps = [_first_steps(burst, trace.steps) for burst in bursts]
        return {
            "first_step": fmean(_aboard(burst, first) for burst, (first, _) in zip(bursts, steps, strict=True)),
            "first_due": fmean(_come(burst, burst[0].arrival + delay) for burst in bursts),
            "second_step": fmean(_aboard(burst, second) for burst, (_, second) in zip(bursts, steps, strict=True)),
            "second_due": fmean(_come(burst, first.end) for burst, (first, _) in zip(bursts, steps, strict=True)),
            "mean_ttft_s": metrics.mean_ttft_s,
            "p99_ttft_s": metrics.p99_ttft_s,
            "first_ttft_s": fmean(burst[0].token_times[0] - burst[0].arrival for burst in bursts),
            "burst_s": fmean(max(r.finish for r in burst) - burst[0].arrival for burst in bursts),
        }

    def targets(self, numbers: Mapping[str, Numbers]) -> Sequence[Target]:
        """Nobody is left behind: neither who comes during the first step, nor who comes within a delay."""
        none = numbers[NONE]
        boarded = none["second_step"] / none["second_due"]
        return [
            Target(f"aboard by the second step over all who had come, {NONE}", boarded, 1.0, at_most=False),
            *(
                Target(f"requests in the first step, {label}", run["first_step"], run["first_due"], False, "1")
                for label, run in numbers.items()
                if label != NONE
            ),
        ]


def _first_steps(burst: Sequence[RequestTrace], steps: Sequence[StepTrace]) -> tuple[StepTrace, StepTrace]:
    """The first step that computes something of a burst, and the one after it (the same if there is no other)."""
    boarded = min(request.stays[0].board for request in burst)
    first = bisect_left(steps, boarded, key=lambda step: step.start)
    return steps[first], steps[min(first + 1, len(steps) - 1)]


def _aboard(burst: Sequence[RequestTrace], step: StepTrace) -> int:
    """Requests that have boarded when the step begins."""
    return sum(request.stays[0].board <= step.start for request in burst)


def _come(burst: Sequence[RequestTrace], time: float) -> int:
    """Requests that have arrived by then."""
    return sum(request.arrival <= time for request in burst)
