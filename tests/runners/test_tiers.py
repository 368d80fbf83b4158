"""Block ops, coalesced, against the same ops one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chairlift.core.plan import BlockOp, BlockOpKind
from chairlift.errors import ConfigError
from chairlift.runners.disk import DiskFile
from chairlift.runners.tiers import BlockStore

COPY, OUT, IN = BlockOpKind.COPY, BlockOpKind.SWAP_OUT, BlockOpKind.SWAP_IN
BYTES = 24
NUM_DEVICE, NUM_HOST, NUM_DISK = 10, 6, 4


def numbered(count: int, size: int = BYTES) -> NDArray[np.uint8]:
    """[count, size], each block different, and none of zeros."""
    return (np.arange(1, count + 1, dtype=np.uint8)[:, None] + np.zeros(size, np.uint8)).copy()


class OneByOne:
    """What a list of ops means."""

    def __init__(self, device: NDArray[np.uint8]) -> None:
        self.device = device.copy()
        self.places: list[NDArray[np.uint8]] = [np.zeros(BYTES, np.uint8) for _ in range(NUM_HOST + NUM_DISK)]
        self.contents: dict[int, bytes] = {}  # of the disk's blocks that were written
        self.damaged: list[int] = []

    def apply(self, ops: Sequence[BlockOp]) -> tuple[int, ...]:
        self.damaged = []
        for op in ops:
            if op.kind is COPY:
                self.device[op.dst] = self.device[op.src].copy()
            elif op.kind is OUT:
                self.places[op.dst] = self.device[op.src].copy()
                self.contents[op.dst] = op.content
            else:
                self.device[op.dst] = self.swap_in(op)
        return tuple(dict.fromkeys(self.damaged))

    def swap_in(self, op: BlockOp) -> NDArray[np.uint8]:
        if op.src >= NUM_HOST:
            stored = self.contents.get(op.src)
            if stored is None or op.content not in (b"", stored):
                self.damaged.append(op.src)
                return np.zeros(BYTES, np.uint8)
        return self.places[op.src].copy()


@st.composite
def stretches(draw: st.DrawFn) -> list[BlockOp]:
    """Ops that often belong together: mostly rising by one, at times standing still or falling."""
    kind = draw(st.sampled_from(list(BlockOpKind)))
    num_src = NUM_HOST + NUM_DISK if kind is IN else NUM_DEVICE
    num_dst = NUM_HOST + NUM_DISK if kind is OUT else NUM_DEVICE
    src, dst = draw(st.integers(0, num_src - 1)), draw(st.integers(0, num_dst - 1))
    step_src, step_dst = draw(st.sampled_from([(1, 1)] * 6 + [(-1, -1), (1, 0), (0, 1), (2, 1), (1, -1)]))
    content = draw(st.sampled_from([b"", b"", b"a", b"b"]))
    return [
        BlockOp(kind, src + i * step_src, dst + i * step_dst, content)
        for i in range(draw(st.integers(1, 10)))
        if 0 <= src + i * step_src < num_src and 0 <= dst + i * step_dst < num_dst
    ]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> DiskFile:
    return DiskFile.open(tmp_path_factory.mktemp("disk") / "swap", 8192 + NUM_DISK * 4096, BYTES, b"")


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans=st.lists(st.lists(stretches(), max_size=6), min_size=1, max_size=3))
def test_as_if_one_by_one(disk: DiskFile, plans: list[list[list[BlockOp]]]) -> None:
    """Overlapping copies, chains of out and in, stretches over the end of host memory, blocks never written."""
    assert disk.num_blocks == NUM_DISK
    for number in range(NUM_DISK):  # what earlier examples left
        disk._seals[number] = 0
    device = numbered(NUM_DEVICE)
    truth = OneByOne(device)
    store = BlockStore(device, NUM_HOST, disk)
    for plan in plans:
        ops = [op for part in plan for op in part]
        assert store.apply(ops) == truth.apply(ops)
        assert (device == truth.device).all()
    for place in range(NUM_HOST):
        assert store.apply([BlockOp(IN, place, 0)]) == ()
        assert (device[0] == truth.places[place]).all()


@pytest.mark.parametrize(
    ("ops", "runs"),
    [
        ([], []),
        ([BlockOp(COPY, i, i + 5) for i in range(5)], [5]),
        ([BlockOp(COPY, i, i + 3) for i in range(7)], [3, 3, 1]),  # the fourth reads what the first wrote
        ([BlockOp(COPY, i + 3, i) for i in range(7)], [3, 3, 1]),
        ([BlockOp(COPY, i, i + 1) for i in range(3)], [1, 1, 1]),
        ([BlockOp(COPY, i, i) for i in range(3)], [1, 1, 1]),
        ([BlockOp(OUT, i, i) for i in range(6)], [6]),
        ([BlockOp(OUT, i + 2, i + 3) for i in range(5)], [3, 1, 1]),  # two of them go to disk
        ([BlockOp(IN, i + 3, i) for i in range(5)], [3, 1, 1]),
        ([BlockOp(OUT, 0, 1), BlockOp(OUT, 1, 2), BlockOp(IN, 2, 3), BlockOp(IN, 3, 4)], [2, 2]),
        ([BlockOp(IN, 1, 3), BlockOp(IN, 2, 5), BlockOp(IN, 4, 6), BlockOp(IN, 3, 7)], [1, 1, 1, 1]),
    ],
)
def test_runs(disk: DiskFile, ops: list[BlockOp], runs: list[int]) -> None:
    store = BlockStore(numbered(NUM_DEVICE), NUM_HOST, disk)
    found = list(store._runs(ops))
    assert [count for _, count in found] == runs
    starts = [sum(runs[:i]) for i in range(len(runs))]
    assert [op for op, _ in found] == [ops[start] for start in starts]


def test_out_and_in_again_within_one_list(disk: DiskFile) -> None:
    """The device's block is given away, used, and taken back."""
    device = numbered(NUM_DEVICE)
    store = BlockStore(device, NUM_HOST, disk)
    out = [BlockOp(OUT, i, NUM_HOST - 2 + i, b"h%d" % i) for i in range(4)]
    over = [BlockOp(COPY, 9, i) for i in range(4)]
    back = [BlockOp(IN, NUM_HOST - 2 + i, 4 + i, b"h%d" % i) for i in range(4)]
    assert store.apply([*out, *over, *back]) == ()
    assert device[:, 0].tolist() == [10, 10, 10, 10, 1, 2, 3, 4, 9, 10]


def test_damaged_blocks_are_named_and_zero(tmp_path: Path) -> None:
    path = tmp_path / "swap"
    disk = DiskFile.open(path, 8192 + NUM_DISK * 4096, BYTES, b"")
    device = numbered(NUM_DEVICE)
    store = BlockStore(device, NUM_HOST, disk)
    store.apply([BlockOp(OUT, i, NUM_HOST + i, b"h%d" % i) for i in range(4)])
    raw = bytearray(path.read_bytes())
    raw[8192 + 4096 * 2 + 5] ^= 1
    path.write_bytes(raw)
    back = [BlockOp(IN, NUM_HOST + i, 9 - i, b"h%d" % (i if i != 1 else 7)) for i in range(4)]
    assert store.apply([*back, back[2]]) == (NUM_HOST + 1, NUM_HOST + 2)
    assert device[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 4, 0, 0, 1]
    store.close()


@pytest.mark.parametrize(
    "bad",
    [
        BlockOp(COPY, -1, 0),
        BlockOp(COPY, 0, -1),
        BlockOp(COPY, NUM_DEVICE, 0),
        BlockOp(COPY, 0, NUM_DEVICE),
        BlockOp(OUT, NUM_DEVICE, 0),
        BlockOp(OUT, 0, -1),
        BlockOp(OUT, 0, NUM_HOST + NUM_DISK),
        BlockOp(IN, -1, 0),
        BlockOp(IN, NUM_HOST + NUM_DISK, 0),
        BlockOp(IN, 0, NUM_DEVICE),
    ],
)
def test_blocks_that_do_not_exist(disk: DiskFile, bad: BlockOp) -> None:
    device = numbered(NUM_DEVICE)
    store = BlockStore(device, NUM_HOST, disk)
    with pytest.raises(ValueError, match=f"{bad.kind.name} {bad.src} to {bad.dst}"):
        store.apply([BlockOp(COPY, 1, 0), bad])
    assert (device == numbered(NUM_DEVICE)).all()


def test_no_tiers_at_all() -> None:
    device = numbered(NUM_DEVICE)
    store = BlockStore(device, 0)
    assert store.apply([BlockOp(COPY, 1, 0)]) == ()
    assert device[0, 0] == 2
    with pytest.raises(ValueError, match="0 blocks"):
        store.apply([BlockOp(OUT, 0, 0)])
    store.close()


def test_disk_alone(disk: DiskFile) -> None:
    device = numbered(NUM_DEVICE)
    store = BlockStore(device, 0, disk)
    store.apply([BlockOp(OUT, 3, 0), BlockOp(IN, 0, 1)])
    assert device[1, 0] == 4


def test_closed(tmp_path: Path) -> None:
    disk = DiskFile.open(tmp_path / "swap", 8192 + NUM_DISK * 4096, BYTES, b"")
    store = BlockStore(numbered(NUM_DEVICE), NUM_HOST, disk)
    store.close()
    store.close()
    for op in (BlockOp(OUT, 0, 0), BlockOp(IN, NUM_HOST, 0)):
        with pytest.raises(ValueError, match="0"):
            store.apply([op])
    DiskFile.open(tmp_path / "swap", 8192 + NUM_DISK * 4096, BYTES, b"").close()  # the lock is gone


def test_more_host_memory_than_there_is() -> None:
    with pytest.raises(ConfigError, match=r"--swap-space asks for 1048576\.0 TiB"):
        BlockStore(numbered(NUM_DEVICE, 64), 2**54)


def test_host_memory_is_there_before_it_is_used() -> None:
    """Reserved means that its pages are mapped, not just promised."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    store = BlockStore(np.zeros((1, 2**16), np.uint8), 1024)
    assert resident() - before > 60 * 2**20
    store.close()
    assert resident() - before < 10 * 2**20


@pytest.mark.parametrize(
    "device",
    [
        np.zeros((4, 8), np.int8),
        np.zeros(8, np.uint8),
        np.zeros((4, 8), np.uint8)[:, ::2],
        np.frombuffer(bytes(32), np.uint8).reshape(4, 8),
    ],
)
def test_device_memory_must_be_what_it_says(device: NDArray[np.uint8]) -> None:
    with pytest.raises(ValueError, match="contiguous, writeable array of bytes"):
        BlockStore(device, 1)
