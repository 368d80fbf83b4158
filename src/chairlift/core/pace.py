"""How long a step takes: a model learnt from the engine's own steps, and the token budget that keeps a target by it.

A step costs something in itself, something for each row, and something for each position that a row attends to. The
three rates are estimated by recursive least squares that slowly forgets, so they follow the machine. How far the last
steps strayed above the model is kept too, for the ratio that 99 of 100 stay below.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import inf

FORGETTING = 0.995  # weight of what is one step older
MIN_STEPS = 8  # before the model is believed
FIRST_CHUNK = 16  # prompt tokens in a step beside decodes until then
LAST_STEPS = 128
MOST_RATIO = 2.5  # a machine that strays farther is not kept in check by computing ever less
_TOKENS, _POSITIONS = 1e-2, 1e-5  # bring the features to the size of 1
_TOGETHER = 0.98  # squared correlation of the two slopes from which on only their sum is known

Vector = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: rows, and positions that they attend to, over all rows."""

    tokens: int = 0
    positions: int = 0

    def plus(self, start: int, n: int) -> Work:
        """With ``n`` more rows, at positions from ``start`` on."""
        return Work(self.tokens + n, self.positions + n * start + n * (n + 1) // 2)


NO_WORK = Work()


class Pace:
    """Predicts the seconds of steps, and counts what swapping a block costs."""

    def __init__(self) -> None:
        self._weights = 0.0, 0.0, 0.0  # seconds of a step, of its tokens, of its positions
        self._rates = self._weights  # the same, no slope below 0: more work never takes less time
        # The upper triangle of a symmetric matrix: a difference between its halves would grow without bounds.
        self._covariance = 1e4, 0.0, 0.0, 1e4, 0.0, 1e4
        self._ratios: deque[float] = deque(maxlen=LAST_STEPS)  # of a step's time to what was foreseen
        self._steps = 0
        self._swap_seconds = 0.0
        self._swap_blocks = 0.0

    @property
    def known(self) -> bool:
        return self._steps >= MIN_STEPS

    def seconds(self, work: Work) -> float:
        """Predicted time of a step; 0 while nothing is known."""
        constant, token, position = self._rates
        return max(0.0, constant + token * work.tokens * _TOKENS + position * work.positions * _POSITIONS)

    def safe_seconds(self, work: Work) -> float:
        """A time that 99 of 100 such steps stay below."""
        return self.seconds(work) * self._ratio

    @property
    def _ratio(self) -> float:
        """The greatest of the last steps' ratios: one of 129 is greater than the 128 before it."""
        return min(max(1.0, *self._ratios), MOST_RATIO) if self._ratios else 1.1

    def learn(self, work: Work, seconds: float) -> None:
        """A step took so long."""
        if not 0.0 < seconds < inf:
            return
        if self.known:
            self._ratios.append(seconds / max(self.seconds(work), 1e-9))
        # By elements: this is done once a step, and loops over three would take several times as long.
        y, z = work.tokens * _TOKENS, work.positions * _POSITIONS
        a, b, c, d, e, f = self._covariance
        pa, pb, pc = a + b * y + c * z, b + d * y + e * z, c + e * y + f * z
        scale = 1.0 / (FORGETTING + pa + pb * y + pc * z)
        constant, token, position = self._weights
        error = scale * (seconds - constant - token * y - position * z)
        self._weights = constant + pa * error, token + pb * error, position + pc * error
        keep = FORGETTING if a + d + f < 1e6 else 1.0  # while all steps are alike nothing is learnt, nor forgotten
        self._covariance = (
            (a - scale * pa * pa) / keep,
            (b - scale * pa * pb) / keep,
            (c - scale * pa * pc) / keep,
            (d - scale * pb * pb) / keep,
            (e - scale * pb * pc) / keep,
            (f - scale * pc * pc) / keep,
        )
        self._rates = self._plausible()
        self._steps += 1

    def _plausible(self) -> Vector:
        """The weights, but for slopes that cannot be: one below 0 is held at 0, and the others make up for it as far as
        they are known together. Of steps that all had about as many positions a token only the sum of the slopes is
        known: then positions are held at 0, since a row costs something in itself."""
        a, b, c, d, e, f = self._covariance
        weights = list(self._weights)
        together = e * e > _TOGETHER * d * f
        if not together and min(weights[1:]) >= 0.0:
            return self._weights
        covariance = [[a, b, c], [b, d, e], [c, e, f]]
        for i in (2, 1) if together or weights[2] <= weights[1] else (1, 2):
            if (weights[i] < 0.0 or (together and i == 2)) and covariance[i][i] > 0.0:
                gain, held = [row[i] / covariance[i][i] for row in covariance], weights[i]
                weights = [weight - g * held for weight, g in zip(weights, gain, strict=True)]
                covariance = [[covariance[j][k] - gain[j] * covariance[i][k] for k in range(3)] for j in range(3)]
        constant, token, position = weights
        return constant, max(0.0, token), max(0.0, position)

    def learn_swap(self, blocks: int, seconds: float) -> None:
        """So many blocks were swapped, in or out."""
        self._swap_blocks = 0.9 * self._swap_blocks + blocks
        self._swap_seconds = 0.9 * self._swap_seconds + seconds

    def swap_seconds(self, blocks: int) -> float:
        """Predicted time to swap so many blocks; 0 while nothing is known."""
        return blocks * self._swap_seconds / self._swap_blocks if self._swap_blocks else 0.0

    def chunk(self, work: Work, start: int, most: int, target: float, least: int = 0) -> int:
        """Most rows, from position ``start`` on, that a step may have beside ``work`` and safely keep the target; but
        ``least`` in any case."""
        if not self.known:
            return min(most, FIRST_CHUNK)
        if self.safe_seconds(work) <= target:  # else no chunk is small enough: then it is to hold for most steps
            target /= self._ratio
        low, high = min(most, least), most
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(work.plus(start, middle)) <= target:
                low = middle
            else:
                high = middle - 1
        return low
