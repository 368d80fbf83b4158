"""What a long prompt does to those who decode beside it (S1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, ClassVar

from chairlift.bench.case import Column, Numbers, Target, Variant, rounded_up, whole
from chairlift.bench.metrics import inter_token_latencies, percentile
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig, option
from chairlift.errors import ParameterError
from chairlift.sim.workloads import Phase, Workload, WorkRequest

if TYPE_CHECKING:
    from chairlift.bench.lab import Lab

MOST = 3.0
FACTOR = 2.5  # of the default target, over the median time between tokens alone
DECODES = 8
OWN_PROMPT = 64
LEAD = 32  # tokens that each has when the long prompt comes
LONG = "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompt:
    """The time between the tokens of 8 requests while a long prompt is computed beside them."""

    prompt: int = option(4096, "Tokens of the long prompt.")
    output: int = option(1024, "Tokens of each of the 8; it must be enough to last until the prompt is computed.")
    slo_itl: float | None = option(
        None, "Target for the time between tokens, in ms. Default: 2.5 times the median alone."
    )
    max_num_batched_tokens: int = option(24, "A small budget of a step, to compare with.")

    name: ClassVar[str] = "long-prompt"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("p50_itl_s", "P50 ITL,\nms", "ms"),
        Column("p99_itl_s", "P99 ITL,\nms", "ms"),
        Column("max_itl_s", "max ITL,\nms", "ms"),
        Column("long_ttft_s", "TTFT of\nlong, s", "s"),
        Column("prefill_steps", "prefill\nsteps"),
    )
    notes: ClassVar[str] = (
        f"Each of the {DECODES} has a prompt of {OWN_PROMPT} tokens; the long prompt is sent when they have {LEAD} "
        "tokens each on average. Counted are the times between their tokens that overlap with the time from then to "
        "the first token of the long one; alone, all times between their tokens."
    )

    def __post_init__(self) -> None:
        whole("prompt", self.prompt, 1, 2**20)
        whole("output", self.output, LEAD + 1, 2**20)
        whole("max_num_batched_tokens", self.max_num_batched_tokens, DECODES + 2, 2**20)
        if self.slo_itl is not None and not 0 < self.slo_itl <= 1e9:
            raise ParameterError("slo_itl", f"--slo-itl must be a number above 0, at most 1e9, got {self.slo_itl:g}")

    def config(self, base: EngineConfig) -> EngineConfig:
        longest = rounded_up(max(self.prompt, OWN_PROMPT + self.output) + 1, base.block_size)
        return replace(
            base,
            max_model_len=longest,
            max_num_seqs=DECODES + 1,
            max_num_batched_tokens=max(longest, 512),
        )

    def variants(self, lab: Lab, config: EngineConfig, seed: int) -> Sequence[Variant]:
        chunked = replace(config, max_num_batched_tokens=512)
        alone, beside = self._load(beside=False), self._load(beside=True)
        slo = self.slo_itl or round(1000 * FACTOR * median_itl(lab, alone, chunked), 1)
        budget = self.max_num_batched_tokens
        return [
            Variant("alone", alone, chunked),
            Variant(f"--slo-itl {slo:g}", beside, replace(chunked, slo_itl=slo)),
            Variant(f"{budget} tokens a step", beside, replace(chunked, max_num_batched_tokens=budget)),
            Variant("512 tokens a step", beside, chunked),
            Variant("whole prompts", beside, replace(config, scheduler_policy="continuous")),
        ]

    def _load(self, *, beside: bool) -> Workload:
        eight = [WorkRequest(str(i + 1), OWN_PROMPT, self.output) for i in range(DECODES)]
        long = [WorkRequest(LONG, self.prompt, 1, after_tokens=DECODES * LEAD)] if beside else []
        label = f"{DECODES} decodes" + " and a long prompt" * beside
        return Workload("long-prompt", (Phase(label, (*eight, *long)),), DECODES + 1)

    def numbers(self, variant: Variant, trace: Trace) -> Numbers:
        eight = [request for request in trace.requests.values() if request.id != LONG]
        long = trace.requests.get(LONG)
        if long and any(request.token_times[-1] < long.token_times[0] for request in eight):
            raise ParameterError(
                "output",
                f"{variant.label}: the {DECODES} had all their tokens before the long prompt was computed; "
                f"raise --output above {self.output}, or lower --prompt",
            )
        begin, end = (long.arrival, long.token_times[0]) if long else (0.0, trace.steps[-1].end)
        gaps = inter_token_latencies(eight, begin, end)
        return {
            "p50_itl_s": percentile(gaps, 50),
            "p99_itl_s": percentile(gaps, 99),
            "max_itl_s": max(gaps),
            "long_ttft_s": end - begin if long else 0.0,
            "prefill_steps": sum(step.prefill > 0 for step in trace.steps if begin < step.end <= end) if long else 0,
            "gaps": len(gaps),
        }

    def targets(self, numbers: Mapping[str, Numbers]) -> Sequence[Target]:
        alone, (label, kept) = numbers["alone"], list(numbers.items())[1]
        return [Target(f"P99 ITL over that alone, {label}", kept["p99_itl_s"] / alone["p99_itl_s"], MOST)]


def median_itl(lab: Lab, load: Workload, config: EngineConfig, tokens: int = 48) -> float:
    """The median time between tokens, in seconds, of a load's requests cut to a few tokens."""
    requests = tuple(replace(r, output_tokens=min(tokens, r.output_tokens)) for r in load.requests)
    trace = lab.run(replace(load, phases=(Phase("try", requests),)), config)
    return median(inter_token_latencies(list(trace.requests.values())))
