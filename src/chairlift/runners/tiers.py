"""`BlockStore`: where KV blocks go when they leave the device, host memory first and then a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from chairlift.core.plan import BlockOp, BlockOpKind
from chairlift.errors import ConfigError
from chairlift.log import exact_bytes

if TYPE_CHECKING:
    from chairlift.runners.disk import DiskFile


class BlockStore:
    """Executes the block ops of plans.

    Args:
        device: [num_blocks, block_bytes], the memory of the device's blocks, written in place.
        num_host_blocks: blocks of host memory, all reserved now. They have the numbers 0 .. num_host_blocks - 1.
        disk: has the numbers from num_host_blocks on; closed by `close`.

    Raises ConfigError when there is not so much memory.
    """

    def __init__(self, device: NDArray[np.uint8], num_host_blocks: int, disk: DiskFile | None = None) -> None:
        if device.ndim != 2 or device.dtype != np.uint8 or not device.flags.c_contiguous or not device.flags.writeable:
            raise ValueError("device must be a contiguous, writeable array of bytes, [num_blocks, block_bytes]")
        self._device = device
        self._host = _reserve(num_host_blocks, device.shape[1])
        self._disk = disk
        self._num_host_blocks = num_host_blocks
        self._num_places = num_host_blocks + (disk.num_blocks if disk else 0)

    def apply(self, ops: Sequence[BlockOp]) -> tuple[int, ...]:
        """Copies blocks, with the outcome of doing so one by one, in order.

        Returns the numbers of the host and disk blocks that were to be swapped in and turned out damaged; the device's
        blocks hold zeros then. Raises ValueError, before anything is copied, for a block that does not exist.
        """
        for op in ops:
            self._check(op)
        device, host, num_host = self._device, self._host, self._num_host_blocks
        damaged: dict[int, None] = {}
        for op, count in self._runs(ops):
            src, dst = slice(op.src, op.src + count), slice(op.dst, op.dst + count)
            if op.kind is BlockOpKind.COPY:
                device[dst] = device[src]
            elif op.kind is BlockOpKind.SWAP_OUT and op.dst < num_host:
                host[dst] = device[src]
            elif op.kind is BlockOpKind.SWAP_IN and op.src < num_host:
                device[dst] = host[src]
            elif self._disk is not None:
                if op.kind is BlockOpKind.SWAP_OUT:
                    self._disk.write(op.dst - num_host, device[op.src], op.content)
                elif not self._disk.read(op.src - num_host, device[op.dst], op.content):
                    damaged[op.src] = None
        return tuple(damaged)

    def close(self) -> None:
        """Gives the host memory back and closes the file; swaps raise ValueError from then on."""
        if self._disk is not None:
            self._disk.close()
        self._disk, self._host = None, self._host[:0].copy()
        self._num_host_blocks = self._num_places = 0

    def _check(self, op: BlockOp) -> None:
        num_src = num_dst = len(self._device)
        if op.kind is BlockOpKind.SWAP_OUT:
            num_dst = self._num_places
        elif op.kind is BlockOpKind.SWAP_IN:
            num_src = self._num_places
        if not (0 <= op.src < num_src and 0 <= op.dst < num_dst):
            raise ValueError(f"{op.kind.name} {op.src} to {op.dst}: there are {num_src} and {num_dst} blocks")

    def _runs(self, ops: Sequence[BlockOp]) -> Iterator[tuple[BlockOp, int]]:
        """(first op, number of ops) of the stretches that one copy can do."""
        first, count = 0, 0
        for op in ops:
            if count and self._joins(ops[first], count, op):
                count += 1
                continue
            if count:
                yield ops[first], count
            first, count = first + count, 1
        if count:
            yield ops[first], count

    def _joins(self, first: BlockOp, count: int, op: BlockOp) -> bool:
        """Whether ``op`` can be copied at once with the ``count`` ops from ``first`` on, which it follows."""
        if op.kind is not first.kind or op.src != first.src + count or op.dst != first.dst + count:
            return False
        if op.kind is BlockOpKind.COPY:  # within one memory: none may read what another of them writes
            return abs(first.dst - first.src) > count
        place = op.dst if op.kind is BlockOpKind.SWAP_OUT else op.src
        return place < self._num_host_blocks  # the file's are checked one by one


def _reserve(num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """Host memory [num_blocks, block_bytes], each page of it there already."""
    try:
        memory = np.empty((num_blocks, block_bytes), np.uint8)
    except MemoryError:
        raise ConfigError(
            f"--swap-space asks for {exact_bytes(num_blocks * block_bytes)} of host memory, more than can be had; "
            "give less, or free some"
        ) from None
    memory.fill(0)
    return memory
