"""Weight formats and matrix products of the C++ core, for every instruction set this processor runs.

Oracles: the ``gguf`` package for what a stored block means, float64 numpy for products.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import get_args

import gguf
import numpy as np
import pytest

from chairlift import _native
from chairlift.models.spec import TensorType

TYPES: tuple[str, ...] = get_args(TensorType)
QUANTIZED = tuple(name for name in TYPES if name.startswith("q"))
ISAS = _native.available_isas()
GROUP = 32  # inputs per scale of the activations

# Where a block of each type has its f16 scales; any other byte may have any value.
SCALE_OFFSETS = {
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q8_0": (0,),
    "q4_k": (0, 2),
    "q5_k": (0, 2),
    "q6_k": (208,),
}

each_type = pytest.mark.parametrize("type_", TYPES)
each_isa = pytest.mark.parametrize("isa", ISAS)


def quant_type(type_: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[type_.upper()]


def stored(type_: str, rows: int, cols: int, seed: int = 0, fill: int | None = None) -> np.ndarray:
    """A valid tensor of random weights as uint8 [bytes]: finite scales of both signs, all else random (or ``fill``)."""
    rng = np.random.default_rng([seed, rows, cols, TYPES.index(type_)])
    if type_ == "f32":
        return rng.standard_normal((rows, cols), np.float32).view(np.uint8).reshape(-1)
    if type_ == "f16":
        return rng.standard_normal((rows, cols)).astype(np.float16).view(np.uint8).reshape(-1)
    if type_ == "bf16":
        wide = rng.standard_normal((rows, cols), np.float32).view(np.uint32) >> 16
        return wide.astype(np.uint16).view(np.uint8).reshape(-1)
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[quant_type(type_)]
    shape = (rows * cols // block_values, block_bytes)
    blocks = rng.integers(0, 256, shape, np.uint8) if fill is None else np.full(shape, fill, np.uint8)
    for offset in SCALE_OFFSETS[type_]:
        scales = (rng.uniform(0.001, 0.01, len(blocks)) * rng.choice((-1, 1), len(blocks))).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def oracle_weights(type_: str, rows: int, cols: int, data: np.ndarray) -> np.ndarray:
    """[rows, cols] float32 by the gguf package."""
    weights: np.ndarray = gguf.quants.dequantize(data.reshape(rows, -1), quant_type(type_))
    return weights.reshape(rows, cols).astype(np.float32)


def quantized_activations(x: np.ndarray) -> np.ndarray:
    """What the kernels take for x: int8 in groups of 32, scale = max|x| / 127. float64, same shape."""
    groups = x.reshape(len(x), -1, GROUP).astype(np.float32)
    peak = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 0)
    values = np.rint(groups * inverse).astype(np.float64)
    seen: np.ndarray = values * (peak / np.float32(127))
    return seen.reshape(x.shape)


def activations(rows: int, cols: int, seed: int = 1) -> np.ndarray:
    """Rows of very different sizes, with one large value each, as language models have them."""
    rng = np.random.default_rng([seed, rows, cols])
    x = rng.standard_normal((rows, cols), np.float32) * np.exp2(rng.integers(-6, 7, (rows, 1))).astype(np.float32)
    x[np.arange(rows), rng.integers(0, cols, rows)] *= 30
    return x


def matmul(
    x: np.ndarray, type_: str, rows: int, data: np.ndarray, isa: str, packed: str | None = None, threads: int = 1
) -> np.ndarray:
    return _native.matmul(x, type_, rows, x.shape[1], data, isa, threads, packed)


def assert_bits_equal(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def test_instruction_sets_best_first() -> None:
    """I2: there is always a kernel that runs."""
    assert ISAS[-1] == "portable"
    assert len(set(ISAS)) == len(ISAS)


@each_type
def test_dequantize_is_exact(type_: str) -> None:
    rows, cols = 5, 512
    data = stored(type_, rows, cols)
    assert_bits_equal(_native.dequantize(type_, rows, cols, data), oracle_weights(type_, rows, cols, data))


@pytest.mark.parametrize("type_", [name for name in QUANTIZED if not name.endswith("k")])
def test_dequantize_reads_what_gguf_writes(type_: str) -> None:
    weights = np.random.default_rng(3).standard_normal((4, 128), np.float32)
    data = gguf.quants.quantize(weights, quant_type(type_)).reshape(-1).view(np.uint8)
    assert_bits_equal(_native.dequantize(type_, 4, 128, data), oracle_weights(type_, 4, 128, data))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 65504.0, 2.0**-14, 2.0**-24, -3 * 2.0**-24, np.inf, -np.inf])
def test_dequantize_f16_extremes(value: float) -> None:
    data = np.array([value], np.float16)
    assert_bits_equal(_native.dequantize("f16", 1, 1, data.view(np.uint8)), data.astype(np.float32)[None])


@each_isa
@each_type
@pytest.mark.parametrize("rows", [16, 37])
def test_matmul_against_float64(type_: str, isa: str, rows: int) -> None:
    """The product of the (exactly known) quantised activations, to a few units in the last place of its terms."""
    cols, m = 768, 9
    data, x = stored(type_, rows, cols), activations(9, cols)
    weights = oracle_weights(type_, rows, cols, data).astype(np.float64)
    seen = quantized_activations(x) if type_ in QUANTIZED else x.astype(np.float64)
    terms = np.abs(seen) @ np.abs(weights).T
    result = matmul(x, type_, rows, data, isa)
    assert result.shape == (m, rows) and result.dtype == np.float32
    assert (np.abs(result - seen @ weights.T) <= 1e-5 * terms).all()


@each_isa
@pytest.mark.parametrize("type_", QUANTIZED)
def test_matmul_error_is_that_of_int8_activations(type_: str, isa: str) -> None:
    """Against the unquantised activations: each is off by at most half of its group's max / 127."""
    rows, cols = 48, 1024
    data, x = stored(type_, rows, cols), activations(8, cols)
    weights = oracle_weights(type_, rows, cols, data).astype(np.float64)
    steps = np.abs(x.reshape(8, -1, GROUP)).max(-1, keepdims=True).repeat(GROUP, -1).reshape(x.shape) / 127.0
    bound = 0.5001 * steps @ np.abs(weights).T + 1e-5 * np.abs(x) @ np.abs(weights).T
    error = np.abs(matmul(x, type_, rows, data, isa) - x.astype(np.float64) @ weights.T)
    assert (error <= bound).all()
    assert error.max() > 0


@each_isa
@each_type
def test_packed_as_f32_multiplies_in_f32(type_: str, isa: str) -> None:
    rows, cols = 21, 256
    data, x = stored(type_, rows, cols), activations(6, cols)
    weights = oracle_weights(type_, rows, cols, data).astype(np.float64)
    error = np.abs(matmul(x, type_, rows, data, isa, packed="f32") - x.astype(np.float64) @ weights.T)
    assert (error <= 1e-5 * np.abs(x) @ np.abs(weights).T).all()


@each_isa
@pytest.mark.parametrize("type_", QUANTIZED)
@pytest.mark.parametrize("fill", [0x00, 0x80, 0xFF])
@pytest.mark.parametrize("signs", ["same", "alternating"])
def test_largest_products_do_not_overflow(type_: str, isa: str, fill: int, signs: str) -> None:
    """All values at an end of their range against activations of +-127: sums of 16-bit lanes stay exact."""
    rows, cols = 16, 256
    data = stored(type_, rows, cols, fill=fill)
    x = np.ones((20, cols), np.float32)
    x[:, 1::2] *= 1 if signs == "same" else -1
    x *= np.array(4 * [1, -1, 2, -2, 127], np.float32)[:, None]
    weights = oracle_weights(type_, rows, cols, data).astype(np.float64)
    error = np.abs(matmul(x, type_, rows, data, isa) - quantized_activations(x) @ weights.T)
    assert (error <= 1e-5 * np.abs(x).max(1, keepdims=True) * np.abs(weights).sum(1) + 1e-6).all()


@each_isa
@each_type
def test_a_row_has_the_same_bits_in_any_batch(type_: str, isa: str) -> None:
    """C1: every batch size from 1 to 40, every place in a tile, 1 to 3 threads."""
    rows, cols = 70, 256
    data, x = stored(type_, rows, cols), activations(48, cols)
    alone = np.concatenate([matmul(x[i : i + 1], type_, rows, data, isa) for i in range(len(x))])
    assert len(np.unique(alone, axis=0)) == len(x)
    for m in range(1, 41):
        for start in {0, 1, m % 8}:
            part = slice(start, start + m)
            assert_bits_equal(matmul(x[part], type_, rows, data, isa, threads=1 + (m + start) % 3), alone[part])


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in ("avx512", "amx")])
@pytest.mark.parametrize(
    ("type_", "cols"),
    [
        (type_, cols)
        for type_ in TYPES
        for cols in (32, 96, 256, 512 * 32, 512 * 32 + 256)
        if not type_.endswith("k") or cols % 256 == 0  # whose blocks have 256
    ],
)
def test_wider_instructions_give_the_bits_of_avx2(type_: str, isa: str, cols: int) -> None:
    """Exact integers, and for each column the same roundings in the same order: only how many go at once differs. Tiles
    are used from nine rows on, for panels of up to 512 groups, two groups at a time."""
    rows = 40 if cols < 1000 else 18
    data = stored(type_, rows, cols)
    for m in (3, 8, 9, 17, 31, 40) if cols < 1000 else (27,):
        x = activations(m, cols)
        assert_bits_equal(matmul(x, type_, rows, data, isa), matmul(x, type_, rows, data, "avx2"))


@each_isa
def test_many_rows_and_few_panels_use_all_threads_alike(isa: str) -> None:
    """C1: with fewer panels than threads the rows are split as well."""
    data, x = stored("q4_1", 20, 64), activations(300, 64)
    one = matmul(x, "q4_1", 20, data, isa)
    for threads in (2, 3, 5):
        assert_bits_equal(matmul(x, "q4_1", 20, data, isa, threads=threads), one)


@each_isa
@each_type
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_shows_in_its_row_only(type_: str, isa: str, bad: float) -> None:
    """C4: it is never turned into plausible numbers."""
    rows, cols = 18, 256
    data, x = stored(type_, rows, cols), activations(7, cols)
    clean = matmul(x, type_, rows, data, isa)
    x[3, 100] = bad
    result = matmul(x, type_, rows, data, isa)
    assert not np.isfinite(result[3]).any()
    keep = [0, 1, 2, 4, 5, 6]
    assert_bits_equal(result[keep], clean[keep])


@each_isa
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-31, 1e30])
def test_groups_of_extreme_size(isa: str, size: float) -> None:
    data = stored("q8_0", 16, 64)
    x = np.full((2, 64), size, np.float32)
    x[:, GROUP:] = 1
    weights = oracle_weights("q8_0", 16, 64, data).astype(np.float64)
    result = matmul(x, "q8_0", 16, data, isa)
    assert np.isfinite(result).all()
    bound = 0.004 * np.abs(x).astype(np.float64) @ np.abs(weights).T
    assert (np.abs(result - x.astype(np.float64) @ weights.T) <= bound).all()


@each_type
def test_sizes_that_do_not_fit_are_refused(type_: str) -> None:
    """Inputs are hostile until checked."""
    rows, cols = 3, 256
    data = stored(type_, rows, cols)
    x = np.ones((1, cols), np.float32)
    for wrong in (data[:-1], data[:0], np.concatenate([data, data[:1]])):
        with pytest.raises(ValueError, match="bytes, not"):
            _native.dequantize(type_, rows, cols, wrong)
        with pytest.raises(ValueError, match="bytes, not"):
            matmul(x, type_, rows, wrong, "auto")
    for bad_rows, bad_cols in ((0, cols), (-1, cols), (rows, 0), (rows, -256), (1 << 29, 1 << 29)):
        with pytest.raises(ValueError, match="each size must be in"):
            _native.dequantize(type_, bad_rows, bad_cols, data)
    if type_ in QUANTIZED:
        with pytest.raises(ValueError, match="whole number"):
            _native.dequantize(type_, rows, cols + 16, data)


def test_unknown_names_are_refused() -> None:
    data, x = stored("q4_1", 3, 32), np.ones((1, 32), np.float32)
    with pytest.raises(ValueError, match="unknown tensor type 'iq3_s'"):
        _native.dequantize("iq3_s", 3, 32, data)
    with pytest.raises(ValueError, match="instruction set 'mmx'"):
        matmul(x, "q4_1", 3, data, "mmx")
    with pytest.raises(ValueError, match="unknown tensor type 'int3'"):
        matmul(x, "q4_1", 3, data, "auto", packed="int3")
    for threads in (0, -1, 5000):
        with pytest.raises(ValueError, match="threads must be"):
            matmul(x, "q4_1", 3, data, "auto", threads=threads)
    with pytest.raises(ValueError):
        _native.matmul(np.ones((1, 64), np.float32), "q4_1", 3, 32, data, "auto", 1)


def test_threads_that_the_system_does_not_give() -> None:
    """An error that says how many there are, not the end of the process."""
    script = """
import resource, numpy as np
from chairlift import _native
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
x = np.ones((1, 32), np.float32)
try:
    _native.matmul(x, "f32", 1, 32, x.view(np.uint8).reshape(-1), "auto", 1000)
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"the system gives only \d+ of 1000 threads; lower --threads\n", result.stdout)
