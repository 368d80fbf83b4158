"""The GGUF reader: right values for sound files, one clear line for every kind of damage."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from chairlift.errors import ModelError
from chairlift.models import load_checkpoint, load_tokenizer
from chairlift.models.gguf import GGUFFile, Strings

Make = Callable[..., Path]
F32, F16, Q4_0, Q4_K, Q2_K = 0, 1, 2, 12, 10
U8, U32, BOOL, STRING, ARRAY, U64 = 0, 4, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def record(name: str, dims: list[int], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_file(
    path: Path,
    pairs: list[bytes] = [],  # noqa: B006 (never changed)
    records: list[bytes] = [],  # noqa: B006
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> Path:
    """A GGUF file put together by hand, so that anything can be wrong with it."""
    counts = (
        len(records) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(records)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + data)
    return path


def test_a_sound_file_is_read_as_the_gguf_package_wrote_it(make_gguf: Make) -> None:
    path = make_gguf(fields={"x.flag": True, "x.text": "añb", "x.list": [1, 2, 3], "x.floats": [0.5, 1.5]})
    file, other = GGUFFile(path), gguf.GGUFReader(path)
    assert set(file.metadata) == {key for key in other.fields if not key.startswith("GGUF.")}
    assert file.metadata["x.flag"] is True
    assert file.metadata["x.text"] == "añb"
    assert file.metadata["x.list"].tolist() == [1, 2, 3]
    assert file.metadata["x.floats"].tolist() == [0.5, 1.5]
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, Strings) and tokens.decode() == [f"token{i}" for i in range(40)]
    assert list(file.tensors) == [tensor.name for tensor in other.tensors]
    for tensor in other.tensors:
        mine = file.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.type == tensor.tensor_type.name.lower()
        assert mine.data.tobytes() == tensor.data.tobytes()


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment_of_the_file_is_honoured(tmp_path: Path, alignment: int) -> None:
    path = raw_file(
        tmp_path / "a.gguf",
        [pair("general.alignment", U32, struct.pack("<I", alignment))],
        [record("t", [4])],
        np.arange(4, dtype="<f4").tobytes(),
        alignment=alignment,
    )
    assert GGUFFile(path).tensors["t"].data.view("<f4").tolist() == [0, 1, 2, 3]


def test_version_2_and_trailing_garbage_are_accepted(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "a.gguf", [], [record("t", [4])], bytes(16) + b"garbage", version=2)
    assert list(GGUFFile(path).tensors) == ["t"]


def test_names_cannot_break_the_line(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "a.gguf", [], [record("a\nb\x1b[31m", [0])], bytes(64))
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    assert r"tensor a\nb\x1b[31m has" in str(caught.value) and str(caught.value).isprintable()


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "wrong magic": ({"magic": b"GGML"}, "begins with b'GGML'"),
    "a pickle": ({"magic": b"PK\x03\x04"}, "not a GGUF file"),
    "version 1": ({"version": 1}, "version 1 is not supported"),
    "big endian": ({"version": 0x03000000}, "big-endian"),
    "2^63 pairs": ({"num_pairs": 2**63}, f"claims {2**63} metadata pairs"),
    "2^63 tensors": ({"num_tensors": 2**63}, f"claims {2**63} tensors"),
    "2^64 - 1 tensors": ({"num_tensors": 2**64 - 1}, "tensors, more than"),
    "more pairs than there are": (
        {"num_pairs": 2, "pairs": [pair("a", U8, b"\1")], "data": b"\xff" * 64, "alignment": 1},
        "metadata key 1 is",
    ),
    "key longer than the file": ({"pairs": [struct.pack("<Q", 500) + bytes(40)]}, "needs 500 bytes"),
    "key of 2^63 bytes": ({"pairs": [struct.pack("<Q", 2**63) + bytes(40)]}, f"is {2**63} bytes long"),
    "key not UTF-8": ({"pairs": [pair("a", U8, b"\1").replace(b"a", b"\xff")]}, "not UTF-8"),
    "key twice": ({"pairs": [pair("a", U8, b"\1")] * 2}, "key a appears twice"),
    "unknown value type": ({"pairs": [pair("a", 13, bytes(8))]}, "unknown value type 13"),
    "boolean of 2": ({"pairs": [pair("a", BOOL, b"\2")]}, "must be a boolean"),
    "string longer than the file": ({"pairs": [pair("a", STRING, struct.pack("<Q", 2**40))]}, f"needs {2**40} bytes"),
    "array of arrays": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(30))]}, "array of arrays"),
    "array of unknown": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", 99, 1) + bytes(30))]}, "unknown value type 99"),
    "array of 2^63": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", U8, 2**63))]}, f"claims {2**63} array elements"),
    "array of 2^61 u64": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", U64, 2**61))]}, "array elements"),
    "strings of 2^62": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", STRING, 2**62))]}, "array elements"),
    "long string in array": (
        {"pairs": [pair("a", ARRAY, struct.pack("<IQQ", STRING, 2, 2**63) + bytes(30))]},
        f"string 0 of a is {2**63} bytes long",
    ),
    "strings run out": (
        {"pairs": [pair("a", ARRAY, struct.pack("<IQ", STRING, 3) + text("x" * 30))]},
        "a ends after",
    ),
    "alignment of 3": ({"pairs": [pair("general.alignment", U32, struct.pack("<I", 3))]}, "power of two, got 3"),
    "alignment of 0": ({"pairs": [pair("general.alignment", U32, struct.pack("<I", 0))]}, "power of two, got 0"),
    "alignment is text": ({"pairs": [pair("general.alignment", STRING, text("32"))]}, "general.alignment must be"),
    "tensor twice": ({"records": [record("t", [4])] * 2, "data": bytes(64)}, "tensor t appears twice"),
    "no dimensions": ({"records": [record("t", []) + bytes(32)]}, "has 0 dimensions"),
    "5 dimensions": ({"records": [record("t", [1] * 5)]}, "has 5 dimensions"),
    "2^32 - 1 dimensions": ({"records": [text("t") + struct.pack("<I", 2**32 - 1) + bytes(64)]}, "dimensions; 1 to 4"),
    "dimension 0": ({"records": [record("t", [4, 0])], "data": bytes(64)}, "impossible shape [4, 0]"),
    "dimension -1": ({"records": [record("t", [2**64 - 1])], "data": bytes(64)}, "impossible shape"),
    "product overflows": ({"records": [record("t", [2**33, 2**33])], "data": bytes(64)}, "impossible shape"),
    "product wraps to 4": ({"records": [record("t", [2**62, 4, 4])], "data": bytes(64)}, "impossible shape"),
    "type 10": (
        {"records": [record("t", [256], Q2_K)], "data": bytes(84)},
        "has type 10 (Q2_K), which is not",
    ),
    "type 77": ({"records": [record("t", [256], 77)], "data": bytes(84)}, "has type 77, which is not supported"),
    "half a block": (
        {"records": [record("t", [33], Q4_0)], "data": bytes(64)},
        "rows of 33 values, not a multiple",
    ),
    "128 of q4_k": ({"records": [record("t", [128], Q4_K)], "data": bytes(144)}, "not a multiple of 256"),
    "data truncated": ({"records": [record("t", [64])], "data": bytes(255)}, "needs 256 bytes"),
    "offset beyond the end": ({"records": [record("t", [4], F32, 2**40)], "data": bytes(64)}, "needs 16 bytes at byte"),
    "offset of 2^64 - 32": (
        {"records": [record("t", [4], F32, 2**64 - 32)], "data": bytes(64)},
        "needs 16 bytes at byte",
    ),
    "offset misaligned": ({"records": [record("t", [4], F32, 4)], "data": bytes(64)}, "not a multiple of 32"),
    "overlap": (
        {"records": [record("a", [16], F32, 0), record("b", [4], F32, 32)], "data": bytes(64)},
        "tensors a and b overlap at offset 32",
    ),
    "same place": (
        {"records": [record("a", [4], F32, 32), record("b", [4], F32, 32)], "data": bytes(64)},
        "tensors a and b overlap",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_ends_in_one_clear_line(tmp_path: Path, case: str) -> None:
    settings, message = HOSTILE[case]
    path = raw_file(tmp_path / "bad.gguf", **settings)
    tracemalloc.start()
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    line = str(caught.value)
    assert message in line and str(path) in line and "\n" not in line
    assert peak < 1_000_000


def test_empty_missing_and_odd_paths(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="the file is empty"):
        GGUFFile(tmp_path / "empty.gguf")
    with pytest.raises(ModelError, match="there is no such file"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="is not a file"):
        GGUFFile(tmp_path)


def _loads(path: Path) -> bool:
    """Whether checkpoint and tokenizer load; anything but success and `ModelError` fails the test."""
    try:
        load_checkpoint(str(path))
        load_tokenizer(str(path))
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return False
    return True


def test_truncation_anywhere_is_noticed(make_gguf: Make, tmp_path: Path) -> None:
    whole = make_gguf().read_bytes()
    path = tmp_path / "cut.gguf"
    lengths = [*range(64), *range(64, len(whole), 997), len(whole) - 1]
    for length in lengths:
        path.write_bytes(whole[:length])
        assert not _loads(path), length


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["llama", "gemma3", "byte level", "sentencepiece"])
def test_flipped_bytes_never_crash(
    make_gguf: Make,
    tmp_path: Path,
    byte_level_fields: dict[str, Any],
    sentencepiece_fields: dict[str, Any],
    kind: str,
) -> None:
    """Damage of the part that describes the model, byte by byte and in runs."""
    fields = {"byte level": byte_level_fields, "sentencepiece": sentencepiece_fields}.get(kind, {})
    vocab = len(fields.get("tokenizer.ggml.tokens", range(40)))
    original = make_gguf(architecture="gemma3" if kind == "gemma3" else "llama", fields=fields, vocab=vocab)
    whole = original.read_bytes()
    described = len(whole) - sum(tensor.data.size for tensor in GGUFFile(original).tensors.values())
    path, rng = tmp_path / "flipped.gguf", random.Random(0)
    results = []
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(described)
            width = rng.choice([1, 1, 4, 8])
            damaged[at : at + width] = rng.choice([bytes(width), b"\xff" * width, rng.randbytes(width)])
        path.write_bytes(damaged)
        results.append(_loads(path))
    assert not all(results) and any(results)


def test_the_default_model_is_read(smollm2_path: Path) -> None:
    file = GGUFFile(smollm2_path)
    assert len(file.tensors) == 272
    assert file.tensors["token_embd.weight"].shape == (49152, 576)
    assert len(file.metadata["tokenizer.ggml.merges"]) == 48900
