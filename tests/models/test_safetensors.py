"""Reading safetensors: what is sound, what is damaged, what is hostile, and what is never read."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from chairlift.errors import ModelError
from chairlift.models import load_checkpoint
from chairlift.models.safetensors import INDEX, read_file, read_folder

Tiny = Callable[[str], tuple[Path, Any]]


def raw_file(path: Path, header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A file put together by hand, so that anything can be wrong with it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_values_are_those_the_library_wrote(tmp_path: Path) -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1.5, -2.0], np.float16),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    tensors = read_file(tmp_path / "x.safetensors")
    assert set(tensors) == {"a", "b"}
    assert tensors["a"].type == "f32" and tensors["a"].shape == (2, 3)
    assert tensors["a"].data.tobytes() == arrays["a"].tobytes()
    assert tensors["b"].type == "f16" and tensors["b"].data.tobytes() == arrays["b"].tobytes()
    assert not tensors["a"].data.flags.writeable


HOSTILE: dict[str, tuple[Any, bytes, int | None]] = {
    "empty header": (b"", b"", None),
    "header of 2^63": (b"{}", b"", 2**63),
    "header beyond the file": (b"{}", b"", 1000),
    "not JSON": (b"{{{{", b"", None),
    "not an object": (b"[1]", b"", None),
    "nested too deep": (b'{"a":' * 100_000, b"", None),
    "key twice": (b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4, [1])).encode(),) * 2), bytes(4), None),
    "beyond the end": ({"a": entry(0, 64, [16])}, bytes(60), None),
    "end before begin": ({"a": entry(8, 4, [1])}, bytes(16), None),
    "negative offset": ({"a": entry(-4, 0, [1])}, bytes(16), None),
    "offsets of 2^63": ({"a": entry(2**63, 2**63 + 4, [1])}, bytes(16), None),
    "shape of 2^40": ({"a": entry(0, 16, [2**40])}, bytes(16), None),
    "shape overflows": ({"a": entry(0, 16, [2**33, 2**33])}, bytes(16), None),
    "negative shape": ({"a": entry(0, 16, [-4])}, bytes(16), None),
    "overlap": ({"a": entry(0, 16, [4]), "b": entry(8, 24, [4])}, bytes(24), None),
    "hole": ({"a": entry(0, 16, [4]), "b": entry(32, 48, [4])}, bytes(48), None),
    "unknown type": ({"a": entry(0, 16, [4], "F99")}, bytes(16), None),
    "no offsets": ({"a": {"dtype": "F32", "shape": [4]}}, bytes(16), None),
    "text for shape": ({"a": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}}, bytes(16), None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_ends_in_one_clear_line(tmp_path: Path, case: str) -> None:
    path = raw_file(tmp_path / "bad.safetensors", *HOSTILE[case])
    with pytest.raises(ModelError) as caught:
        read_file(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_types_that_are_no_weights_are_named(tmp_path: Path) -> None:
    save_file({"a": np.arange(4, dtype=np.int64)}, tmp_path / "x.safetensors")
    with pytest.raises(ModelError, match=r"tensor 'a' has type I64, which is not supported \(supported: F32"):
        read_file(tmp_path / "x.safetensors")


def _loads(folder: Path) -> bool:
    try:
        load_checkpoint(str(folder))
    except ModelError as error:
        assert "\n" not in str(error)
        return False
    return True


def test_truncation_and_flipped_bytes_never_crash(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint("llama")[0], folder)
    path, rng = folder / "model.safetensors", random.Random(0)
    whole = path.read_bytes()
    for length in [*range(40), *range(40, len(whole), 4099), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert not _loads(folder), length
    header = 8 + struct.unpack_from("<Q", whole)[0]
    results = []
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 2, 8])):
            damaged[rng.randrange(header)] = rng.randrange(256)
        path.write_bytes(damaged)
        results.append(_loads(folder))
    assert not all(results)


def test_flipped_settings_never_crash(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint("gemma3-scaled")[0], folder)
    path, rng = folder / "config.json", random.Random(0)
    whole = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 2, 4])):
            damaged[rng.randrange(len(whole))] = rng.choice(b'0123456789-"[]{},:eNaI')
        path.write_bytes(damaged)
        _loads(folder)


@pytest.mark.parametrize(
    "shard",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "c:\\x.safetensors", ".x.safetensors", "x", 7],
)
def test_a_shard_cannot_lead_out_of_its_folder(tmp_path: Path, shard: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelError, match=r"must be the name of a .safetensors file in the same folder"):
        read_folder(tmp_path)


def test_an_index_must_agree_with_its_shards(tmp_path: Path) -> None:
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "x.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}))
    with pytest.raises(ModelError, match=r"tensor 'b' is not in x\.safetensors"):
        read_folder(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "y.safetensors"}}))
    with pytest.raises(ModelError, match=r"y\.safetensors: there is no such file"):
        read_folder(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="weight_map is missing"):
        read_folder(tmp_path)


def test_pickles_are_never_loaded(tiny_checkpoint: Tiny, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint("llama")[0], tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").rename(tmp_path / "copy" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model.bin\), which are never loaded"):
        load_checkpoint(str(tmp_path / "copy"))
    (tmp_path / "copy" / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"holds no \*\.safetensors file"):
        load_checkpoint(str(tmp_path / "copy"))


def test_files_of_other_names_are_joined_unless_they_repeat_a_tensor(tmp_path: Path) -> None:
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(4, np.float32)}, tmp_path / "two.safetensors")
    assert set(read_folder(tmp_path)) == {"a", "b"}
    save_file({"b": np.zeros(4, np.float32)}, tmp_path / "three.safetensors")
    with pytest.raises(ModelError, match="tensor b is also in another file"):
        read_folder(tmp_path)


def test_a_folder_without_settings_or_with_broken_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(ModelError, match="is not valid JSON"):
        load_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(ModelError, match="the key 'a' appears twice"):
        load_checkpoint(str(tmp_path))
