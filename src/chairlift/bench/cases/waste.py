"""How much KV memory holds nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, ClassVar

from chairlift.bench.case import Column, Numbers, Target, Variant, rounded_up
from chairlift.bench.metrics import kv_waste, measure, states, waste_if_reserved
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig, option
from chairlift.errors import ParameterError
from chairlift.sim.workloads import MAX_SCALE, PEAK_OUTPUT, PEAK_PROMPT, Lengths, peak

if TYPE_CHECKING:
    from chairlift.bench.lab import Lab

MOST = 0.04
MOST_ABOVE_FLOOR = 0.002

# The migration table, read anew: 50 clients that wait 8.2 s each, at 1200 token/s, get 197 tokens a request. Where the
# lengths of the peak come from that is prompt and output together; here it is output alone, which is what serving
# systems report as their throughput.
TABLE_OUTPUT = 1200 * 8.2 / 50


def mean_length(lengths: Lengths) -> float:
    """The mean of a distribution of lengths, in tokens, but for the rounding of each to a whole token."""
    mu, sigma, normal = math.log(lengths.median), lengths.sigma, NormalDist()
    low, high = ((math.log(end) - mu) / sigma for end in (lengths.low, lengths.high))
    between = math.exp(mu + sigma**2 / 2) * (normal.cdf(high - sigma) - normal.cdf(low - sigma))
    return lengths.low * normal.cdf(low) + between + lengths.high * (1 - normal.cdf(high))


LONGER = TABLE_OUTPUT / mean_length(PEAK_OUTPUT)
MOST_SCALE = math.floor(MAX_SCALE / LONGER)
AS_IS, LONG = "peak", "peak, longer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """KV memory that holds nothing: in blocks taken as tokens come, and if each request reserved its maximum."""

    scale: float = option(
        1.0,
        "Multiplies all lengths of both loads; the first is that of `compare --case peak`. 0.5 for half the time.",
    )

    name: ClassVar[str] = "waste"
    columns: ClassVar[tuple[Column, ...]] = (
        Column("kv_waste", "blocks as\nneeded", "%"),
        Column("floor", "floor", "%"),
        Column("reserved_output_waste", "most\noutput", "%"),
        Column("reserved_context_waste", "max-\nmodel-len", "%"),
        Column("mean_tokens", "tokens a\nrequest", "1"),
        Column("mean_output", "mean\noutput", "1"),
        Column("output_tokens_per_s", "output,\ntoken/s", "/s"),
    )
    notes: ClassVar[str] = (
        "KV waste is 1 - useful / held, both added up over time: held are the token slots of blocks that requests have "
        "or were promised, useful those with the KV of an unfinished request. The rest is the unfilled end of each "
        "last block, which has (block size - 1) / 2 slots on average. The floor is so many for each request on board, "
        "over held; being a mean, it may be missed from below when requests are short. The next two columns are of the "
        "same run, had each request on board held blocks for its prompt and the longest output that the load may have, "
        "or for max-model-len. Lengths decide the floor: at scale 1 the requests of the first load hold some 175 slots "
        "each, so that no manager of blocks of 16 wastes less than about 4.3 % there, and all that can be asked of one "
        "is to add nothing to that; 4 % can be kept only by longer requests. The second load has the same "
        f"lengths {LONGER:.2f} times over. Both read the migration table's 1200 token/s, 8.2 s and 50 clients, which "
        f"make {TABLE_OUTPUT:.0f} tokens a request: of prompt and output together in the first load, of output alone "
        "in the second."
    )

    def __post_init__(self) -> None:
        if not 0 < self.scale <= MOST_SCALE:
            raise ParameterError(
                "scale", f"--scale must be a number above 0 and at most {MOST_SCALE}, got {self.scale:g}"
            )

    @property
    def _scales(self) -> dict[str, float]:
        """Of each load, by the label of its variant."""
        return {AS_IS: self.scale, LONG: self.scale * LONGER}

    def config(self, base: EngineConfig) -> EngineConfig:
        return replace(
            base,
            max_model_len=_longest(self._scales[LONG], base.block_size),
            max_num_seqs=peak(0, self.scale).max_num_seqs,
            max_num_batched_tokens=512,
            enable_prefix_caching=False,
            admission="optimistic",
        )

    def variants(self, lab: Lab, config: EngineConfig, seed: int) -> Sequence[Variant]:
        return [
            Variant(label, peak(seed, scale), replace(config, max_model_len=_longest(scale, config.block_size)))
            for label, scale in self._scales.items()
        ]

    def numbers(self, variant: Variant, trace: Trace) -> Numbers:
        block, limit = variant.config.block_size, variant.config.max_model_len or 0
        output = PEAK_OUTPUT.scaled(self._scales[variant.label]).high
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
            "mean_output": fmean(len(request.token_ids) for request in trace.requests.values()),
            "output_tokens_per_s": measure(trace).output_tokens_per_s,
        }

    def targets(self, numbers: Mapping[str, Numbers]) -> Sequence[Target]:
        as_is, longer = numbers[AS_IS], numbers[LONG]
        points = f"{MOST_ABOVE_FLOOR * 100:g} points"
        return [
            Target(
                f"KV waste, {AS_IS}, held to the floor and {points}",
                as_is["kv_waste"],
                as_is["floor"] + MOST_ABOVE_FLOOR,
                unit="%",
            ),
            Target(f"KV waste, {LONG}", longer["kv_waste"], MOST, unit="%"),
        ]


def _longest(scale: float, block_size: int) -> int:
    """Tokens of the longest request that a load may have, in whole blocks."""
    return rounded_up(PEAK_PROMPT.scaled(scale).high + PEAK_OUTPUT.scaled(scale).high, block_size)


def _ratio(part: float, whole: float) -> float:
    """0 of nothing: at a tiny scale every request ends with its first step, and holds nothing after it."""
    return part / whole if whole else 0.0
