"""Reads GGUF files: metadata and memory-mapped tensors.

Why not the `gguf` package's reader: it takes ten seconds for a vocabulary of 262,144 tokens, since it builds one numpy
view a token, and it trusts its input. Here string arrays stay bytes until someone asks for them, and every count,
length and offset is compared with the file's size before it is used, so that no file, however hostile, costs more time
or memory than is in proportion to its length.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.errors import ModelError
from chairlift.models.fields import Fields, printable
from chairlift.models.spec import Tensor, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME = 1024  # bytes of a metadata key or a tensor name; real ones are below 64
_ARRAY, _STRING, _BOOL = 9, 8, 7
_MIN_PAIR = 8 + 4 + 1  # bytes of the shortest metadata pair: an empty key, a type, a one-byte value
_MIN_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of the shortest tensor record: an empty name and one dimension

# GGUF value type -> numpy type. Booleans are bytes that must be 0 or 1.
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}

# ggml tensor type -> (our name, values in a block, bytes of a block)
BLOCKS: dict[int, tuple[TensorType, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    30: ("bf16", 1, 2),
}

# Names of types that exist and are not supported, so that the error can name them.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Strings:
    """An array of strings that still lies in the file: ``count`` of them from byte ``start``, checked to fit."""

    file: mmap.mmap
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[bytes]:
        file, at, length = self.file, self.start, struct.Struct("<Q").unpack_from
        for _ in range(self.count):
            begin = at + 8
            at = begin + length(file, at)[0]
            yield file[begin:at]

    def decode(self) -> list[str]:
        """The strings as text; bytes that are not UTF-8 become U+FFFD."""
        return [raw.decode("utf-8", "replace") for raw in self]


class _Cursor:
    """A position in the file that never passes the file's end."""

    def __init__(self, path: Path, file: mmap.mmap) -> None:
        self.path, self.file, self.at, self.size = path, file, 0, len(file)

    def fail(self, message: str) -> ModelError:
        return ModelError(printable(f"{self.path}: {message}"))

    def skip(self, length: int, what: str) -> int:
        """Moves on by ``length`` bytes and returns where it was."""
        if length > self.size - self.at:
            raise self.fail(
                f"{what} needs {length} bytes at byte {self.at}, but the file ends at byte {self.size}; "
                "it is truncated or damaged"
            )
        begin = self.at
        self.at += length
        return begin

    def number(self, dtype: np.dtype[Any], what: str) -> Any:
        return np.frombuffer(self.file, dtype, 1, self.skip(dtype.itemsize, what))[0].item()

    def u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.file, self.skip(4, what))[0])

    def u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.file, self.skip(8, what))[0])

    def string(self, what: str, limit: int | None = None) -> bytes:
        length = self.u64(f"the length of {what}")
        if limit is not None and length > limit:
            raise self.fail(f"{what} is {length} bytes long; at most {limit} are allowed")
        begin = self.skip(length, what)
        return self.file[begin : begin + length]

    def name(self, what: str) -> str:
        raw = self.string(what, MAX_NAME)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8: {raw[:40]!r}") from None

    def strings(self, count: int, what: str) -> Strings:
        """Walks over ``count`` strings; only their lengths are read."""
        file, size, start, length = self.file, self.size, self.at, struct.Struct("<Q").unpack_from
        at = start
        for i in range(count):
            if at + 8 > size:
                raise self.fail(f"{what} ends after {i} of {count} strings; the file is truncated or damaged")
            step = 8 + length(file, at)[0]
            if step > size - at:
                raise self.fail(f"string {i} of {what} is {step - 8} bytes long, which passes the end of the file")
            at += step
        self.at = at
        return Strings(file, start, count)


class GGUFFile:
    """A checked GGUF file.

    Attributes:
        path: where it is.
        metadata: key -> int, float, bool, str, a numpy array, or `Strings`.
        fields: typed reading of the metadata.
        tensors: name -> `Tensor`; shapes in row-major order (the file's own order reversed), data memory-mapped.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises `ModelError` for anything that is not a sound GGUF file."""
        self.path = Path(path)
        cursor = _Cursor(self.path, _map(self.path))
        num_tensors, num_pairs = _read_header(cursor)
        self.metadata = _read_metadata(cursor, num_pairs)
        self.fields = Fields(self.metadata, str(self.path))
        self.tensors = _read_tensors(cursor, num_tensors, self._alignment())

    def _alignment(self) -> int:
        alignment = self.fields.whole("general.alignment", DEFAULT_ALIGNMENT, high=2**32 - 1)
        if alignment < 1 or alignment & (alignment - 1):
            raise self.fields.fail(f"general.alignment must be a power of two, got {alignment}")
        return alignment


def _map(path: Path) -> mmap.mmap:
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        raise ModelError(f"{path}: is not a file")
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file") from None
    except ValueError:
        raise ModelError(f"{path}: the file is empty") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """Returns the number of tensors and of metadata pairs."""
    magic = cursor.file[:4]
    if magic != MAGIC:
        raise cursor.fail(f"not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}")
    cursor.skip(4, "the magic number")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        hint = "; it seems to be a big-endian file" if big_endian else ""
        raise cursor.fail(f"GGUF version {version} is not supported (supported: 2 and 3){hint}")
    num_tensors, num_pairs = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    room = cursor.size - cursor.at
    if num_pairs > room // _MIN_PAIR:
        raise cursor.fail(f"claims {num_pairs} metadata pairs, more than {cursor.size} bytes can hold")
    if num_tensors > room // _MIN_TENSOR:
        raise cursor.fail(f"claims {num_tensors} tensors, more than {cursor.size} bytes can hold")
    return num_tensors, num_pairs


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(count):
        key = cursor.name(f"metadata key {i}")
        if key in metadata:
            raise cursor.fail(f"metadata key {key} appears twice")
        metadata[key] = _read_value(cursor, key)
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Any:
    kind = cursor.u32(f"the type of {key}")
    if kind == _STRING:
        return cursor.string(f"the value of {key}").decode("utf-8", "replace")
    if kind == _ARRAY:
        return _read_array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.fail(f"metadata key {key} has the unknown value type {kind}")
    value = cursor.number(_SCALARS[kind], f"the value of {key}")
    if kind == _BOOL:
        if value > 1:
            raise cursor.fail(f"metadata key {key} must be a boolean (0 or 1), got {value}")
        return bool(value)
    return value


def _read_array(cursor: _Cursor, key: str) -> np.ndarray | Strings:
    kind, count = cursor.u32(f"the element type of {key}"), cursor.u64(f"the length of {key}")
    if kind == _ARRAY:
        raise cursor.fail(f"metadata key {key} is an array of arrays, which no supported model uses")
    if kind != _STRING and kind not in _SCALARS:
        raise cursor.fail(f"metadata key {key} is an array of the unknown value type {kind}")
    width = 8 if kind == _STRING else _SCALARS[kind].itemsize
    if count > (cursor.size - cursor.at) // width:
        raise cursor.fail(f"metadata key {key} claims {count} array elements, more than the rest of the file can hold")
    if kind == _STRING:
        return cursor.strings(count, key)
    begin = cursor.skip(count * width, key)
    return np.frombuffer(cursor.file, _SCALARS[kind], count, begin)


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Tensor]:
    """Reads the tensor records, then maps each tensor's data."""
    records: dict[str, tuple[TensorType, tuple[int, ...], int, int]] = {}  # type, shape, offset, bytes
    for i in range(count):
        name = cursor.name(f"the name of tensor {i}")
        if name in records:
            raise cursor.fail(f"tensor {name} appears twice")
        records[name] = _read_record(cursor, name, alignment)
    base = -(-cursor.at // alignment) * alignment
    _check_extents(cursor, records, base)
    whole = np.frombuffer(cursor.file, np.uint8)
    return {
        name: Tensor(kind, shape, whole[base + offset : base + offset + length])
        for name, (kind, shape, offset, length) in records.items()
    }


def _read_record(cursor: _Cursor, name: str, alignment: int) -> tuple[TensorType, tuple[int, ...], int, int]:
    num_dims = cursor.u32(f"the dimensions of tensor {name}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    dims = [cursor.u64(f"the shape of tensor {name}") for _ in range(num_dims)]
    kind, offset = cursor.u32(f"the type of tensor {name}"), cursor.u64(f"the offset of tensor {name}")
    if kind not in BLOCKS:
        label = f" ({_OTHER_TYPES[kind]})" if kind in _OTHER_TYPES else ""
        supported = ", ".join(known.upper() for known, _, _ in BLOCKS.values())
        raise cursor.fail(f"tensor {name} has type {kind}{label}, which is not supported (supported: {supported})")
    type_name, block, block_bytes = BLOCKS[kind]
    if min(dims) < 1 or math.prod(dims) >= 2**62:
        raise cursor.fail(f"tensor {name} has the impossible shape {dims}")
    if dims[0] % block:
        raise cursor.fail(
            f"tensor {name} of type {type_name.upper()} has rows of {dims[0]} values, not a multiple of {block}"
        )
    if offset % alignment:
        raise cursor.fail(f"tensor {name} begins at offset {offset}, which is not a multiple of {alignment}")
    return type_name, tuple(reversed(dims)), offset, math.prod(dims) // block * block_bytes


def _check_extents(
    cursor: _Cursor, records: dict[str, tuple[TensorType, tuple[int, ...], int, int]], base: int
) -> None:
    """Each tensor lies within the file, and no two share a byte."""
    end, previous = 0, ""
    for name, (_, _, offset, length) in sorted(records.items(), key=lambda item: item[1][2]):
        if base + offset + length > cursor.size:
            raise cursor.fail(
                f"tensor {name} needs {length} bytes at byte {base + offset}, but the file ends at byte "
                f"{cursor.size}; it is truncated or damaged"
            )
        if offset < end:
            raise cursor.fail(f"tensors {previous} and {name} overlap at offset {offset}")
        end, previous = offset + length, name
