"""Blocks of KV memory, whatever they lie in: reference counts, the free list, and the index of cached contents."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable


class BlockPool:
    """``num_blocks`` blocks with reference counts. A block with count 0 is free, and in exactly one of two lists:
    ``_blank`` (no known contents, reused first) or ``_cached`` (contents indexed by hash, oldest first).

    A free block that still holds a cached prefix is free all the same: whoever needs a block takes it, the least
    recently freed first, and its contents are forgotten at that moment.
    """

    def __init__(self, num_blocks: int, contents: Iterable[tuple[int, bytes]] = ()) -> None:
        """``contents``: what some of the blocks are known to hold already, by block."""
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        for block, content in contents:
            if content not in self._by_hash:
                self._hashes[block] = content
                self._by_hash[content] = block
                self._cached[block] = None
        self._blank = [block for block in range(num_blocks - 1, -1, -1) if self._hashes[block] is None]

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def find(self, content: bytes) -> int | None:
        """The block that holds this content, free or owned."""
        return self._by_hash.get(content)

    def contents(self) -> list[tuple[int, bytes]]:
        """All blocks whose content is known, with it; those in use first, then from the least recently freed on."""
        used = [(block, content) for content, block in self._by_hash.items() if self._refs[block]]
        return used + [(block, content) for block in self._cached if (content := self._hashes[block])]

    def take(self) -> tuple[int, bytes | None]:
        """A free block, now owned once, and the content it was known for until now. The caller has checked that there
        is one."""
        content = None
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            content = self._hashes[block]
            assert content is not None
            del self._by_hash[content]
            self._hashes[block] = None
        self._refs[block] = 1
        return block, content

    def share(self, block: int) -> None:
        """One more owner; a cached block without any leaves the free list."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def drop(self, block: int) -> None:
        """One owner less. This is the only place where a block becomes free."""
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def index(self, block: int, content: bytes) -> None:
        """From now on this block, which has an owner, can be found by its content, unless another holds the same."""
        if self._hashes[block] is None and content not in self._by_hash:
            self._hashes[block] = content
            self._by_hash[content] = block

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks can no more be found by what they held."""
        for block in blocks:
            content = self._hashes[block]
            if content is not None:
                del self._by_hash[content]
                self._hashes[block] = None
                if self._refs[block] == 0:
                    del self._cached[block]
                    self._blank.append(block)

    def check(self, owners: Counter[int]) -> None:
        """Compares every count and list with the truth, given how often each block is owned."""
        free = set(self._blank) | set(self._cached)
        assert len(free) == self.num_free, "a block is in the free lists twice"
        for block, refs in enumerate(self._refs):
            count, content = owners[block], self._hashes[block]
            assert refs == count, f"block {block}: refs {refs}, owners {count}"
            assert (block in free) == (count == 0), f"block {block} is owned and free, or neither"
            assert content is None or self._by_hash.get(content) == block, f"block {block} is indexed wrongly"
            assert (block in self._cached) == (count == 0 and content is not None), f"block {block}: wrong list"
        assert len(self._by_hash) == sum(content is not None for content in self._hashes), "stale hash in the index"
