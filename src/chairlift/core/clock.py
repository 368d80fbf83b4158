"""The two kinds of time an engine can live in."""

from __future__ import annotations

import time


class WallClock:
    """Real time, monotonic."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """Simulated time: stands still until somebody moves it."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._now += seconds
