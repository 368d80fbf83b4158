"""Places to swap KV to: host memory, and disk. Each has its blocks; block ops know them by one range of numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from chairlift.core.plan import Capacity
from chairlift.core.pool import BlockPool


@dataclass(frozen=True, slots=True)
class Tier:
    """One place. Its blocks have the numbers ``first ..``, called addresses here."""

    pool: BlockPool
    first: int
    on_disk: bool

    def find(self, content: bytes) -> int | None:
        """The address of the block that holds this content."""
        block = self.pool.find(content)
        return None if block is None else self.first + block

    def take(self) -> int:
        """A free block's address, now owned once. There must be one."""
        return self.first + self.pool.take()[0]


class Tiers:
    """All places, the fastest first. False if there is none."""

    def __init__(self, capacity: Capacity, disk_contents: Iterable[tuple[int, bytes]] = ()) -> None:
        """``disk_contents``: (block of the disk, content hash) kept from an earlier run."""
        self._tiers: list[Tier] = []
        if capacity.num_host_blocks:
            self._tiers.append(Tier(BlockPool(capacity.num_host_blocks), 0, on_disk=False))
        if capacity.num_disk_blocks:
            pool = BlockPool(capacity.num_disk_blocks, disk_contents)
            self._tiers.append(Tier(pool, capacity.num_host_blocks, on_disk=True))

    def __bool__(self) -> bool:
        return bool(self._tiers)

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers)

    @property
    def num_free(self) -> int:
        return sum(tier.pool.num_free for tier in self._tiers)

    @property
    def last(self) -> Tier | None:
        """The slowest, where cached prefixes go."""
        return self._tiers[-1] if self._tiers else None

    def find(self, content: bytes) -> int | None:
        """The address of the block that holds this content."""
        return next((found for tier in self._tiers if (found := tier.find(content)) is not None), None)

    def refs(self, address: int) -> int:
        pool, block = self._locate(address)
        return pool.refs(block)

    def take(self) -> int:
        """A free block's address, of the fastest place that has one, now owned once."""
        return next(tier for tier in self._tiers if tier.pool.num_free).take()

    def share(self, address: int) -> None:
        pool, block = self._locate(address)
        pool.share(block)

    def drop(self, address: int) -> None:
        pool, block = self._locate(address)
        pool.drop(block)

    def index(self, address: int, content: bytes) -> None:
        pool, block = self._locate(address)
        pool.index(block, content)

    def forget(self, addresses: Iterable[int]) -> None:
        """What these blocks were known for is not there."""
        for address in addresses:
            pool, block = self._locate(address)
            pool.forget([block])

    def forget_host(self) -> None:
        """Nothing is known any more of what host memory holds. (The disk checks what it reads.)"""
        for tier in self._tiers:
            if not tier.on_disk:
                tier.pool.forget(range(tier.pool.num_blocks))

    def check(self, owners: Counter[int]) -> None:
        """Recounts, given how often each address is owned."""
        for tier in self._tiers:
            blocks = range(tier.pool.num_blocks)
            tier.pool.check(Counter({block: owners[tier.first + block] for block in blocks}))

    def _locate(self, address: int) -> tuple[BlockPool, int]:
        tier = next(tier for tier in reversed(self._tiers) if tier.first <= address)
        return tier.pool, address - tier.first
