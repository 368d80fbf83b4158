"""Blocks that leave the device and come back, as `NativeRunner` does it: host memory, the disk file, damage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift import _native
from chairlift.config import EngineConfig
from chairlift.core.plan import BlockOp, BlockOpKind, StepItem, StepPlan, StepResult
from chairlift.errors import ConfigError
from chairlift.models.spec import Checkpoint
from chairlift.runners.native import NativeRunner

OUT, IN, COPY = BlockOpKind.SWAP_OUT, BlockOpKind.SWAP_IN, BlockOpKind.COPY
PROMPT = tuple(np.random.default_rng(4).integers(0, 259, 50).tolist())
BLOCK = 2 * 2 * 2 * 16 * 16 * 2  # layers, K and V, heads, positions, numbers, bytes


def config(**given: Any) -> EngineConfig:
    return EngineConfig(
        **({"threads": 2, "max_num_seqs": 8, "kv_cache_memory": "4MiB", "swap_space": 4 / 1024} | given)
    )


def started(checkpoint: Checkpoint, **given: Any) -> NativeRunner:
    runner = NativeRunner(checkpoint, config(**given))
    runner.start()
    return runner


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    """Settings with room for blocks in a file, and for four in host memory."""
    return {"disk_swap": f"{tmp_path / 'kv'},{4 / 1024}", "swap_space": 4 * BLOCK / 2**30}


@pytest.fixture(scope="module")
def runner(checkpoint: Checkpoint) -> Iterator[NativeRunner]:
    runner = started(checkpoint)
    yield runner
    runner.close()


def run(runner: NativeRunner, *items: StepItem, ops: tuple[BlockOp, ...] = ()) -> StepResult:
    return runner.result(runner.submit(StepPlan(3, items, ops)))


def moves(kind: BlockOpKind, sources: range, targets: range, content: bytes = b"") -> tuple[BlockOp, ...]:
    return tuple(BlockOp(kind, *pair, content) for pair in zip(sources, targets, strict=True))


def test_swapped_out_and_in(runner: NativeRunner, step_item: Any) -> None:
    """C2: a sequence whose blocks were away, and came back elsewhere, goes on with the same bits."""
    assert runner.memory is not None and runner.memory.num_host_blocks == 4 * 2**20 // BLOCK
    ahead = step_item((4,), 50)
    expected = run(runner, step_item(PROMPT), ahead).tokens[1]
    out = run(runner, ops=moves(OUT, range(4), range(9, 13)))
    assert out.tokens == () and out.damaged == ()
    assert 0 < out.swap_seconds <= out.seconds
    run(runner, step_item(PROMPT[::-1]))  # somebody else has the blocks now
    back = step_item((4,), 50, block_table=tuple(range(40, 44)))
    assert run(runner, back, ops=moves(IN, range(9, 13), range(40, 44))).tokens[0] == expected


def test_ops_run_in_order_before_the_items(runner: NativeRunner, step_item: Any) -> None:
    expected = run(runner, step_item(PROMPT), step_item((4,), 50)).tokens[1]
    ops = (
        *moves(OUT, range(4), range(4)),
        *moves(COPY, range(20, 24), range(4)),  # their place is taken
        *moves(IN, range(4), range(30, 34)),
        *moves(COPY, range(30, 34), range(60, 64)),
    )
    assert run(runner, step_item((4,), 50, block_table=tuple(range(60, 64))), ops=ops).tokens[0] == expected


def test_copies_are_no_swaps(runner: NativeRunner, step_item: Any) -> None:
    result = run(runner, step_item((1,)), ops=moves(COPY, range(3), range(7, 10)))
    assert result.swap_seconds == 0.0


@pytest.mark.parametrize(
    "op", [(OUT, 0, 1024), (OUT, -1, 0), (IN, 1024, 0), (IN, 0, 1024), (COPY, 0, 1024), (COPY, -1, 0)]
)
def test_blocks_that_do_not_exist(runner: NativeRunner, op: tuple[BlockOpKind, int, int]) -> None:
    with pytest.raises(ValueError, match="there are"):
        run(runner, ops=(BlockOp(*op),))


def test_capacity_of_both_tiers(checkpoint: Checkpoint, disk: dict[str, Any]) -> None:
    runner = NativeRunner(checkpoint, config(**disk))
    capacity = runner.start()
    assert capacity.num_host_blocks == 4
    assert runner.disk is not None
    assert capacity.num_disk_blocks == runner.disk.num_blocks > 500
    assert dict(capacity.details)["swap_space"] == 4 * BLOCK
    runner.close()
    assert runner.disk is None


def test_disk_blocks_outlive_the_engine(checkpoint: Checkpoint, step_item: Any, disk: dict[str, Any]) -> None:
    """Another engine with the same model and settings finds the blocks, by what they hold, and goes on from them."""
    contents = [bytes([i]) * 32 for i in range(4)]
    first = started(checkpoint, **disk)
    expected = run(first, step_item(PROMPT), step_item((4,), 50)).tokens[1]
    run(first, ops=tuple(BlockOp(OUT, i, 4 + i, content) for i, content in enumerate(contents)))
    first.close()
    second = started(checkpoint, **disk)
    assert second.disk is not None
    assert second.disk.contents() == list(enumerate(contents))
    ops = tuple(BlockOp(IN, 4 + i, 10 + i, content) for i, content in enumerate(contents))
    result = run(second, step_item((4,), 50, block_table=tuple(range(10, 14))), ops=ops)
    assert result.tokens[0] == expected and result.damaged == ()
    second.close()


def test_damaged_blocks_are_named(checkpoint: Checkpoint, step_item: Any, disk: dict[str, Any]) -> None:
    """C4: a block that was changed on disk is not used as if nothing had happened; the step itself is computed."""
    runner = started(checkpoint, **disk)
    run(runner, step_item(PROMPT), ops=())
    run(runner, ops=moves(OUT, range(3), range(4, 7), b"x"))
    path = Path(disk["disk_swap"].rpartition(",")[0])
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(data) - BLOCK * runner.disk.num_blocks + BLOCK + 100)  # type: ignore[union-attr]
        file.write(b"\xff\x00\xff")
    result = run(runner, step_item((4,), 50), ops=moves(IN, range(4, 7), range(3)))
    assert result.damaged == (5,)
    assert len(result.tokens[0]) == 1
    runner.close()


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 8},
        {"kv_cache_dtype": "int8"},
        {"isa": "portable"},
        {"quantization": "int8"},
        "a weight",
        "a spec",
    ],
    ids=str,
)
def test_another_models_blocks_are_not_taken(checkpoint: Checkpoint, disk: dict[str, Any], change: Any) -> None:
    """What a block holds depends on all of these; the same settings would find it."""
    first = started(checkpoint, **disk)
    run(first, ops=(BlockOp(OUT, 0, 4, b"x" * 32),))
    first.close()
    if change == "a weight":
        tensors = dict(checkpoint.tensors)
        data = tensors["layers.1.v"].data.copy()
        data[-1] ^= 1
        tensors["layers.1.v"] = replace(tensors["layers.1.v"], data=data)
        checkpoint = replace(checkpoint, tensors=tensors)
    elif change == "a spec":
        checkpoint = replace(checkpoint, spec=replace(checkpoint.spec, norm_eps=1e-6))
    else:
        disk |= change
    second = started(checkpoint, **disk)
    assert second.disk is not None and second.disk.contents() == []
    second.close()


def test_the_same_settings_in_other_words_find_them(checkpoint: Checkpoint, disk: dict[str, Any]) -> None:
    first = started(checkpoint, **disk)
    run(first, ops=(BlockOp(OUT, 0, 4, b"x" * 32),))
    first.close()
    isa = _native.available_isas()[0]
    second = started(
        checkpoint, **disk, kv_cache_dtype="bf16" if isa == "amx" else "f16", isa=isa, seed=5, max_num_seqs=4
    )
    assert second.disk is not None and second.disk.contents() == [(0, b"x" * 32)]
    second.close()


def test_the_file_is_given_back_when_start_fails(
    checkpoint: Checkpoint, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_store(*args: Any) -> None:
        raise ConfigError("no host memory")

    monkeypatch.setattr("chairlift.runners.native.BlockStore", no_store)
    with pytest.raises(ConfigError, match="no host memory"):
        started(checkpoint, **disk)
    monkeypatch.undo()
    started(checkpoint, **disk).close()  # else it would be in use
