"""`KVGroups`: which layers share a KV block, so that layers with a sliding window give blocks back as it passes."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from chairlift.core.layout import most_held
from chairlift.models.spec import DecoderSpec

MAX_PADDING = 0.1  # of a cache, what may be left empty for the sake of fewer groups


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The layers of a decoder, divided into groups that all draw blocks from one pool.

    All layers of a group have the same window, and every block has room for as many layers as the largest group has,
    so that it serves any group. With G groups, position p of group g lives in block ``p // block_size * G + g`` of a
    block table.

    Fields:
        windows: per group, the sliding window in positions; 0 for all of the context. Ascending.
        layers: per group, its layers, ascending.
    """

    windows: tuple[int, ...]
    layers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, spec: DecoderSpec) -> KVGroups:
        """The division of this decoder's layers: the fewest groups that leave little of a block empty."""
        layer_windows = spec.layer_windows or (0,) * spec.num_layers
        kinds: dict[int, list[int]] = defaultdict(list)
        for layer, window in enumerate(layer_windows):
            kinds[window].append(layer)
        counts = [len(layers) for layers in kinds.values()]

        def groups(size: int) -> int:
            return sum(-(-count // size) for count in counts)

        def padded(size: int) -> bool:
            return groups(size) * size > (1 + MAX_PADDING) * len(layer_windows)

        # A divisor of all counts leaves nothing empty, so there is always one that will do.
        size = min({*counts, math.gcd(*counts)}, key=lambda size: (padded(size), groups(size), size))
        parts = [
            (window, tuple(layers[i : i + size]))
            for window, layers in sorted(kinds.items())
            for i in range(0, len(layers), size)
        ]
        return cls(tuple(window for window, _ in parts), tuple(layers for _, layers in parts))

    def blocks(self, length: int, block_size: int, chunk: int) -> int:
        """Most blocks that a sequence of ``length`` tokens holds at once; a step computes at most ``chunk`` of it."""
        return most_held(self.windows, length, block_size, chunk)
