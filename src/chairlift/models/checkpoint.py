"""Loads a model: finds its files, maps their settings to a `DecoderSpec`, and checks and maps its tensors."""

from __future__ import annotations

from pathlib import Path

from chairlift.errors import ModelError
from chairlift.models import safetensors
from chairlift.models.checks import check_spec, collect
from chairlift.models.families import config_family, gguf_family
from chairlift.models.fields import Fields, read_json
from chairlift.models.gguf import GGUFFile
from chairlift.models.hub import Progress, resolve
from chairlift.models.spec import Checkpoint, SourceFile


def load_checkpoint(model: str, *, progress: Progress | None = None) -> Checkpoint:
    """A model ready for a runner; its tensors are views of memory-mapped files.

    Args:
        model: a known name, a GGUF file, a Hugging Face folder, or a hub name.
        progress: called as ``progress(file name, bytes done, bytes in all or None)`` while something is fetched.

    Raises:
        ModelError: it cannot be found or fetched, is damaged, or is of a kind that is not supported.
    """
    path = resolve(model, progress)
    is_path = Path(model).expanduser().exists()
    if path.is_dir():
        return load_folder(path, path.resolve().name if is_path else model)
    return load_gguf(path, path.stem if is_path else model)


def load_gguf(path: Path, name: str) -> Checkpoint:
    """A checkpoint of one GGUF file."""
    sources = _sources(path)
    file = GGUFFile(path)
    family = gguf_family(file)
    spec = family.spec_from_gguf(file)
    check_spec(spec, str(path))
    tensors = collect(spec, family.gguf_names(spec), file.tensors, str(path), ignored=family.gguf_ignored)
    return Checkpoint(name, spec, tensors, sources)


def load_folder(folder: Path, name: str) -> Checkpoint:
    """A checkpoint of a Hugging Face folder: config.json and safetensors."""
    config = read_config(folder)
    family = config_family(config)
    if "quantization_config" in config:
        method = config.section("quantization_config").text("quant_method", "unknown")
        raise config.fail(f"quantization method {method!r:.60} is not supported; use plain weights or a GGUF file")
    spec = family.spec_from_config(config)
    check_spec(spec, config.where)
    sources = _sources(*sorted(folder.glob("*.safetensors*")))  # with the index
    tensors = collect(
        spec,
        family.hf_names(spec),
        safetensors.read_folder(folder),
        str(folder),
        norm_offset=family.HF_NORM_OFFSET,
        ignored=family.hf_ignored,
    )
    return Checkpoint(name, spec, tensors, sources)


def _sources(*paths: Path) -> tuple[SourceFile, ...]:
    try:
        return tuple(SourceFile.of(path) for path in paths)
    except OSError:  # whoever reads it next says what is wrong
        return ()


def read_config(folder: Path) -> Fields:
    """The folder's ``config.json``."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder}: has no config.json, so it is not a Hugging Face model folder")
    return Fields(read_json(path), str(path))
