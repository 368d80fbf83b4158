"""What requests with a common beginning save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from chairlift.bench.case import Column, Numbers, Target, Variant, rounded_up, whole
from chairlift.bench.metrics import measure
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig, option
from chairlift.sim.workloads import Phase, Workload, WorkRequest

if TYPE_CHECKING:
    from chairlift.bench.lab import Lab

MOST = 0.25
OUTPUT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Prompt tokens computed for requests that begin alike, with and without the prefix cache."""

    requests: int = option(32, "Requests.")
    shared: int = option(1000, "First tokens that all prompts have in common.")
    own: int = option(50, "Further tokens of each prompt, which no other has.")
    max_num_batched_tokens: int = option(512, "Most tokens of a step.")

    name: ClassVar[str] = "prefix"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("prefill_tokens", "prompt tok.\ncomputed"),
        Column("cached_tokens", "found in\nthe cache"),
        Column("mean_ttft_s", "TTFT\nmean, s", "s"),
        Column("p99_ttft_s", "TTFT\nP99, s", "s"),
        Column("duration_s", "duration,\ns", "s"),
    )
    notes: ClassVar[str] = (
        "The cache is empty at the start of each run. One after another: a request is sent when the one before is "
        "answered. At once: all are sent at the same time, so that the common beginning can be found only by those who "
        "board after it was computed."
    )

    def __post_init__(self) -> None:
        whole("requests", self.requests, 2, 1024)
        whole("shared", self.shared, 0, 2**20)
        whole("own", self.own, 1, 2**20)

    def config(self, base: EngineConfig) -> EngineConfig:
        return replace(
            base,
            max_model_len=rounded_up(self.shared + self.own + OUTPUT, base.block_size),
            max_num_seqs=self.requests,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def variants(self, lab: Lab, config: EngineConfig, seed: int) -> Sequence[Variant]:
        off = replace(config, enable_prefix_caching=False)
        return [
            Variant(f"{when}, cache {state}", self._load(clients), with_cache)
            for when, clients in (("one by one", 1), ("at once", None))
            for state, with_cache in (("off", off), ("on", config))
        ]

    def _load(self, clients: int | None) -> Workload:
        requests = tuple(
            WorkRequest(str(i + 1), self.shared + self.own, OUTPUT, shared_tokens=self.shared)
            for i in range(self.requests)
        )
        phase = Phase(f"{self.requests} requests that share {self.shared} tokens", requests, clients)
        return Workload("prefix", (phase,), self.requests)

    def numbers(self, variant: Variant, trace: Trace) -> Numbers:
        metrics = measure(trace)
        return {
            "prefill_tokens": sum(step.prefill for step in trace.steps),
            "cached_tokens": sum(request.cached_tokens for request in trace.requests.values()),
            "mean_ttft_s": metrics.mean_ttft_s,
            "p99_ttft_s": metrics.p99_ttft_s,
            "duration_s": metrics.duration_s,
        }

    def targets(self, numbers: Mapping[str, Numbers]) -> Sequence[Target]:
        computed = {label: run["prefill_tokens"] for label, run in numbers.items()}
        return [
            Target(
                f"prompt tokens computed, of those without cache, {when}",
                computed[f"{when}, cache on"] / computed[f"{when}, cache off"],
                MOST,
                unit="%",
            )
            for when in ("one by one", "at once")
        ]
