"""Options that say how to sample, shared by chat and generate."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.config import option
from chairlift.core.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    max_tokens: int | None = option(None, "Most tokens to generate. Default: until the model ends or the context does.")
    temperature: float = option(0.7, "0 always takes the likeliest token; higher is more varied.")
    top_p: float = option(1.0, "Sample from the likeliest tokens that together have this probability.")
    top_k: int = option(0, "Sample from this many likeliest tokens; 0 from all.")
    sampling_seed: int | None = option(None, "Same seed, same text. Default: random.")

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.sampling_seed,
        )
