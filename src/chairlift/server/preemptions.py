"""The warning that requests are preempted: how often, at what cost, and what to change. Once a minute at most."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from chairlift.config import EngineConfig
from chairlift.config_checks import swaps
from chairlift.core.plan import StepStats
from chairlift.server.metrics import gain

INTERVAL_SECONDS = 60.0


class PreemptionLog:
    """Watches the engine's totals; `step` takes its state after each step."""

    def __init__(self, config: EngineConfig, logger: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._now = now
        self._advice = advice(config)
        self._seen = StepStats()
        self._preemptions = self._swaps = self._tokens = 0  # since the last warning
        self._warned: float | None = None

    def step(self, stats: StepStats) -> None:
        seen, self._seen = self._seen, stats
        if stats.total_preemptions != seen.total_preemptions:
            self._preemptions += gain(seen.total_preemptions, stats.total_preemptions)
            self._swaps += gain(seen.total_swaps, stats.total_swaps)
            self._tokens += gain(seen.total_recomputed_tokens, stats.total_recomputed_tokens)
        if not self._preemptions:
            return
        now = self._now()
        if self._warned is not None and now - self._warned < INTERVAL_SECONDS:
            return
        since = "since the start" if self._warned is None else f"in the last {now - self._warned:.0f} s"
        self._logger.warning("%s %s: %s; %s", _count(self._preemptions), since, self._cost(), self._advice)
        self._preemptions = self._swaps = self._tokens = 0
        self._warned = now

    def _cost(self) -> str:
        parts = [f"{self._tokens:,} tokens to recompute"] if self._tokens or not self._swaps else []
        if self._swaps:
            parts.append(f"the KV of {self._swaps:,} swapped out")
        return ", ".join(parts)


def _count(preemptions: int) -> str:
    return "1 preemption" if preemptions == 1 else f"{preemptions:,} preemptions"


def advice(config: EngineConfig) -> str:
    """Which settings make preemptions rarer or cheaper, of those that are not set to do so already."""
    ways = ["raise --kv-cache-memory", "lower --max-num-seqs"]
    if config.admission not in ("reserve", "peak"):
        ways.append("board only with room, by --admission peak")
    if not swaps(config):
        ways.append("keep the KV, by --swap-space")
    elif config.preemption_mode == "recompute":
        ways.append("keep the KV, by --preemption-mode auto")
    if config.order == "priority" or config.fair_tenants:
        right = "--order priority" if config.order == "priority" else "--fair-tenants"
        return f"some are what {right} asks for; to have fewer for want of KV blocks, {_or(ways)}"
    return f"no request is lost, but if that is too slow, {_or(ways)}"


def _or(ways: list[str]) -> str:
    return ", ".join(ways[:-1]) + f", or {ways[-1]}"
