"""Time in a world."""

from __future__ import annotations

from math import ulp

from chairlift.core.clock import VirtualClock


class Clock(VirtualClock):
    """Virtual time that can be set, like a wall clock; ``true`` time is what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.true = self.offset = 0.0
        self.latest = 0.0  # the engine's time: the greatest that it was shown

    @property
    def shown(self) -> float:
        return self.true + self.offset

    def now(self) -> float:
        self.latest = max(self.latest, self.shown)
        return self.shown

    def pass_until(self, true: float) -> None:
        self.true = max(self.true, true)

    def show(self, time: float) -> None:
        """Lets time pass until the clock shows this."""
        self.true = max(self.true, time - self.offset)
        while self.shown < time:  # rounded
            self.true += ulp(max(self.true, time))
