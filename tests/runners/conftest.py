"""Tiny random decoders, a plain float64 forward pass to compare with, and a driver for steps of the C++ model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from chairlift import _native
from chairlift.core.plan import StepItem
from chairlift.core.request import SamplingParams, SequenceInfo
from chairlift.models.spec import Checkpoint, DecoderSpec, RopeSpec, Tensor
from chairlift.runners.groups import KVGroups

LLAMA = DecoderSpec(
    family="llama",
    vocab_size=259,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    max_positions=256,
    norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0, dims=16, style="half"),
    attn_scale=0.25,
)
SPECS: dict[str, DecoderSpec] = {
    "llama": LLAMA,
    "interleaved": dataclasses.replace(
        LLAMA,
        rope=RopeSpec(
            theta=500.0,
            dims=16,
            style="interleaved",
            inv_freq_scale=(1.0, 1.0, 1.5, 2.0, 3.0, 8.0, 8.0, 8.0),
            attention_factor=1.1,
        ),
        attn_bias=True,
        attn_out_bias=True,
        ffn_bias=True,
        qk_norm=True,
        tied_embeddings=True,
    ),
    "gemma": dataclasses.replace(
        LLAMA,
        family="gemma3",
        hidden_size=96,
        num_layers=4,
        num_kv_heads=1,
        head_dim=24,
        ffn_size=160,
        rope=RopeSpec(theta=1e6, dims=24, style="half", inv_freq_scale=(8.0,) * 12),
        rope_local=RopeSpec(theta=1e4, dims=24, style="half"),
        layer_windows=(5, 40, 0, 7),
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        tied_embeddings=True,
        embed_scale=9.8,
        attn_softcap=4.0,
        logit_softcap=30.0,
    ),
    "wide": dataclasses.replace(  # more numbers and queries a head than go together
        LLAMA, num_layers=1, num_heads=7, num_kv_heads=1, head_dim=80, rope=RopeSpec(theta=1e4, dims=80, style="half")
    ),
    "even": dataclasses.replace(  # all is a multiple of 32, as with most models
        LLAMA,
        num_heads=6,
        head_dim=64,
        rope=RopeSpec(theta=1e4, dims=64, style="half"),
        attn_scale=0.125,
        layer_windows=(40, 0),
    ),
    "grouped": dataclasses.replace(  # more queries a head than sixteen, of several heads
        LLAMA, num_heads=34, head_dim=32, rope=RopeSpec(theta=1e4, dims=32, style="half")
    ),
    "windowed": dataclasses.replace(  # a token is out of sight of those 63 and more positions later
        LLAMA, head_dim=32, rope=RopeSpec(theta=1e4, dims=32, style="half"), layer_windows=(40, 24)
    ),
    "odd": dataclasses.replace(  # nothing is a multiple of 8; only a part of a head is rotated
        LLAMA,
        vocab_size=37,
        hidden_size=42,
        num_heads=3,
        num_kv_heads=3,
        head_dim=22,
        ffn_size=51,
        rope=RopeSpec(theta=100.0, dims=10, style="interleaved"),
    ),
}


def random_tensors(spec: DecoderSpec, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Values of such a size that neither the softmax nor the norms make all tokens alike."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        values = rng.standard_normal(shape)
        if len(shape) == 2:
            values *= 1.0 if name == "embed" else 1.5 / np.sqrt(shape[1])
        elif "norm" in name:
            values = 1.0 + 0.3 * values
        tensors[name] = values.astype(np.float32)
    return tensors


def quantize(values: NDArray[np.float32]) -> Tensor:
    """A matrix in q8_0: 32 values a block, an f16 scale and 32 signed bytes."""
    rows, cols = values.shape
    blocks = values.reshape(rows, cols // 32, 32)
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    quants = np.clip(np.round(blocks / scales.astype(np.float32)), -127, 127).astype(np.int8)
    data = np.concatenate([scales.view(np.uint8), quants.view(np.uint8)], axis=-1)
    return Tensor("q8_0", (rows, cols), np.ascontiguousarray(data).reshape(-1))


def as_tensor(values: NDArray[np.float32], quantized: bool = False) -> Tensor:
    if quantized and values.ndim == 2:
        return quantize(values)
    return Tensor("f32", values.shape, np.ascontiguousarray(values).view(np.uint8).reshape(-1))


def _rms_norm(x: NDArray[Any], weight: NDArray[Any], eps: float) -> NDArray[Any]:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rotate(x: NDArray[Any], rope: RopeSpec) -> NDArray[Any]:
    """x [T, heads, head_dim] at positions 0..T-1."""
    half = rope.dims // 2
    inv_freq = rope.theta ** (-np.arange(half) / half) / (np.array(rope.inv_freq_scale) if rope.inv_freq_scale else 1.0)
    angles = np.arange(len(x))[:, None, None] * inv_freq
    cos, sin = np.cos(angles) * rope.attention_factor, np.sin(angles) * rope.attention_factor
    first = np.arange(half) if rope.style == "half" else 2 * np.arange(half)
    second = first + (half if rope.style == "half" else 1)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def reference_logits(
    spec: DecoderSpec,
    weights: dict[str, NDArray[Any]],
    tokens: Sequence[int],
    stored: Callable[[NDArray[Any]], NDArray[Any]] = lambda values: values,
) -> NDArray[np.float64]:
    """[T, vocab] logits of a sequence, in float64, by the definition; keys and values as they are ``stored``."""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    count, heads, kv_heads, dim = len(tokens), spec.num_heads, spec.num_kv_heads, spec.head_dim
    windows = spec.layer_windows or (0,) * spec.num_layers

    def cap(values: NDArray[Any], limit: float) -> NDArray[Any]:
        return limit * np.tanh(values / limit) if limit else values

    def product(x: NDArray[Any], name: str) -> NDArray[Any]:
        return x @ w[name].T + w.get(name + "_bias", 0.0)

    x = w["embed"][list(tokens)] * spec.embed_scale
    for i in range(spec.num_layers):
        at = f"layers.{i}."
        rope = spec.rope_local if spec.rope_local and windows[i] else spec.rope
        y = _rms_norm(x, w[at + "attn_norm"], spec.norm_eps)
        q = product(y, at + "q").reshape(count, heads, dim)
        k = product(y, at + "k").reshape(count, kv_heads, dim)
        v = product(y, at + "v").reshape(count, kv_heads, dim)
        if spec.qk_norm:
            q = _rms_norm(q, w[at + "q_norm"], spec.norm_eps)
            k = _rms_norm(k, w[at + "k_norm"], spec.norm_eps)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (stored(_rotate(k, rope)), stored(v)))
        scores = cap(np.einsum("thd,shd->hts", _rotate(q, rope), k) * spec.attn_scale, spec.attn_softcap)
        age = np.arange(count)[:, None] - np.arange(count)
        seen = (age >= 0) & (age < (windows[i] or count))
        scores = np.where(seen, scores, -np.inf)
        mass = np.exp(scores - scores.max(-1, keepdims=True))
        mass /= mass.sum(-1, keepdims=True)
        y = product(np.einsum("hts,shd->thd", mass, v).reshape(count, heads * dim), at + "o")
        x = x + (_rms_norm(y, w[at + "post_attn_norm"], spec.norm_eps) if spec.post_norms else y)
        y = _rms_norm(x, w[at + "ffn_norm"], spec.norm_eps)
        gate, up = product(y, at + "gate"), product(y, at + "up")
        if spec.activation == "silu":
            gate = gate / (1 + np.exp(-gate))
        else:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        y = product(gate * up, at + "down")
        x = x + (_rms_norm(y, w[at + "post_ffn_norm"], spec.norm_eps) if spec.post_norms else y)
    head = w["embed"] if spec.tied_embeddings else w["lm_head"]
    return cap(_rms_norm(x, w["final_norm"], spec.norm_eps) @ head.T, spec.logit_softcap)


DRAW: dict[str, Any] = {
    "row": np.int32(0),
    "forced": np.int32(-1),
    "seed": np.uint64(0),
    "index": np.int32(0),
    "position": np.int32(0),
    "temperature": np.float32(0),
    "top_k": np.int32(0),
    "top_p": np.float32(1),
    "min_p": np.float32(0),
    "repetition": np.float32(1),
    "presence": np.float32(0),
    "frequency": np.float32(0),
    "num_logprobs": np.int32(-1),
    "history_prompt": np.int32(0),
}


def sampling_arrays(draws: Sequence[dict[str, Any]]) -> dict[str, NDArray[Any]]:
    """The arrays of `Model.step` for draws given as fields that differ from greedy; lists for history, bias, banned."""
    arrays = {
        name: np.array([draw.get(name, default) for draw in draws], default.dtype) for name, default in DRAW.items()
    }
    for name in ("history", "bias", "banned"):
        parts = [list(draw.get(name, ())) for draw in draws]
        arrays[name + "_offsets"] = np.cumsum([0, *map(len, parts)]).astype(np.int32)
        flat = [entry for part in parts for entry in part]
        if name == "bias":
            arrays["bias_ids"] = np.array([token for token, _ in flat], np.int32)
            arrays["bias_values"] = np.array([value for _, value in flat], np.float32)
        else:
            arrays[name] = np.array(flat, np.int32)
    return arrays


@dataclasses.dataclass
class Item:
    """Tokens of one sequence to compute, and the draws from its last row (by default one, greedy).

    ``table`` is the block table, or for a model of G groups may be a G-th of it: then number b stands for the blocks
    b * G .. b * G + G - 1.
    """

    tokens: Sequence[int]
    start: int
    table: Sequence[int]
    draws: Sequence[dict[str, Any]] = ({},)
    whole: bool = False  # the table is complete


@dataclasses.dataclass
class TinyModel:
    """A reserved C++ model and what it was made of; ``weights`` are the numbers it stands for."""

    model: _native.Model
    spec: DecoderSpec
    weights: dict[str, NDArray[np.float32]]
    block_size: int
    groups: KVGroups

    def table(self, item: Item) -> list[int]:
        count = 1 if item.whole else len(self.groups.windows)
        return [block * count + i for block in item.table for i in range(count)]

    def arrays(self, items: Sequence[Item]) -> dict[str, Any]:
        rows = np.cumsum([0, *(len(item.tokens) for item in items)]).astype(np.int32)
        draws = [
            {"row": end - 1, "position": item.start + len(item.tokens), **draw}
            for item, end in zip(items, rows[1:], strict=True)
            for draw in item.draws
        ]
        return {
            "tokens": np.array([token for item in items for token in item.tokens], np.int32),
            "positions": np.array([item.start + i for item in items for i in range(len(item.tokens))], np.int32),
            "item_rows": rows,
            "block_tables": np.array([block for item in items for block in self.table(item)], np.int32),
            "table_offsets": np.cumsum([0, *(len(self.table(item)) for item in items)]).astype(np.int32),
            "sampling": sampling_arrays(draws),
        }

    def step(self, items: Sequence[Item]) -> dict[str, NDArray[Any]]:
        return self.model.step(**self.arrays(items), return_logits=True)

    def every_row(self, tokens: Sequence[int], table: Sequence[int], chunk: int = 10**9) -> NDArray[np.float32]:
        """[T, vocab] logits of a sequence computed in chunks."""
        parts = []
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            draws = [{"row": i} for i in range(len(piece))]
            parts.append(self.step([Item(piece, start, table, draws)])["logits"])
        return np.concatenate(parts)


Build = Callable[..., TinyModel]


@pytest.fixture(scope="session")
def build() -> Build:
    """Makes a `TinyModel`: of a named spec, with f32 or q8_0 weights, KV of any type, and sizes as given.

    ``num_blocks`` are those of each group of layers.
    """

    def make(
        name: str = "llama",
        *,
        quantized: bool = False,
        kv: str = "f32",
        threads: int = 2,
        block_size: int = 16,
        num_blocks: int = 64,
        max_rows: int = 256,
        isa: str = "auto",
        weights: dict[str, NDArray[np.float32]] | None = None,
        groups: KVGroups | None = None,
    ) -> TinyModel:
        spec = SPECS[name]
        values = dict(weights or random_tensors(spec))
        model = _native.Model(dataclasses.asdict(spec), threads, isa)
        for key, array in values.items():
            tensor = as_tensor(array, quantized)
            model.set_tensor(key, tensor.type, tensor.shape, tensor.data)
            if tensor.type == "q8_0":
                values[key] = _native.dequantize("q8_0", *tensor.shape, tensor.data)
        model.finalize()
        groups = groups or KVGroups.of(spec)
        model.reserve(num_blocks * len(groups.windows), block_size, kv, groups.layers, max_rows, 2 * max_rows)
        return TinyModel(model, spec, values, block_size, groups)

    return make


@pytest.fixture(scope="session")
def item() -> type[Item]:
    return Item


@pytest.fixture(scope="session")
def reference() -> Callable[..., NDArray[np.float64]]:
    return reference_logits


@pytest.fixture(scope="session")
def specs() -> dict[str, DecoderSpec]:
    return SPECS


@pytest.fixture(scope="session")
def tensors() -> Callable[..., dict[str, NDArray[np.float32]]]:
    return random_tensors


@pytest.fixture(scope="session")
def checkpoint() -> Checkpoint:
    """Of the spec "llama", with f32 weights."""
    return tiny_checkpoint_of("llama")


@pytest.fixture(scope="session")
def windowed_checkpoint() -> Checkpoint:
    """Of the spec "gemma", whose layers have windows of 5, 40 and 7 positions, and one none."""
    return tiny_checkpoint_of("gemma")


def tiny_checkpoint_of(name: str) -> Checkpoint:
    spec = SPECS[name]
    return Checkpoint("tiny", spec, {key: as_tensor(values) for key, values in random_tensors(spec).items()})


@pytest.fixture(scope="session")
def step_item() -> Callable[..., StepItem]:
    """Makes an item of one greedy token to draw, unless told otherwise: fields of the item, or of its sequence."""

    def make(tokens: Sequence[int], start: int = 0, params: SamplingParams | None = None, **given: Any) -> StepItem:
        params = params or SamplingParams(temperature=0.0)
        sequence: dict[str, Any] = {"index": 0, "seed": 7, "num_prompt": 50, "num_logprobs": params.logprobs}
        sequence |= {name: given.pop(name) for name in (*sequence, "stop_ids") if name in given}
        fields: dict[str, Any] = {"block_table": tuple(range(16)), "num_samples": 1} | given
        return StepItem(SequenceInfo("a", params=params, **sequence), start, tuple(tokens), **fields)

    return make


@pytest.fixture(scope="session")
def stored() -> Callable[..., Tensor]:
    """A matrix or vector as a `Tensor`, f32 or q8_0."""
    return as_tensor
