"""Whether throughput survives a demand for more KV memory than there is (M3)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from chairlift.bench.case import Column, Numbers, Target, Variant, rounded_up, whole
from chairlift.bench.metrics import measure
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig, option
from chairlift.sim.workloads import Phase, Workload, WorkRequest, check_scale

if TYPE_CHECKING:
    from chairlift.bench.lab import Lab

TIMES = 3
LEAST = 0.8
PROMPT, OUTPUT = (64, 128), (64, 256)  # tokens, drawn evenly
SWAP_SPACE = 1.0  # GiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Thrash:
    """Throughput when all requests together need three times the KV memory there is, for each way to preempt."""

    requests: int = option(16, "Requests whose greatest lengths just fill the KV pool; then come three times as many.")
    scale: float = option(1.0, "Multiplies all lengths. Below 1 for a quick look.")

    name: ClassVar[str] = "thrash"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("output_tokens_per_s", "output,\ntoken/s", "/s"),
        Column("mean_running", "mean\nrunning", "1"),
        Column("preemptions", "preemp-\ntions"),
        Column("swaps", "of them\nswapped"),
        Column("recomputed_tokens", "tokens\nlost"),
        Column("p99_e2e_s", "response\nP99", "s"),
    )
    notes: ClassVar[str] = (
        f"All requests are sent at once, prompts of {PROMPT[0]} to {PROMPT[1]} tokens and outputs of {OUTPUT[0]} to "
        f"{OUTPUT[1]}, each with a slot if memory allows. The pool is the same for all; demand is the blocks that all "
        "requests have at their greatest length. At three times the pool the lengths are those of the first load three "
        "times over. Tokens lost are those computed and then thrown away by a preemption; the prefix cache is on, so "
        "not all of them are computed again. The last line keeps room for each request's end, and so never preempts."
    )

    def __post_init__(self) -> None:
        whole("requests", self.requests, 2, 1024)
        check_scale(self.scale)

    def config(self, base: EngineConfig) -> EngineConfig:
        return replace(
            base,
            max_model_len=rounded_up(self._scaled(PROMPT[1]) + self._scaled(OUTPUT[1]), base.block_size),
            max_num_seqs=TIMES * self.requests,
            max_num_batched_tokens=max(512, TIMES * self.requests),
            swap_space=SWAP_SPACE,
            preemption_mode="swap",
        )

    def variants(self, lab: Lab, config: EngineConfig, seed: int) -> Sequence[Variant]:
        lengths = self._lengths(seed)
        pool = sum(rounded_up(prompt + output, config.block_size) for prompt, output in lengths) // config.block_size
        once, times = (_load(lengths, n, config.max_num_seqs) for n in (1, TIMES))
        recompute = replace(config, swap_space=0.0, preemption_mode=None)
        return [
            Variant("demand = pool", once, recompute, pool),
            Variant("3 x pool, recompute", times, recompute, pool),
            Variant("3 x pool, swap", times, config, pool),
            Variant("3 x pool, reserve", times, replace(recompute, admission="reserve"), pool),
        ]

    def _lengths(self, seed: int) -> list[tuple[int, int]]:
        rng = random.Random(seed)

        def draw(span: tuple[int, int]) -> int:
            return self._scaled(rng.randint(*span))

        return [(draw(PROMPT), draw(OUTPUT)) for _ in range(self.requests)]

    def _scaled(self, tokens: int) -> int:
        return max(1, round(self.scale * tokens))

    def numbers(self, variant: Variant, trace: Trace) -> Numbers:
        metrics = measure(trace)
        return {
            "output_tokens_per_s": metrics.output_tokens_per_s,
            "mean_running": sum(s.running * (s.end - s.start) for s in trace.steps) / metrics.duration_s,
            "preemptions": trace.num_preemptions,
            "swaps": trace.num_swaps,
            "recomputed_tokens": trace.num_recomputed_tokens,
            "p99_e2e_s": metrics.p99_e2e_s,
        }

    def targets(self, numbers: Mapping[str, Numbers]) -> Sequence[Target]:
        rates = {label: run["output_tokens_per_s"] for label, run in numbers.items()}
        kept = {mode: rates[f"3 x pool, {mode}"] / rates["demand = pool"] for mode in ("recompute", "swap")}
        return [
            Target(f"throughput at 3 x pool over that at demand = pool, {mode}", value, LEAST, False, "%")
            for mode, value in kept.items()
        ]


def _load(lengths: Sequence[tuple[int, int]], times: int, slots: int) -> Workload:
    requests = tuple(
        WorkRequest(f"{n + 1}-{i + 1}", prompt, output)
        for n in range(times)
        for i, (prompt, output) in enumerate(lengths)
    )
    return Workload("thrash", (Phase(f"{len(requests)} requests at once", requests),), slots)
