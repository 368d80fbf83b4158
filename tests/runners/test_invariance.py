"""Promise 1 at the level of a step: the same sequence gives the same bits however it is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chairlift import _native
from chairlift.runners.groups import KVGroups

SAMPLED = {"temperature": 0.9, "seed": 77, "num_logprobs": 3, "top_p": 0.95}
LENGTH = 171  # more than one tile of attention, whatever its size
BLOCKS = -(-LENGTH // 16)
TABLE = [9, 3, 30, 1, 22, 40, 8, 17, 5, 60, 33]  # of blocks of 16, in no order
VARIANTS = [
    ("llama", False),
    ("llama", True),
    ("gemma", False),
    ("gemma", True),
    ("odd", False),
    ("wide", False),
    ("even", False),
    ("grouped", False),
]


def random_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


def outcome(out: dict[str, np.ndarray], rows: slice = slice(None)) -> list[bytes]:
    return [out[name][rows].tobytes() for name in ("logits", "token", "logprob", "rank", "top_ids", "top_logprobs")]


def compute(
    tiny: Any, item: Any, tokens: list[int], table: list[int], chunks: list[int], others: int = 0
) -> list[bytes]:
    """Every row's logits and draws, in chunks of the given sizes (repeated), beside other sequences if asked."""
    rows: list[list[bytes]] = []
    rng = np.random.default_rng(others)
    used = set(table)
    free = [block for block in range(64) if block not in used]
    start, turn = 0, 0
    while start < len(tokens):
        piece = tokens[start : start + chunks[turn % len(chunks)]]
        draws = [{"row_in_item": i, **SAMPLED, "position": start + i + 1} for i in range(len(piece))]
        items = [item(piece, start, table, draws)]
        for i in range(others):
            neighbour = random_tokens(tiny.spec.vocab_size, int(rng.integers(1, 12)), int(rng.integers(1000)))
            items.insert(int(rng.integers(len(items) + 1)), item(neighbour, 0, free[2 * i : 2 * i + 2]))
        rows += run(tiny, items, piece)
        start, turn = start + len(piece), turn + 1
    return [part for row in rows for part in row]


def run(tiny: Any, items: list[Any], piece: list[int]) -> list[list[bytes]]:
    at = next(i for i, entry in enumerate(items) if entry.tokens is piece)
    first = sum(len(entry.tokens) for entry in items[:at])
    for draw in items[at].draws:
        draw["row"] = first + draw.pop("row_in_item")
    out = tiny.step(items)
    before = sum(len(entry.draws) for entry in items[:at])
    return [outcome(out, slice(before + i, before + i + 1)) for i in range(len(piece))]


@pytest.fixture(scope="module")
def alone(build: Any, item: Any) -> Any:
    """The outcome of a sequence computed token by token, by itself, on one thread; one a variant."""
    known: dict[tuple[str, bool, str], tuple[list[int], list[bytes]]] = {}

    def get(name: str, quantized: bool, kv: str) -> tuple[list[int], list[bytes]]:
        key = (name, quantized, kv)
        if key not in known:
            tiny = build(name, quantized=quantized, kv=kv, threads=1)
            tokens = random_tokens(tiny.spec.vocab_size, LENGTH, seed=5)
            known[key] = tokens, compute(tiny, item, tokens, list(range(BLOCKS)), [1])
        return known[key]

    return get


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunks", [[LENGTH], [3], [7, 1], [16], [40, 2]], ids=str)
@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize(("name", "quantized"), VARIANTS)
def test_chunks_and_threads(
    build: Any, item: Any, alone: Any, name: str, quantized: bool, kv: str, chunks: list[int], threads: int
) -> None:
    """C1, C2: one chunk or many, one thread or more, beside others or not."""
    tokens, expected = alone(name, quantized, kv)
    tiny = build(name, quantized=quantized, kv=kv, threads=threads)
    assert compute(tiny, item, tokens, TABLE, chunks) == expected
    assert compute(tiny, item, tokens, TABLE, chunks, others=7) == expected


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma", "odd", "wide", "even"])
def test_instruction_sets(build: Any, item: Any, name: str, kv: str, isa: str) -> None:
    """C1 for each one's kernels: in chunks, which widen stored numbers first, and in decodes, which do not."""
    one, many = (build(name, kv=kv, isa=isa, threads=threads) for threads in (1, 2))
    tokens = random_tokens(one.spec.vocab_size, LENGTH, seed=6)
    expected = compute(one, item, tokens, list(range(BLOCKS)), [1])
    for chunks in ([LENGTH], [7, 1]):
        assert compute(many, item, tokens, TABLE, chunks, others=2) == expected


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("chunks", [[1], [11], [7, 1], [40, 2]], ids=str)
@pytest.mark.parametrize(
    ("name", "block_size", "windows"),
    [("gemma", 4, (0, 5, 7, 40)), ("even", 16, (0, 40)), ("windowed", 16, (24, 40)), ("windowed", 32, (24, 40))],
)
def test_groups_of_layers(
    build: Any, item: Any, kv: str, chunks: list[int], name: str, block_size: int, windows: tuple[int, ...]
) -> None:
    """The same bits whether all layers share blocks or each group has its own and loses them as its window passes."""
    spec = build(name).spec
    together = build(name, kv=kv, groups=KVGroups((0,), (tuple(range(spec.num_layers)),)))
    apart = build(name, kv=kv, block_size=block_size)
    tokens = random_tokens(spec.vocab_size, LENGTH, seed=5)
    expected = compute(together, item, tokens, list(range(BLOCKS)), chunks)
    assert apart.groups.windows == windows
    assert forgetful(apart, item, tokens, chunks) == expected


def forgetful(tiny: Any, item: Any, tokens: list[int], chunks: list[int]) -> list[bytes]:
    """`compute` with blocks taken as they are needed, and filled with NaN and given back as soon as windows allow."""
    windows, cache, size = tiny.groups.windows, tiny.model.cache(), tiny.block_size
    free = np.random.default_rng(3).permutation(len(cache)).tolist()
    cache[:] = 255
    rows: list[list[bytes]] = []
    table: list[int] = []
    start, turn = 0, 0
    while start < len(tokens):
        piece = tokens[start : start + chunks[turn % len(chunks)]]
        while len(table) * size < (start + len(piece)) * len(windows):
            table += [free.pop() for _ in windows]
        for at, block in enumerate(table):
            window = windows[at % len(windows)]
            if block >= 0 and window and (at // len(windows) + 1) * size <= start - window + 1:
                cache[block] = 255
                free.append(block)
                table[at] = -1
        draws = [{"row_in_item": i, **SAMPLED, "position": start + i + 1} for i in range(len(piece))]
        rows += run(tiny, [item(piece, start, list(table), draws, whole=True)], piece)
        start, turn = start + len(piece), turn + 1
    assert -1 in table
    return [part for row in rows for part in row]


@pytest.mark.parametrize("block_size", [1, 5, 8, 32])
@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize(("name", "quantized"), VARIANTS)
def test_block_sizes(build: Any, item: Any, alone: Any, name: str, quantized: bool, kv: str, block_size: int) -> None:
    """Tiles lie at fixed positions whatever the blocks."""
    tokens, expected = alone(name, quantized, kv)
    blocks = -(-LENGTH // block_size)
    tiny = build(name, quantized=quantized, kv=kv, block_size=block_size, num_blocks=2 * blocks)
    table = np.random.default_rng(block_size).permutation(2 * blocks)[:blocks].tolist()
    assert compute(tiny, item, tokens, table, [11, 1]) == expected


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("name", ["gemma", "even", "odd", "grouped"])
def test_many_rows_beside_one(build: Any, item: Any, alone: Any, name: str, kv: str) -> None:
    """A decode beside a prompt of 200 tokens and 30 other decodes, each of which takes all its heads together."""
    quantized = name == "gemma"
    tokens, expected = alone(name, quantized, kv)
    tiny = build(name, quantized=quantized, kv=kv, num_blocks=120)
    compute(tiny, item, tokens[:-1], list(range(BLOCKS)), [LENGTH - 1])
    prompt = random_tokens(tiny.spec.vocab_size, 200, 8)
    others = [item([i + 1], 0, [60 + i]) for i in range(30)]
    own = [{"row_in_item": 0, **SAMPLED, "position": LENGTH}]
    piece = tokens[-1:]
    middle = [item(prompt, 0, list(range(20, 33))), item(piece, LENGTH - 1, list(range(BLOCKS)), own)]
    rows = run(tiny, [*others[:9], *middle, *others[9:]], piece)
    assert rows[0] == expected[-6:]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kv", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["gemma", "wide", "odd", "grouped"])
def test_only_some_rows_draw(build: Any, item: Any, alone: Any, name: str, kv: str, threads: int) -> None:
    """The last layer goes on with them alone; of a piece that nobody draws from, with none."""
    tokens, expected = alone(name, False, kv)
    tiny, table = build(name, kv=kv, threads=threads), list(range(BLOCKS))
    start = 0
    for count, rows in [(40, [0, 5, 6, 7, 8, 9, 30]), (50, []), (1, [0]), (80, [78, 79])]:
        piece = tokens[start : start + count]
        draws = [{"row_in_item": row, **SAMPLED, "position": start + row + 1} for row in rows]
        for found, row in zip(run(tiny, [item(piece, start, table, draws)], piece), rows, strict=False):
            assert found == expected[6 * (start + row) : 6 * (start + row + 1)], (start, row)
        start += count
    assert start == LENGTH


@pytest.mark.parametrize("chunks", [[10], [1]], ids=str)
@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("name", ["llama", "wide", "even"])
def test_stale_cache_contents_are_not_read(
    build: Any, item: Any, alone: Any, name: str, kv: str, chunks: list[int]
) -> None:
    """C4: what another request left in a block, here NaN, does not reach the one that has the block now."""
    tokens, _ = alone(name, False, kv)
    untouched = build(name, kv=kv, num_blocks=BLOCKS)
    weights = {name: values.copy() for name, values in untouched.weights.items()}
    weights["embed"][7] = np.nan
    tiny = build(name, kv=kv, num_blocks=BLOCKS, weights=weights)
    out = tiny.step([item([7] * (16 * BLOCKS), 0, list(range(BLOCKS)))])
    assert out["token"].tolist() == [-1]
    clean, table = [token for token in tokens if token != 7], list(reversed(range(BLOCKS)))
    got = compute(tiny, item, clean, table, chunks)
    assert got == compute(untouched, item, clean, table, chunks)
