"""From the times at which tokens came to the figures that are compared, and what is asked of Chairlift in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peers.workloads import RATES, Workload


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request.

    Fields:
        due: when it was due, in seconds after the start.
        times: when pieces of it came. Most engines send a token a piece.
        tokens: how many tokens there were.
        text: of a server; "" in process.
        ids: in process; empty of a server.
    """

    due: float
    times: tuple[float, ...]
    tokens: int
    text: str = ""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Fields:
        key: of what `measure` returns.
        lower: less is better.
        target: how many times as good as the best peer Chairlift should be; of latencies, at most what share of it.
    """

    workload: str
    key: str
    title: str
    lower: bool
    target: float

    @property
    def as_share(self) -> bool:
        return self.target < 1

    def best(self, values: Sequence[float]) -> float:
        return min(values) if self.lower else max(values)

    def ratio(self, chairlift: float, peer: float) -> float:
        """Times as good as the peer; for a target that is a share, the share of the peer's time."""
        return chairlift / peer if self.as_share or not self.lower else peer / chairlift

    def met(self, ratio: float) -> bool:
        return ratio <= self.target if self.as_share else ratio >= self.target


FIGURES = (
    Figure("W-single", "output_per_s", "token/s", lower=False, target=1.8),
    Figure("W-prefill", "seconds", "s", lower=True, target=2.0),
    Figure("W-batch", "output_per_s", "token/s", lower=False, target=2.2),
    Figure("W-long", "output_per_s", "token/s", lower=False, target=2.5),
    Figure("W-seed", "output_per_s", "token/s", lower=False, target=2.0),
    *(
        Figure(f"W-rate-{rate}", key, title, lower=True, target=0.4)
        for rate in RATES
        for key, title in (("ttft_p99", "P99 TTFT, s"), ("itl_p99", "P99 ITL, s"))
    ),
)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def measure(workload: Workload, answers: Sequence[Answer]) -> dict[str, float]:
    """All figures of one run. Raises ValueError unless each request got exactly its tokens."""
    for request, answer in zip(workload.requests, answers, strict=True):
        if answer.tokens != request.output or not answer.times:
            raise ValueError(f"a request for {request.output} tokens got {answer.tokens}")
    output = sum(answer.tokens for answer in answers)
    seconds = max(answer.times[-1] for answer in answers) - min(answer.due for answer in answers)
    first = [answer.times[0] - answer.due for answer in answers]
    gaps = [later - sooner for answer in answers for sooner, later in zip(answer.times, answer.times[1:], strict=False)]
    figures = {"seconds": seconds, "output_tokens": output, "output_per_s": output / seconds}
    figures |= {"ttft_p50": percentile(first, 50), "ttft_p99": percentile(first, 99)}
    if gaps:
        figures |= {"itl_p50": percentile(gaps, 50), "itl_p99": percentile(gaps, 99), "itl_max": max(gaps)}
    return figures | {"pieces": sum(len(answer.times) for answer in answers)}
