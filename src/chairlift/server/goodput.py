"""Whether a sample was good: in time for what the server promises (--slo-ttft, --slo-itl) and its client asked for."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.config import EngineConfig
from chairlift.core.request import FinishReason, SamplingParams

OUTCOMES = ("good", "late_ttft", "late_itl", "late_deadline")


@dataclass(slots=True)
class Timing:
    """When a sample's tokens reached this process, in seconds of its clock; of no token yet, None."""

    arrival: float
    num_tokens: int = 0
    first: float | None = None
    last: float | None = None

    def add(self, tokens: int, now: float) -> None:
        self.num_tokens += tokens
        self.first = now if self.first is None else self.first
        self.last = now

    @property
    def ttft(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.first is None else self.first - self.arrival

    @property
    def mean_itl(self) -> float:
        """Seconds between two tokens, on average; 0 of fewer than two."""
        if self.first is None or self.last is None or self.num_tokens < 2:
            return 0.0
        return (self.last - self.first) / (self.num_tokens - 1)


def outcome(config: EngineConfig, params: SamplingParams, timing: Timing, reason: FinishReason, ended: float) -> str:
    """One of `OUTCOMES`: the first target that a finished sample missed. Without targets every sample is good."""
    ttft, ended_by_deadline = timing.ttft, reason is FinishReason.DEADLINE
    if ttft is None:
        late_ttft = ended_by_deadline and params.ttft_ms is not None
    else:
        late_ttft = any(_over(ttft, limit) for limit in (config.slo_ttft, params.ttft_ms))
    if late_ttft:
        return "late_ttft"
    if _over(timing.mean_itl, config.slo_itl):
        return "late_itl"
    if ended_by_deadline or _over(ended - timing.arrival, params.deadline_ms):
        return "late_deadline"
    return "good"


def _over(seconds: float, limit_ms: float | None) -> bool:
    return limit_ms is not None and seconds * 1000 > limit_ms
