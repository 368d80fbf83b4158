"""How much KV memory holds nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from chairlift.bench.case import Column, Numbers, Target, Variant, rounded_up
from chairlift.bench.metrics import kv_waste, measure, states, waste_if_reserved
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig, option
from chairlift.sim.workloads import PEAK_OUTPUT, PEAK_PROMPT, check_scale, peak

if TYPE_CHECKING:
    from chairlift.bench.lab import Lab

MOST = 0.04


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """KV memory that holds nothing: in blocks taken as tokens come, and if each request reserved its maximum."""

    scale: float = option(
        1.0, "Multiplies all lengths; at 1 the load is that of `compare --case peak`. 0.5 for half the time."
    )

    name: ClassVar[str] = "waste"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("kv_waste", "blocks as\nneeded", "%"),
        Column("floor", "floor", "%"),
        Column("reserved_output_waste", "most\noutput", "%"),
        Column("reserved_context_waste", "max-\nmodel-len", "%"),
        Column("mean_tokens", "tokens a\nrequest", "1"),
        Column("output_tokens_per_s", "output,\ntoken/s", "/s"),
    )
    notes: ClassVar[str] = (
        "KV waste is 1 - useful / held, both added up over time: held are the token slots of blocks that requests have "
        "or were promised, useful those with the KV of an unfinished request. The rest is the unfilled end of each "
        "last block, which has (block size - 1) / 2 slots on average. The floor is so many for each request on board, "
        "over held: no manager of such blocks wastes less, but by chance; and longer requests have a lower one. The "
        "next two columns are of the same run, had each request on board held blocks for its prompt and the longest "
        "output that the load may have, or for max-model-len."
    )

    def __post_init__(self) -> None:
        check_scale(self.scale)

    def config(self, base: EngineConfig) -> EngineConfig:
        longest = PEAK_PROMPT.scaled(self.scale).high + PEAK_OUTPUT.scaled(self.scale).high
        return replace(
            base,
            max_model_len=rounded_up(longest, base.block_size),
            max_num_seqs=peak(0, self.scale).max_num_seqs,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
            admission="optimistic",
        )

    def variants(self, lab: Lab, config: EngineConfig, seed: int) -> Sequence[Variant]:
        return [Variant("peak", peak(seed, self.scale), config)]

    def numbers(self, variant: Variant, trace: Trace) -> Numbers:
        block, limit = variant.config.block_size, variant.config.max_model_len or 0
        output = PEAK_OUTPUT.scaled(self.scale).high
        request_seconds = held_seconds = useful_seconds = 0.0
        for step, seconds, requests in states(trace):
            request_seconds += len(requests) * seconds
            held_seconds += step.kv_held * seconds
            useful_seconds += step.kv_useful * seconds
        return {
            "kv_waste": kv_waste(trace.steps),
            "floor": _ratio((block - 1) / 2 * request_seconds, held_seconds),
            "reserved_output_waste": waste_if_reserved(trace, lambda r: rounded_up(r.prompt_tokens + output, block)),
            "reserved_context_waste": waste_if_reserved(trace, lambda r: limit),
            "mean_tokens": _ratio(useful_seconds, request_seconds),
            "output_tokens_per_s": measure(trace).output_tokens_per_s,
        }

    def targets(self, numbers: Mapping[str, Numbers]) -> Sequence[Target]:
        return [Target("KV waste", numbers["peak"]["kv_waste"], MOST, unit="%")]


def _ratio(part: float, whole: float) -> float:
    """0 of nothing: at a tiny scale every request ends with its first step, and holds nothing after it."""
    return part / whole if whole else 0.0
