"""How many blocks a sequence takes: arithmetic on lengths, with and without sliding windows."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.request import Request

NO_BLOCK = -1
"""Stands in a block table where nothing will be read again."""


def most_held(windows: Sequence[int], length: int, block_size: int, chunk: int) -> int:
    """Most blocks that a sequence of ``length`` positions holds at a time, over all groups, when a step computes at
    most ``chunk`` of them (0: it decodes)."""
    whole = -(-length // block_size)
    return sum(min(whole, _window_blocks(window, block_size, chunk)) if window else whole for window in windows)


def _window_blocks(window: int, block_size: int, chunk: int) -> int:
    """Of one windowed group. A window may begin within a block, and the end of a step in flight shows what it has
    passed; a chunk adds its own blocks."""
    return -(-(window - 1) // block_size) + 2 - (-chunk // block_size)


class Layout:
    """Attributes:
    windows: of each group of layers, in tokens; 0 for one that sees everything.
    full: the groups that see everything.
    windowed: (group, window) of the others.
    """

    def __init__(self, windows: Sequence[int], block_size: int, max_chunk: int) -> None:
        """``max_chunk``: most tokens of a request computed in one step."""
        self.windows = windows
        self.block_size = block_size
        self.full = [g for g, window in enumerate(windows) if window == 0]
        self.windowed = [(g, window) for g, window in enumerate(windows) if window > 0]
        self._max_chunk = max_chunk

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group for so many positions."""
        return -(-num_tokens // self.block_size)

    def held(self, length: int, prefilling: bool = False) -> int:
        """Most blocks that a sequence of so many positions holds at a time, over all groups."""
        return most_held(self.windows, length, self.block_size, self._max_chunk if prefilling else 0)

    def window_blocks(self, window: int, prefilling: bool) -> int:
        """Most blocks of a windowed group that a sequence holds at a time."""
        return _window_blocks(window, self.block_size, self._max_chunk if prefilling else 0)

    def full_blocks(self, request: Request) -> int:
        """Blocks that all samples of a request need together when each reaches its greatest length."""
        whole = self.whole_group(request)
        caps = (min(whole, request.num_samples * self.window_blocks(window, True)) for _, window in self.windowed)
        return whole * len(self.full) + sum(caps)

    def whole_group(self, request: Request) -> int:
        """The same for one group that never gives blocks back.

        Whole prompt blocks are shared by the n samples; the rest each sample has to itself. A prompt that ends within
        a block costs one more, since any of the samples may be the first to write there.
        """
        n, whole = request.num_samples, self.blocks_for(request.max_len)
        if n == 1:
            return whole
        shared, rest = divmod(request.num_prompt, self.block_size)
        return shared + n * (whole - shared) + (rest > 0)

    def first_kept(self, position: int, window: int) -> int:
        """The first block that a query at this position, or a later one, still reads."""
        return max(0, position - window + 1) // self.block_size if window else 0
