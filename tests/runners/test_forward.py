"""The forward pass against its definition in float64: every kind of layer, instruction set and KV type."""

from __future__ import annotations

import dataclasses
import gc
import platform
import time
from typing import Any

import numpy as np
import psutil
import pytest

from chairlift import _native
from chairlift.runners.groups import KVGroups

NAMES = ["llama", "interleaved", "gemma", "odd", "wide", "even", "grouped"]


def random_tokens(vocab_size: int, count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference(build: Any, reference: Any, name: str, isa: str) -> None:
    """F32 weights and F32 KV: rounding only."""
    tiny = build(name, isa=isa)
    tokens = random_tokens(tiny.spec.vocab_size, 90)
    logits = tiny.every_row(tokens, table=list(range(20, 26)))
    expected = reference(tiny.spec, tiny.weights, tokens)
    assert expected.std() > 1.0
    np.testing.assert_allclose(logits, expected, atol=5e-5 * np.abs(expected).max())


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize(("kv", "tolerance"), [("f16", 4e-3), ("bf16", 0.03), ("int8", 0.05)])
@pytest.mark.parametrize("name", NAMES)
def test_logits_with_rounded_kv(build: Any, reference: Any, name: str, kv: str, tolerance: float, isa: str) -> None:
    """f16 keeps 11 bits of each number, bf16 8; int8 has steps of 1/127 of a vector's greatest."""
    tiny = build(name, kv=kv, isa=isa)
    tokens = random_tokens(tiny.spec.vocab_size, 60)
    logits = tiny.every_row(tokens, table=[3, 1, 2, 0])
    expected = reference(tiny.spec, tiny.weights, tokens)
    error = np.abs(logits - expected).max() / np.abs(expected).max()
    assert tolerance / 100 < error < tolerance  # that little would be no rounding at all


def nearest_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("kv", ["f16", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_kv_is_rounded(build: Any, reference: Any, name: str, kv: str, isa: str) -> None:
    """Queries and weights keep 16 bits or more also where they are multiplied as bf16."""
    tiny = build(name, kv=kv, isa=isa)
    tokens = random_tokens(tiny.spec.vocab_size, 200)
    logits = tiny.every_row(tokens, table=list(range(13)))
    stored = nearest_bf16 if kv == "bf16" else lambda values: values.astype(np.float16).astype(np.float64)
    expected = reference(tiny.spec, tiny.weights, tokens, stored)
    error = np.sqrt(((logits - expected) ** 2).mean()) / expected.std()
    print(f"{error:.1e}")
    assert error < 3e-4  # but for numbers so near the middle between two that f32 rounds them the other way


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
@pytest.mark.parametrize("name", [*NAMES, "windowed"])
def test_a_row_that_is_not_finite_harms_none_before_it(
    build: Any, tensors: Any, specs: Any, name: str, kv: str, isa: str
) -> None:
    """Its keys and values are NaN. Rows computed with it that do not see them have the bits of others. (Those
    after it see it, but for the last ones where all layers have windows.)"""
    weights = tensors(specs[name])
    weights["embed"][7] = np.nan
    tiny = build(name, kv=kv, isa=isa, weights=weights)
    tokens = [token for token in random_tokens(tiny.spec.vocab_size, 300) if token != 7][:150]
    others = np.arange(tiny.spec.vocab_size) != 7  # where embeddings are tied, its logits are NaN
    expected = tiny.every_row(tokens, table=list(range(10)))[:, others]
    assert np.isfinite(expected).all()
    for at in (1, 30, 145):
        found = tiny.every_row([*tokens[:at], 7, *tokens[at + 1 :]], table=list(range(20, 30)))[:, others]
        sight = sum(window - 1 for window in tiny.spec.layer_windows) if name == "windowed" else 150
        assert np.array_equal(found[:at], expected[:at])
        assert np.isnan(found[at : at + sight + 1]).all()
        assert np.array_equal(found[at + sight + 1 :], expected[at + sight + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_what_an_int8_cache_holds(build: Any, item: Any, name: str) -> None:
    """Bytes and one scale a vector: the numbers of an f32 cache, each to half a step of its vector."""
    vectors = {}
    for kv, number in (("f32", np.float32), ("int8", np.int8)):
        tiny = build(name, kv=kv, num_blocks=1)
        tiny.step([item(random_tokens(tiny.spec.vocab_size, 16), 0, [0])])
        dim, heads = tiny.spec.head_dim, tiny.spec.num_kv_heads
        first = [group[0] for group in tiny.groups.layers].index(0)  # later layers' inputs differ by rounding
        size = 16 * dim * np.dtype(number).itemsize
        stored = size + (16 * 4 if kv == "int8" else 0)
        layer = tiny.model.cache()[first][: heads * 2 * stored].reshape(heads, 2, stored).transpose(1, 0, 2)
        layer = layer.reshape(heads * 2, stored)  # keys of all heads, then values
        numbers = layer[:, :size].copy().view(number)
        keys = numbers[:heads].reshape(-1, dim, 16).transpose(0, 2, 1)
        vectors[kv] = np.concatenate([keys, numbers[heads:].reshape(-1, 16, dim)])  # [head, position, number]
        if kv == "int8":
            assert np.abs(vectors[kv]).max(axis=2).min() == 127
            vectors[kv] = vectors[kv] * layer[:, size:].copy().view(np.float32)[:, :, None]
    step = np.abs(vectors["f32"]).max(axis=2, keepdims=True) / 127
    assert np.all(np.abs(vectors["int8"] - vectors["f32"]) <= 0.501 * step)


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("name", ["llama", "gemma", "interleaved"])
def test_logits_with_quantized_weights(build: Any, reference: Any, name: str, isa: str) -> None:
    """Against the dequantised weights; what remains is the rounding of activations to 8 bits."""
    tiny = build(name, quantized=True, isa=isa)
    tokens = random_tokens(tiny.spec.vocab_size, 60)
    logits = tiny.every_row(tokens, table=[0, 1, 2, 3])
    expected = reference(tiny.spec, tiny.weights, tokens)
    error = np.sqrt(((logits - expected) ** 2).mean()) / expected.std()
    assert error < 0.03


def test_window_of_one_sees_only_itself(build: Any, item: Any) -> None:
    """With every layer's window at 1 a token's logits do not depend on what came before."""
    tiny = build("llama")
    spec = dataclasses.replace(tiny.spec, layer_windows=(1, 1))
    model = _native.Model(dataclasses.asdict(spec), 1)
    for name, values in tiny.weights.items():
        model.set_tensor(name, "f32", values.shape, np.ascontiguousarray(values).view(np.uint8).reshape(-1))
    model.finalize()
    groups = KVGroups.of(spec)
    model.reserve(8, 16, "f32", groups.layers, 32, 32)
    narrow = dataclasses.replace(tiny, model=model, spec=spec, groups=groups)
    one, other = narrow.every_row([5, 6, 7], [0]), narrow.every_row([9, 8, 7], [0])
    # The rotation of queries and keys cancels at a distance of 0, up to rounding.
    np.testing.assert_allclose(one[2], other[2], atol=1e-5)
    assert np.abs(one[1] - other[1]).max() > 0.1


def test_the_cache_can_be_seen_and_copied(build: Any, item: Any) -> None:
    """Copy-on-write: a copied block is read and extended without touching the original."""
    tiny = build("gemma", block_size=8)
    cache, groups = tiny.model.cache(), len(tiny.groups.windows)
    assert cache.dtype == np.uint8
    assert cache.shape == (64 * groups, tiny.model.kv_block_bytes(8, "f32", tiny.groups.layers))
    tokens = random_tokens(tiny.spec.vocab_size, 14)
    tiny.step([item(tokens[:12], 0, [0, 1])])
    expected = tiny.step([item(tokens[12:13], 12, [0, 1])])["logits"]
    for source, target in [(0, 9), (1, 6)]:
        cache[target * groups : (target + 1) * groups] = cache[source * groups : (source + 1) * groups]
    copied = tiny.step([item(tokens[12:13], 12, [9, 6])])
    assert np.array_equal(copied["logits"], expected)
    tiny.step([item([3], 12, [9, 6])])  # another token in the copy
    again = tiny.step([item(tokens[13:14], 13, [0, 1])])["logits"]
    plain = tiny.every_row(tokens, [20, 21])[13:]
    assert np.array_equal(again, plain)


def test_the_view_of_the_cache_outlives_the_model(build: Any) -> None:
    tiny = build()
    cache = tiny.model.cache()
    del tiny
    gc.collect()
    cache[:] = 7
    assert cache[-1, -1] == 7


def kernel() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int(minor)


@pytest.mark.skipif(platform.system() != "Linux" or kernel() < (5, 14), reason="pages cannot be mapped ahead")
def test_pages_are_mapped_while_there_are_no_steps(build: Any, item: Any) -> None:
    """A page that is being mapped keeps its processor: requests right after the start must not wait for that."""
    tiny = build(num_blocks=2**16)  # 512 MiB
    process = psutil.Process()

    def mapped_while(busy: float) -> int:
        before, end = process.memory_info().rss, time.monotonic() + busy
        while time.monotonic() < end:
            tiny.step([item([1], 0, [0])])
        return process.memory_info().rss - before

    mapped_while(0.1)  # what was begun before the first step
    assert mapped_while(0.5) < 64 * 2**20
    before, end = process.memory_info().rss, time.monotonic() + 60
    while process.memory_info().rss - before < 128 * 2**20:
        assert time.monotonic() < end, "nothing was mapped without steps, either"
        time.sleep(0.01)


def test_a_step_of_nothing(build: Any) -> None:
    assert build().step([])["token"].shape == (0,)


def test_logits_of_many_rows_come_in_pieces(build: Any, reference: Any, tensors: Any, specs: Any) -> None:
    """More rows are asked for than the buffer for logits holds (16 MiB, at least 16 rows): the rest follow (M9)."""
    spec = dataclasses.replace(specs["llama"], vocab_size=300_000, num_layers=1)
    weights = tensors(spec)
    model = _native.Model(dataclasses.asdict(spec), 2)
    for name, values in weights.items():
        model.set_tensor(name, "f32", values.shape, values.view(np.uint8).reshape(-1))
    model.finalize()
    assert model.workspace_bytes(64, 64, "f32") < 64 * 2**20  # all 64 rows at once would be 73 MiB
    model.reserve(8, 16, "f32", [[0]], 64, 64)
    arrays = {
        "tokens": np.arange(40, dtype=np.int32) * 7000,
        "positions": np.arange(40, dtype=np.int32),
        "item_rows": np.array([0, 40], np.int32),
        "block_tables": np.arange(3, dtype=np.int32),
        "table_offsets": np.array([0, 3], np.int32),
    }
    count = 40
    sampling = {
        name: np.full(count, value, kind)
        for name, value, kind in [
            *((name, 0, np.int32) for name in ("index", "position", "top_k", "num_logprobs", "history_prompt")),
            *((name, 0, np.float32) for name in ("temperature", "min_p", "presence", "frequency")),
            ("top_p", 1, np.float32),
            ("repetition", 1, np.float32),
            ("forced", -1, np.int32),
            ("seed", 0, np.uint64),
        ]
    }
    sampling["row"] = np.arange(count, dtype=np.int32)[::-1].copy()
    for name in ("history", "bias", "banned"):
        sampling[f"{name}_offsets"] = np.zeros(count + 1, np.int32)
    sampling |= {name: np.zeros(0, np.int32) for name in ("history", "bias_ids", "banned")}
    sampling["bias_values"] = np.zeros(0, np.float32)
    out = model.step(**arrays, sampling=sampling)
    expected = reference(spec, weights, arrays["tokens"].tolist())
    best_two = np.sort(expected, axis=1)[:, -2:]
    clear = best_two[:, 1] - best_two[:, 0] > 1e-3
    assert clear.sum() > 30
    assert np.array_equal(out["token"][::-1][clear], expected.argmax(1)[clear])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec | {"num_heads": 3}, "multiple of num_kv_heads"),
        (lambda spec: spec | {"vocab_size": 0}, "vocab_size"),
        (lambda spec: spec | {"num_layers": 2**31 - 1}, "num_layers|layer_windows"),
        (lambda spec: spec | {"layer_windows": (1,)}, "layer_windows"),
        (lambda spec: spec | {"layer_windows": (0, -1)}, "negative"),
        (lambda spec: spec | {"activation": "relu"}, "activation"),
        (lambda spec: spec | {"rope": spec["rope"] | {"dims": 18}}, "rope.dims"),
        (lambda spec: spec | {"rope": spec["rope"] | {"dims": 7}}, "rope.dims"),
        (lambda spec: spec | {"rope": spec["rope"] | {"style": "other"}}, "style"),
        (lambda spec: spec | {"rope": spec["rope"] | {"inv_freq_scale": (1.0,)}}, "inv_freq_scale"),
        (lambda spec: spec | {"hidden_size": "64"}, "hidden_size has a wrong type"),
        (lambda spec: {key: value for key, value in spec.items() if key != "ffn_size"}, "no ffn_size"),
    ],
)
def test_bad_specs_are_refused(specs: Any, change: Any, message: str) -> None:
    spec = change(dataclasses.asdict(specs["llama"]))
    with pytest.raises(ValueError, match=message):
        _native.Model(spec, 1)


def test_bad_tensors_are_refused(specs: Any, tensors: Any, stored: Any) -> None:
    spec = specs["llama"]
    model = _native.Model(dataclasses.asdict(spec), 1)
    values = {name: stored(array) for name, array in tensors(spec).items()}
    q = values["layers.0.q"]
    with pytest.raises(ValueError, match=r"layers\.0\.q must have shape \[64, 64\], got \[64, 32\]"):
        model.set_tensor("layers.0.q", "f32", (64, 32), q.data)
    with pytest.raises(ValueError, match="bytes"):
        model.set_tensor("layers.0.q", "f32", (64, 64), q.data[:-4])
    for name in ("layers.2.q", "layers.-1.q", "layers.0.q_bias", "layers.0.", "layers.00.q", "embedding", ""):
        with pytest.raises(ValueError, match="no tensor"):
            model.set_tensor(name, "f32", (64, 64), q.data)
    with pytest.raises(ValueError, match="q9_9"):
        model.set_tensor("layers.0.q", "q9_9", (64, 64), q.data)
    model.set_tensor("layers.0.q", "f32", (64, 64), q.data)
    with pytest.raises(ValueError, match="twice"):
        model.set_tensor("layers.0.q", "f32", (64, 64), q.data)
    with pytest.raises(ValueError, match="missing"):
        model.finalize()
    with pytest.raises(RuntimeError, match="finalize"):
        model.reserve(1, 16, "f32", [[0, 1]], 8, 8)


def test_a_head_of_odd_size_is_refused(specs: Any) -> None:
    """Its numbers are rotated, and stored, by pairs."""
    spec = dataclasses.replace(specs["llama"], head_dim=15)
    with pytest.raises(ValueError, match="head_dim must be even, got 15"):
        _native.Model(dataclasses.asdict(spec), 1, "auto")
