"""The numbers of a run.

| name                     | what it is                                                                              |
|--------------------------|-----------------------------------------------------------------------------------------|
| output_tokens_per_s      | tokens of all answers / time from the first arrival to the last finish                   |
| total_tokens_per_s       | the same with the prompts' tokens                                                        |
| mean, p50, p99_e2e_s     | response time of a request: arrival to finish                                            |
| mean, p99_ttft_s         | time to first token: arrival to the end of the step that gave it                         |
| mean, p99_itl_s          | inter-token latency: time between a request's consecutive tokens, over all pairs         |
| slot_utilization         | tokens that a request gained / (max_num_seqs * steps)                                    |
| kv_waste                 | 1 - useful KV / KV held or promised, both added up over time                             |
| steps                    | model steps                                                                             |

A step offers one token to each of the max_num_seqs slots. A slot counts as used in a step when its request gained a
token; it does not when it is empty, holds a finished request, waits for others' prompts, or computes a part of a prompt
that is not the last. KV memory is read after each step and counts until the end of the next one. Useful is a token slot
with the KV of a request that is not finished; the rest is padding, the unfilled end of a block, room promised for
tokens to come, and rows kept after their end. Percentiles interpolate linearly between the two nearest values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import pairwise
from statistics import fmean, median

from chairlift.bench.trace import RequestTrace, StepTrace, Trace


@dataclass(frozen=True, slots=True)
class Metrics:
    """See the module. Times in seconds; an inter-token latency is 0 when no answer has two tokens."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    mean_e2e_s: float
    p50_e2e_s: float
    p99_e2e_s: float
    mean_ttft_s: float
    p99_ttft_s: float
    mean_itl_s: float
    p99_itl_s: float
    slot_utilization: float
    kv_waste: float
    steps: int
    duration_s: float


def measure(trace: Trace, ids: Collection[str] | None = None) -> Metrics:
    """The metrics of a run, or of one phase of it: the requests ``ids`` and the steps that served them."""
    requests = [request for request in trace.requests.values() if ids is None or request.id in ids]
    begin, end = min(request.arrival for request in requests), max(request.finish for request in requests)
    steps = [step for step in trace.steps if begin < step.end <= end]
    outputs = sum(len(request.token_times) for request in requests)
    prompts = sum(request.prompt_tokens for request in requests)
    e2e = [request.finish - request.arrival for request in requests]
    ttft = [request.token_times[0] - request.arrival for request in requests]
    itl = inter_token_latencies(requests)
    return Metrics(
        output_tokens_per_s=outputs / (end - begin),
        total_tokens_per_s=(outputs + prompts) / (end - begin),
        mean_e2e_s=fmean(e2e),
        p50_e2e_s=percentile(e2e, 50),
        p99_e2e_s=percentile(e2e, 99),
        mean_ttft_s=fmean(ttft),
        p99_ttft_s=percentile(ttft, 99),
        mean_itl_s=fmean(itl) if itl else 0.0,
        p99_itl_s=percentile(itl, 99) if itl else 0.0,
        slot_utilization=float(slot_utilization(steps, trace.max_num_seqs)),
        kv_waste=kv_waste(steps),
        steps=len(steps),
        duration_s=end - begin,
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` per cent lie, interpolated between the nearest two."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def inter_token_latencies(
    requests: Iterable[RequestTrace], begin: float = -math.inf, end: float = math.inf
) -> list[float]:
    """Times between consecutive tokens, of those that overlap with ``begin .. end``."""
    return [
        later - earlier
        for request in requests
        for earlier, later in pairwise(request.token_times)
        if earlier < end and later > begin
    ]


def slot_utilization(steps: Sequence[StepTrace], max_num_seqs: int) -> Fraction:
    """Slot-steps that gave a wanted token, as an exact fraction of all."""
    return Fraction(sum(step.sampled for step in steps), max_num_seqs * len(steps))


def kv_waste(steps: Sequence[StepTrace]) -> float:
    """The state after each step counts for the time until the end of the next."""
    held = useful = 0.0
    for before, after in pairwise(steps):
        seconds = after.end - before.end
        held += before.kv_held * seconds
        useful += before.kv_useful * seconds
    return 1 - useful / held if held else 0.0


def waste_if_reserved(trace: Trace, reserved: Callable[[RequestTrace], int]) -> float:
    """What `kv_waste` would be had each request held ``reserved`` token slots for as long as it was in a slot."""
    held = useful = 0.0
    for step, seconds, requests in states(trace):
        held += sum(map(reserved, requests)) * seconds
        useful += step.kv_useful * seconds
    return 1 - useful / held if held else 0.0


def states(trace: Trace) -> Iterator[tuple[StepTrace, float, list[RequestTrace]]]:
    """After each step but the last: for how many seconds its state lasts, and the unfinished requests in slots then."""
    for step, after in pairwise(trace.steps):
        aboard = [
            request
            for request in trace.requests.values()
            if request.finish > step.end and any(stay.board < step.end < stay.leave for stay in request.stays)
        ]
        yield step, after.end - step.end, aboard


def middle(runs: Sequence[Metrics]) -> Metrics:
    """The median of each number over repetitions."""
    values = {field.name: median(getattr(run, field.name) for run in runs) for field in fields(Metrics)}
    values["steps"] = round(values["steps"])
    return Metrics(**values)
