"""Whether one tenant's flood delays another's single requests (S5)."""

from __future__ import annotations

import random
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

MOST = 2.0
FLOOD_PROMPT, FLOOD_OUTPUT = 200, 100
SINGLE_PROMPT, SINGLE_OUTPUT = 200, 16
JITTER = 0.5  # seconds; so that B's requests come at any moment of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """Time to first token of a tenant with few requests: alone, beside another's flood, and with --fair-tenants."""

    flood: int = option(100, "Requests that tenant A sends at once.")
    singles: int = option(12, "Requests that tenant B sends, one now and then.")
    max_num_seqs: int = option(8, "Most sequences that run at once.")
    max_num_batched_tokens: int = option(128, "Most tokens of a step.")

    name: ClassVar[str] = "fairness"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("mean_ttft_s", "B's TTFT\nmean, s", "s"),
        Column("p99_ttft_s", "B's TTFT\nP99, s", "s"),
        Column("output_tokens_per_s", "output of\nall, /s", "/s"),
        Column("preemptions", "preemp-\ntions"),
    )
    notes: ClassVar[str] = (
        f"A's requests have prompts of {FLOOD_PROMPT} tokens and outputs of {FLOOD_OUTPUT}, B's prompts of "
        f"{SINGLE_PROMPT} and outputs of {SINGLE_OUTPUT}. B sends its requests at even distances over the flood, "
        f"counted in tokens that were given out, and up to {JITTER} s later, at any moment of a step; alone, each when "
        "the one before is answered. No two prompts begin alike."
    )

    def __post_init__(self) -> None:
        whole("flood", self.flood, 1, 10_000)
        whole("max_num_seqs", self.max_num_seqs, 1, 1024)
        whole("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs, 2**20)
        whole("singles", self.singles, 1, self.flood * FLOOD_OUTPUT)

    def config(self, base: EngineConfig) -> EngineConfig:
        longest = max(FLOOD_PROMPT + FLOOD_OUTPUT, SINGLE_PROMPT + SINGLE_OUTPUT)
        return replace(
            base,
            max_model_len=rounded_up(longest, base.block_size),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )

    def variants(self, lab: Lab, config: EngineConfig, seed: int) -> Sequence[Variant]:
        beside = self._load(seed)
        singles = tuple(request for request in beside.requests if request.tenant == "B")
        alone = replace(beside, phases=(Phase(f"{self.singles} single requests", singles, clients=1),))
        return [
            Variant("alone", alone, config),
            Variant("beside the flood", beside, config),
            Variant("with --fair-tenants", beside, replace(config, fair_tenants=True)),
        ]

    def _load(self, seed: int) -> Workload:
        rng = random.Random(seed)
        gap = self.flood * FLOOD_OUTPUT // (self.singles + 1)
        flood = (WorkRequest(f"A{i + 1}", FLOOD_PROMPT, FLOOD_OUTPUT, tenant="A") for i in range(self.flood))
        singles = (
            WorkRequest(f"B{i + 1}", SINGLE_PROMPT, SINGLE_OUTPUT, rng.uniform(0, JITTER), (i + 1) * gap, tenant="B")
            for i in range(self.singles)
        )
        label = f"{self.singles} single requests beside {self.flood}"
        return Workload("fairness", (Phase(label, (*flood, *singles)),), self.max_num_seqs)

    def numbers(self, variant: Variant, trace: Trace) -> Numbers:
        singles = measure(trace, {request.id for request in variant.workload.requests if request.tenant == "B"})
        return {
            "mean_ttft_s": singles.mean_ttft_s,
            "p99_ttft_s": singles.p99_ttft_s,
            "output_tokens_per_s": measure(trace).output_tokens_per_s,
            "preemptions": trace.num_preemptions,
        }

    def targets(self, numbers: Mapping[str, Numbers]) -> Sequence[Target]:
        alone, fair = numbers["alone"], numbers["with --fair-tenants"]
        return [
            Target(f"B's {text} TTFT with --fair-tenants over that alone", fair[name] / alone[name], MOST)
            for text, name in (("mean", "mean_ttft_s"), ("P99", "p99_ttft_s"))
        ]
