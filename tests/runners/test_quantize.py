"""Quantisation at load: the numbers that weights become, which weights, and what memory that takes.

Oracles: float64 arithmetic, and the ``gguf`` package for what a stored block means and for the plain range of a group.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from chairlift import _native
from chairlift.config import EngineConfig
from chairlift.core.plan import StepPlan
from chairlift.core.request import SamplingParams
from chairlift.errors import ConfigError, ModelError
from chairlift.models.spec import Checkpoint, Tensor
from chairlift.runners import weights
from chairlift.runners.native import NativeRunner
from chairlift.runners.weights import packed_bytes, packed_types

INT8, INT4 = "q8_0", "q4_1"
SMALLEST = 2.0**-24  # above 0, of f16
LARGEST = 65504.0
FLOATS = ("f32", "f16", "bf16")
SENSITIVE = ("embed", "lm_head", "layers.0.v", "layers.1.v")

each_format = pytest.mark.parametrize("format_", [INT8, INT4])


def samples() -> dict[str, NDArray[np.float32]]:
    """[groups, 32] weights of every kind that a group can be of."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((400, 32), np.float32)
    spiked = normal.copy()
    spiked[np.arange(400), rng.integers(0, 32, 400)] *= 25
    sizes = np.exp2(rng.integers(-40, 12, (400, 1))).astype(np.float32)
    return {
        "normal": normal * np.float32(0.02),
        "heavy tails": rng.standard_t(3, (400, 32)).astype(np.float32),
        "one large": spiked,
        "skewed": rng.exponential(0.1, (400, 32)).astype(np.float32),
        "of all sizes": normal * sizes,
        "a large offset": 2049 + normal * np.float32(0.01),  # midway between two f16
        "two numbers": np.sign(normal) * np.float32(0.3),
        "of f16's smallest": normal * np.float32(2 * SMALLEST),
        "of f16's largest": np.float32(0.99 * LARGEST) * np.sin(normal),
        "constant": np.repeat(normal[:, :1], 32, axis=1),
        "zero": np.zeros((3, 32), np.float32),
    }


KINDS = list(samples())
each_kind = pytest.mark.parametrize("kind", KINDS)


def scales(format_: str, stored: NDArray[np.uint8]) -> NDArray[np.float64]:
    """[groups, 1]: a group's step."""
    blocks = stored.reshape(-1, 34 if format_ == INT8 else 20)
    return np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float64)


def minimums(stored: NDArray[np.uint8]) -> NDArray[np.float64]:
    return np.ascontiguousarray(stored.reshape(-1, 20)[:, 2:4]).view(np.float16).astype(np.float64)


def quantized(x: NDArray[np.float32], format_: str) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """What [groups, 32] weights become, by the gguf package's reading of the stored form, and that form."""
    stored = _native.quantize(x, format_)
    kind = gguf.GGMLQuantizationType[format_.upper()]
    return gguf.quants.dequantize(stored.reshape(len(x), -1), kind).astype(np.float64), stored


def squared_error(x: NDArray[np.float32], became: NDArray[Any]) -> NDArray[np.float64]:
    """Of each group."""
    return ((became.astype(np.float64) - x) ** 2).sum(-1)


def plain_range(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """What groups become with 16 values from their minimum to their maximum, by the gguf package."""
    return gguf.quants.dequantize(
        gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q4_1), gguf.GGMLQuantizationType.Q4_1
    )


# -- the numbers


@each_kind
def test_int8_is_off_by_half_a_step_at_most(kind: str) -> None:
    x = samples()[kind]
    became, stored = quantized(x, INT8)
    steps = scales(INT8, stored)
    assert (np.abs(became - x) <= 0.5000001 * steps).all()
    wanted = np.abs(x.astype(np.float64)).max(-1, keepdims=True) / 127
    assert (np.abs(steps - wanted) <= np.maximum(wanted * 2**-11, SMALLEST)).all(), "steps finer than the range needs"


@each_kind
def test_int4_takes_the_nearest_of_its_sixteen_values(kind: str) -> None:
    """A weight within the range of its group is off by half a step at most; one left out becomes the range's end."""
    x = samples()[kind]
    became, stored = quantized(x, INT4)
    grid = minimums(stored)[..., None] + scales(INT4, stored)[..., None] * np.arange(16)
    nearest = np.abs(grid - x[..., None].astype(np.float64)).min(-1)
    size = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    assert (np.abs(became - x) <= nearest + 1e-6 * size).all()


@each_kind
def test_int4_is_never_worse_than_the_plain_range(kind: str) -> None:
    x = samples()[kind]
    ours, plain = squared_error(x, quantized(x, INT4)[0]), squared_error(x, plain_range(x))
    assert (ours <= plain * (1 + 1e-5) + 1e-12 * (x.astype(np.float64) ** 2).sum(-1)).all()


@each_kind
def test_int4_is_never_worse_than_a_range_that_reaches_all(kind: str) -> None:
    """Half a step of error each, where the f16 of scale and minimum are rounded outwards."""
    x = samples()[kind].astype(np.float64)
    minimum = -f16_not_below(-x.min(-1))
    step = f16_not_below((x.max(-1) - minimum) / 15)
    ours = squared_error(samples()[kind], quantized(samples()[kind], INT4)[0])
    assert (ours <= 32 * (0.50001 * step) ** 2).all()


def f16_not_below(x: NDArray[np.float64]) -> NDArray[np.float64]:
    near = x.astype(np.float16)
    return np.where(near < x, np.nextafter(near, np.float16(np.inf)), near).astype(np.float64)


def test_int4_finds_better_ranges() -> None:
    """On weights like those of language models the search saves a fifth of the squared error; a rival that tries many
    ranges finds hardly more."""
    x = samples()["normal"]
    ours, plain = (squared_error(x, became).sum() for became in (quantized(x, INT4)[0], plain_range(x)))
    low, high = x.min(-1, keepdims=True).astype(np.float64), x.max(-1, keepdims=True).astype(np.float64)
    best = np.full(len(x), np.inf)
    for below in np.arange(-1, 3, 0.2):  # steps left out at each end
        for above in np.arange(-1, 3, 0.2):
            step = (high - low) / (15 + below + above)
            start = low + below * step
            best = np.minimum(best, ((start + step * np.clip(np.rint((x - start) / step), 0, 15) - x) ** 2).sum(-1))
    assert ours < 0.82 * plain
    assert ours < 1.03 * best.sum()


def test_int4_keeps_what_sixteen_values_can_say() -> None:
    """The numbers of a file in Q4_1, made floats, come back, so that nothing is lost twice."""
    rng = np.random.default_rng(2)
    values = rng.integers(0, 16, (500, 32))
    values[:, :2] = 0, 15
    step = np.exp2(rng.integers(-9, 0, (500, 1))) * rng.integers(1024, 2048, (500, 1)) / 2048
    x = (step.astype(np.float16).astype(np.float64) * values - 7.5 * step.astype(np.float16)).astype(np.float32)
    exact = x[(x[:, 0].astype(np.float16) == x[:, 0])]
    assert len(exact) > 100
    assert (quantized(exact, INT4)[0] == exact).all()


@each_format
def test_groups_of_one_number(format_: str) -> None:
    zero, _ = quantized(np.zeros((4, 32), np.float32), format_)
    assert not zero.any()
    numbers = np.array([1.0, -1.0, 0.1, 1234.567, 2.0**-24, -1e-30, 60000.0], np.float32)
    became, _ = quantized(np.repeat(numbers[:, None], 32, axis=1), format_)
    error = np.abs(became - numbers[:, None])
    assert (error <= np.maximum(2**-11 * np.abs(numbers[:, None]), SMALLEST / 2)).all()


@each_format
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, -3.4e38])
def test_numbers_that_no_group_can_hold(format_: str, bad: float) -> None:
    x = samples()["normal"][:5].copy()
    x[3, 17] = bad
    with pytest.raises(ValueError, match=f"row 3 cannot be quantised to {format_}"):
        _native.quantize(x, format_)
    data = x.view(np.uint8).reshape(-1)
    with pytest.raises(ValueError, match=f"not finite, or too large .* packed as {format_}"):
        _native.matmul(np.ones((1, 32), np.float32), "f32", 5, 32, data, "auto", 2, format_)


def test_the_largest_numbers() -> None:
    """One step from the largest f16 on each side."""
    for format_, largest in ((INT8, 127.0 * LARGEST), (INT4, LARGEST)):
        x = np.linspace(-largest, largest, 32, dtype=np.float32)[None]
        became, stored = quantized(x, format_)
        assert (np.abs(became - x) <= 0.5000001 * scales(format_, stored)).all()
        with pytest.raises(ValueError):
            _native.quantize(x * np.float32(1.01), format_)


# -- packing


def as_type(x: NDArray[np.float32], type_: str) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Stored bytes of a type of floats, and the numbers that they are."""
    if type_ == "bf16":
        bits = (x.view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint8).reshape(-1), (bits.astype(np.uint32) << 16).view(np.float32).reshape(x.shape)
    narrow = x.astype(np.float16 if type_ == "f16" else np.float32)
    return narrow.view(np.uint8).reshape(-1), narrow.astype(np.float32)


@each_format
@pytest.mark.parametrize("type_", FLOATS)
@pytest.mark.parametrize(("rows", "cols"), [(1, 32), (16, 64), (37, 96), (130, 32)])
def test_packing_quantizes_each_row_alike_on_any_number_of_threads(
    format_: str, type_: str, rows: int, cols: int
) -> None:
    """C1: the bits of a product are those of a matrix that was quantised before, row by row."""
    rng = np.random.default_rng([rows, cols])
    data, values = as_type(rng.standard_normal((rows, cols), np.float32), type_)
    x = rng.standard_normal((5, cols), np.float32)
    expected = _native.matmul(x, format_, rows, cols, _native.quantize(values, format_), "auto", 1)
    for threads in (1, 2, 3):
        assert (_native.matmul(x, type_, rows, cols, data, "auto", threads, format_) == expected).all()


def test_types_that_nothing_is_packed_as() -> None:
    x = np.ones((1, 32), np.float32)
    for type_, packed in (("f32", "q4_0"), ("f32", "f16"), ("q8_0", "q4_1"), ("q4_1", "q8_0")):
        data = _native.quantize(x, type_) if type_.startswith("q") else x.view(np.uint8).reshape(-1)
        with pytest.raises(ValueError, match=f"{type_} weights cannot be packed as {packed}"):
            _native.matmul(x, type_, 1, 32, data, "auto", 1, packed)
    with pytest.raises(ValueError, match="whole number"):
        _native.matmul(x[:, :31].copy(), "f32", 1, 31, x[0, :31].copy().view(np.uint8), "auto", 1, "q8_0")
    for call in (lambda: _native.quantize(x, "q4_0"), lambda: _native.quantize(x[:, :31].copy(), "q8_0")):
        with pytest.raises(ValueError):
            call()


# -- a model's weights


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the log says of the weights."""
    found: list[str] = []
    monkeypatch.setattr(weights._log, "info", lambda text, *values: found.append(text % values))
    assert isinstance(weights._log, logging.Logger)
    yield found


def config(quantization: str | None = None, **given: Any) -> EngineConfig:
    settings: dict[str, Any] = {"threads": 2, "max_num_seqs": 4, "max_model_len": 64, "kv_cache_dtype": "f32"}
    return EngineConfig(quantization=quantization, **settings | given)  # type: ignore[arg-type]


def tiny(specs: Any, tensors: Any, stored: Any, name: str = "llama", **changes: Any) -> Checkpoint:
    spec = dataclasses.replace(specs[name], **changes)
    return Checkpoint("tiny", spec, {key: stored(values) for key, values in tensors(spec).items()})


def test_which_matrices_become_what(specs: Any, tensors: Any, stored: Any, lines: list[str]) -> None:
    """Embeddings, the output matrix and v keep 8 bits; norms and biases are not touched."""
    checkpoint = tiny(specs, tensors, stored, "interleaved", tied_embeddings=False)
    for quantization, expected in (("int8", INT8), ("int4", INT4)):
        types = packed_types(checkpoint, config(quantization))
        for name, tensor in checkpoint.tensors.items():
            wide = INT8 if name in SENSITIVE else expected
            assert types[name] == (wide if len(tensor.shape) == 2 else "f32"), name
    assert lines == [f"--quantization {name}: 16 of 16 matrices are quantised" for name in ("int8", "int4")]
    assert set(packed_types(checkpoint, config()).values()) == {"f32"}


def test_matrices_that_stay_are_told(specs: Any, tensors: Any, stored: Any, lines: list[str]) -> None:
    """Those quantised in the file, and those whose rows are no whole number of groups."""
    checkpoint = tiny(specs, tensors, stored, ffn_size=90)
    already = dict(checkpoint.tensors) | {"embed": stored(tensors(checkpoint.spec)["embed"], True)}
    types = packed_types(dataclasses.replace(checkpoint, tensors=already), config("int4"))
    assert types["layers.0.down"] == "f32" and types["embed"] == INT8 and types["layers.0.up"] == INT4
    (line,) = lines
    assert line.startswith("--quantization int4: 13 of 16 matrices are quantised; ")
    assert "1 are quantised in the file" in line and "2 have rows that are no multiple of 32 values" in line


def test_nothing_to_quantize_is_an_error(specs: Any, tensors: Any, stored: Any) -> None:
    llama = specs["llama"]
    done = Checkpoint("tiny", llama, {name: stored(values, True) for name, values in tensors(llama).items()})
    with pytest.raises(ConfigError, match=r"--quantization int8 has no effect: .* 16 are quantised in the file; leave"):
        NativeRunner(done, config("int8")).start()
    with pytest.raises(ConfigError, match=r"--quantization int4 has no effect: .* no multiple of 32"):
        NativeRunner(tiny(specs, tensors, stored, "odd"), config("int4")).start()


@pytest.mark.parametrize("type_", FLOATS)
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_quantised_at_load_is_that_of_a_quantised_file(
    specs: Any, tensors: Any, quantization: str, type_: str, step_item: Any
) -> None:
    """The same bits, with rows in another order for the rotary embedding, on any number of threads."""
    spec = specs["interleaved"]
    floats, blocks = {}, {}
    for name, values in tensors(spec).items():
        data, numbers = as_type(values, type_ if values.ndim == 2 else "f32")
        floats[name] = blocks[name] = Tensor(type_ if values.ndim == 2 else "f32", values.shape, data)
        if values.ndim == 2:
            format_ = INT4 if quantization == "int4" and name not in SENSITIVE else INT8
            blocks[name] = Tensor(format_, values.shape, _native.quantize(numbers, format_))
    params = SamplingParams(temperature=0.0, logprobs=5)
    found = []
    for tensors_, settings in (
        (blocks, config()),
        (floats, config(quantization)),
        (floats, config(quantization, threads=1)),
    ):
        runner = NativeRunner(Checkpoint("tiny", spec, tensors_), settings)
        runner.start()
        found.append(runner.submit(StepPlan(1, (step_item(range(40), params=params),))).logprobs)
        runner.close()
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("given", [{}, {"weights": "f32"}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_the_memory_is_known_before_the_weights_are_read(
    specs: Any, tensors: Any, stored: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny(specs, tensors, stored, "interleaved")
    settings = config(**given)
    expected = packed_bytes(checkpoint, packed_types(checkpoint, settings))
    runner = NativeRunner(checkpoint, settings)
    assert dict(runner.start().details)["weights"] == expected
    runner.close()
    monkeypatch.setattr("chairlift.runners.native.available_memory", lambda: int(expected / 0.9))
    with pytest.raises(ConfigError, match=f"the weights take {expected / 1024:.1f} KiB"):
        NativeRunner(checkpoint, settings).start()


def test_quantised_weights_fit_where_floats_do_not(
    specs: Any, tensors: Any, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny(specs, tensors, stored, vocab_size=40000)
    sizes = [packed_bytes(checkpoint, packed_types(checkpoint, config(name))) for name in (None, "int8", "int4")]
    assert sizes[0] > 3.5 * sizes[1] and sizes[1] > sizes[2]
    monkeypatch.setattr("chairlift.runners.native.available_memory", lambda: sizes[0])
    with pytest.raises(ConfigError, match="the weights take"):
        NativeRunner(checkpoint, config()).start()
    NativeRunner(checkpoint, config("int8", max_num_batched_tokens=16)).start()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_weights_that_cannot_be_quantised_are_named(specs: Any, tensors: Any, stored: Any, bad: float) -> None:
    checkpoint = tiny(specs, tensors, stored)
    values = tensors(checkpoint.spec)["layers.1.gate"]
    values[70, 40] = bad
    broken = dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, "layers.1.gate": stored(values)})
    for quantization in ("int8", "int4"):
        with pytest.raises(
            ModelError, match=r"tiny: tensor layers\.1\.gate: weights that are not finite, or too large"
        ):
            NativeRunner(broken, config(quantization)).start()


def test_a_swap_file_of_other_weights_starts_empty(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """KV of int8 weights is none of int4's."""

    def contents(quantization: str | None) -> int:
        runner = NativeRunner(checkpoint, config(quantization, disk_swap=f"{tmp_path / 'swap'},0.001"))
        runner.start()
        assert runner.disk is not None and runner._model is not None
        kept = len(runner.disk.contents())
        runner.disk.write(0, runner._model.cache()[0], b"a name")
        runner.close()
        return kept

    assert [contents(name) for name in ("int8", "int8", "int4", "int4", None)] == [0, 1, 0, 1, 0]
