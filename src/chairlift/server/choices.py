"""From a prompt's samples to its choices: all of them, or the best n of best_of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chairlift.core.request import SamplingParams


def chooses(params: SamplingParams) -> bool:
    """Whether more samples are drawn than returned, so that which are is known only when all have ended."""
    return params.width > params.n and not params.use_beam_search


def engine_params(params: SamplingParams) -> SamplingParams:
    """What the engine is asked for: to choose among samples takes their logprobs, whether the client wants them or
    not."""
    return replace(params, logprobs=0) if chooses(params) and params.logprobs is None else params


def mean_logprob(total: float, num_tokens: int) -> float:
    """What a sample is judged by. One without tokens is worse than all others."""
    return total / num_tokens if num_tokens else float("-inf")


def best(means: Sequence[float], n: int) -> list[int]:
    """Positions of the n greatest, best first; of equals the earlier."""
    return sorted(range(len(means)), key=lambda i: -means[i])[:n]
