"""`KVGroups`: how layers share blocks, and how many blocks that takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chairlift.runners.groups import KVGroups


def groups_of(specs: Any, *windows: int) -> KVGroups:
    return KVGroups.of(replace(specs["llama"], num_layers=len(windows), layer_windows=windows))


def test_one_kind_of_layer_is_one_group(specs: Any) -> None:
    assert KVGroups.of(specs["llama"]) == KVGroups((0,), ((0, 1),))
    assert groups_of(specs, 0, 0, 0) == KVGroups((0,), ((0, 1, 2),))
    assert groups_of(specs, 9, 9, 9) == KVGroups((9,), ((0, 1, 2),))


def test_gemma_3_270m(specs: Any) -> None:
    """Every sixth of 18 layers sees everything."""
    groups = groups_of(specs, *[0 if layer % 6 == 5 else 512 for layer in range(18)])
    assert groups.windows == (0, 512, 512, 512, 512, 512)
    assert groups.layers == ((5, 11, 17), (0, 1, 2), (3, 4, 6), (7, 8, 9), (10, 12, 13), (14, 15, 16))


def test_gemma_3_1b_leaves_a_little_empty_to_have_fewer_groups(specs: Any) -> None:
    """22 layers with a window and 4 without: 7 groups of 4, not 13 of 2."""
    groups = groups_of(specs, *[0 if layer % 6 == 5 else 512 for layer in range(26)])
    assert groups.windows == (0,) + (512,) * 6
    assert [len(layers) for layers in groups.layers] == [4, 4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize(
    "windows", [(5, 40, 0, 7), (0, 8), (0, 8, 8, 8, 8), (0,) * 9 + (8,) * 10, (0,) * 6 + (8,) * 4 + (16,) * 2]
)
def test_each_layer_is_in_one_group_of_its_window(specs: Any, windows: tuple[int, ...]) -> None:
    groups = groups_of(specs, *windows)
    assert sorted(layer for layers in groups.layers for layer in layers) == list(range(len(windows)))
    for window, layers in zip(groups.windows, groups.layers, strict=True):
        assert {windows[layer] for layer in layers} == {window}
    slots = max(map(len, groups.layers)) * len(groups.layers)
    assert slots <= 1.1 * len(windows)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
@pytest.mark.parametrize("window", [1, 2, 16, 17, 30])
def test_blocks_are_enough_for_any_way_to_compute(window: int, chunk: int, block_size: int) -> None:
    """What is in view of a chunk's first row, up to its last, wherever it begins; and not much more than that."""
    groups = KVGroups((0, window), ((0,), (1,)))
    for length in (1, 5, 16, 90, 200):
        most = 0
        for start in range(length):
            last = min(start + chunk, length) - 1
            first = max(0, start - window + 1)
            most = max(most, last // block_size - first // block_size + 1)
        whole = -(-length // block_size)
        bound = groups.blocks(length, block_size, chunk) - whole
        assert most <= bound <= min(whole, most + 3)  # with a step in flight it holds a block more
