"""Reads safetensors checkpoints: validated by the `safetensors` library, then memory-mapped as raw bytes.

The library's own views do not give bfloat16 to numpy; the header's offsets, which it has checked, do.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from chairlift.errors import ModelError
from chairlift.models.fields import Fields, one_line, parse_json, read_json
from chairlift.models.spec import Tensor, TensorType

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES: dict[str, TensorType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder, of one file or of the shards that its index names."""
    if (folder / INDEX).exists():
        return _read_shards(folder, Fields(read_json(folder / INDEX), str(folder / INDEX)))
    if (folder / SINGLE).exists():
        return read_file(folder / SINGLE)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(_nothing_found(folder))
    tensors: dict[str, Tensor] = {}
    for path in files:
        for name, tensor in read_file(path).items():
            if name in tensors:
                raise ModelError(f"{path}: tensor {name} is also in another file of this folder")
            tensors[name] = tensor
    return tensors


def _nothing_found(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: holds only pickled weights ({pickles[0]}), which are never loaded since they can run code; "
            "convert them to safetensors"
        )
    return f"{folder}: holds no *.safetensors file"


def _read_shards(folder: Path, index: Fields) -> dict[str, Tensor]:
    weight_map = index.section("weight_map").values
    shards: dict[str, dict[str, Tensor]] = {}
    tensors: dict[str, Tensor] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise index.fail(f"shard {shard!r:.80} must be the name of a .safetensors file in the same folder")
        if shard not in shards:
            shards[shard] = read_file(folder / shard)
        if name not in shards[shard]:
            raise index.fail(f"tensor {name!r:.80} is not in {shard}, where the index says it is")
        tensors[name] = shards[shard][name]
    return tensors


def _is_plain_name(name: str) -> bool:
    """Whether a shard's name cannot lead out of its folder."""
    return name.endswith(".safetensors") and not name.startswith(".") and not set(name) & set("/\\:\0")


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one file; data memory-mapped. Raises `ModelError` for a file that is damaged or hostile."""
    if not path.is_file():
        raise ModelError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="numpy"):
            pass
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (SafetensorError, ValueError) as error:
        raise ModelError(f"{path}: is not a sound safetensors file: {one_line(error)}") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    (length,) = struct.unpack_from("<Q", mapped, 0)
    header = parse_json(mapped[8 : 8 + length], str(path))
    header.pop("__metadata__", None)
    data = np.frombuffer(mapped, np.uint8, offset=8 + length)
    return {name: _tensor(name, entry, data, path) for name, entry in header.items()}


def _tensor(name: str, entry: dict[str, Any], data: np.ndarray, path: Path) -> Tensor:
    """One tensor of a header that the library has checked."""
    dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
    if dtype not in _DTYPES:
        raise ModelError(
            f"{path}: tensor {name!r:.80} has type {dtype}, which is not supported (supported: {', '.join(_DTYPES)})"
        )
    return Tensor(_DTYPES[dtype], tuple(entry["shape"]), data[begin:end])
