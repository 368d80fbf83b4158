"""Whether --slo-itl is kept, and what it costs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from chairlift.bench.case import Column, Numbers, Target, Variant, rounded_up, whole
from chairlift.bench.cases.long_prompt import median_itl
from chairlift.bench.metrics import inter_token_latencies, measure, percentile
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig, option
from chairlift.errors import ParameterError
from chairlift.sim.workloads import Phase, Workload, WorkRequest

if TYPE_CHECKING:
    from chairlift.bench.lab import Lab

PROMPT, OUTPUT = (100, 1000), (50, 200)  # tokens, drawn evenly
TIMES = (2, 3, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """The time between tokens under several targets (--slo-itl), on a mix of short and long prompts."""

    requests: int = option(48, "Requests.")
    clients: int = option(8, "Clients; each sends its next request as soon as its last one is answered.")
    slo_itl: str | None = option(
        None, "Targets in ms, e.g. 40,80. Default: 2, 3 and 5 times the median time of a step with decodes alone."
    )

    name: ClassVar[str] = "slo"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("p50_itl_s", "P50 ITL,\nms", "ms"),
        Column("p99_itl_s", "P99 ITL,\nms", "ms"),
        Column("kept", "kept", "%"),
        Column("output_tokens_per_s", "output,\ntoken/s", "/s"),
        Column("mean_ttft_s", "mean\nTTFT, s", "s"),
        Column("p99_ttft_s", "P99\nTTFT, s", "s"),
    )
    notes: ClassVar[str] = (
        f"Prompts of {PROMPT[0]} to {PROMPT[1]} tokens, outputs of {OUTPUT[0]} to {OUTPUT[1]}. Kept: the share of the "
        "times between tokens that are within the target, or all where there is none. The engine learns the speed of "
        "its steps anew in each run."
    )

    def __post_init__(self) -> None:
        whole("clients", self.clients, 1, 1024)
        whole("requests", self.requests, self.clients, 10_000)
        if self.slo_itl is not None:
            parse_times(self.slo_itl, "slo_itl")

    def config(self, base: EngineConfig) -> EngineConfig:
        return replace(
            base,
            max_model_len=rounded_up(PROMPT[1] + OUTPUT[1], base.block_size),
            max_num_seqs=self.clients,
            max_num_batched_tokens=max(512, self.clients),
        )

    def variants(self, lab: Lab, config: EngineConfig, seed: int) -> Sequence[Variant]:
        load = self._load(seed)
        targets = parse_times(self.slo_itl, "slo_itl") if self.slo_itl else self._default_targets(lab, config)
        limited = [Variant(f"--slo-itl {target:g}", load, replace(config, slo_itl=target)) for target in targets]
        return [Variant("no target", load, config), *limited]

    def _load(self, seed: int) -> Workload:
        rng = random.Random(seed)
        requests = tuple(
            WorkRequest(str(i + 1), rng.randint(*PROMPT), rng.randint(*OUTPUT)) for i in range(self.requests)
        )
        return Workload("slo", (Phase(f"{self.clients} clients", requests, self.clients),), self.clients)

    def _default_targets(self, lab: Lab, config: EngineConfig) -> list[float]:
        """By the time between tokens when nobody's prompt is computed, at the load's mean length."""
        length = sum(PROMPT) // 2
        requests = tuple(WorkRequest(f"try-{i}", length, OUTPUT[0]) for i in range(self.clients))
        seconds = median_itl(lab, Workload("try", (Phase("try", requests),), self.clients), config)
        return [round(times * 1000 * seconds, 1) for times in TIMES]

    def numbers(self, variant: Variant, trace: Trace) -> Numbers:
        metrics = measure(trace)
        gaps = inter_token_latencies(trace.requests.values())
        target = (variant.config.slo_itl or 0.0) / 1000
        return {
            "target_s": target,
            "p50_itl_s": percentile(gaps, 50),
            "p99_itl_s": metrics.p99_itl_s,
            "kept": sum(gap <= target for gap in gaps) / len(gaps) if target else 1.0,
            "output_tokens_per_s": metrics.output_tokens_per_s,
            "mean_ttft_s": metrics.mean_ttft_s,
            "p99_ttft_s": metrics.p99_ttft_s,
        }

    def targets(self, numbers: Mapping[str, Numbers]) -> Sequence[Target]:
        return [
            Target(f"P99 ITL over the target, {label}", run["p99_itl_s"] / run["target_s"], 1.0)
            for label, run in numbers.items()
            if run["target_s"]
        ]


def parse_times(text: str, name: str, *, most: float = 1e9) -> list[float]:
    """Milliseconds of "40,80", given as the option ``name``. Raises ParameterError."""
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        times = []
    if not times or len(set(times)) < len(times) or not all(0 < time <= most for time in times):
        flag = name.replace("_", "-")
        raise ParameterError(
            name, f"--{flag} must be different times in ms, above 0 and at most {most:g}, e.g. 5,20, got {text!r}"
        )
    return times
