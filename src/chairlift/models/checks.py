"""Checks of a spec and its tensors, whichever file they came from: sizes in the header of a file are hostile too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from chairlift.errors import ModelError
from chairlift.models.spec import DecoderSpec, RopeSpec, Tensor

MAX_LAYERS = 1024
MAX_HEAD_DIM = 4096

# field of DecoderSpec -> smallest and largest value that any sensible model has
_RANGES = {
    "vocab_size": (1, 2**22),
    "hidden_size": (1, 2**17),
    "num_layers": (1, MAX_LAYERS),
    "num_heads": (1, 4096),
    "num_kv_heads": (1, 4096),
    "head_dim": (2, MAX_HEAD_DIM),
    "ffn_size": (1, 2**20),
    "max_positions": (1, 2**27),
}


def check_spec(spec: DecoderSpec, where: str) -> None:
    """Raises `ModelError` unless every field is in its range and the fields agree with each other."""
    for name, (low, high) in _RANGES.items():
        value = getattr(spec, name)
        if not low <= value <= high:
            raise ModelError(f"{where}: {name} must be from {low} to {high}, got {value}")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"{where}: the number of heads ({spec.num_heads}) must be a multiple of the number of key-value heads "
            f"({spec.num_kv_heads})"
        )
    if spec.head_dim % 2:
        raise ModelError(f"{where}: the head size must be even, got {spec.head_dim}")
    for name in ("norm_eps", "attn_scale", "embed_scale"):
        value = getattr(spec, name)
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{where}: {name} must be a finite number above 0, got {value}")
    for name in ("attn_softcap", "logit_softcap"):
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= 0):
            raise ModelError(f"{where}: {name} must be a finite number, at least 0, got {value}")
    if spec.layer_windows and (len(spec.layer_windows) != spec.num_layers or min(spec.layer_windows) < 0):
        raise ModelError(f"{where}: {len(spec.layer_windows)} sliding windows do not fit {spec.num_layers} layers")
    for rope in (spec.rope, spec.rope_local):
        if rope is not None:
            _check_rope(rope, spec, where)


def _check_rope(rope: RopeSpec, spec: DecoderSpec, where: str) -> None:
    if not 2 <= rope.dims <= spec.head_dim or rope.dims % 2:
        raise ModelError(f"{where}: rope dimensions must be even and at most {spec.head_dim}, got {rope.dims}")
    for name in ("theta", "attention_factor"):
        value = getattr(rope, name)
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{where}: rope {name} must be a finite number above 0, got {value}")
    scale = rope.inv_freq_scale
    if scale and len(scale) != rope.dims // 2:
        raise ModelError(f"{where}: {len(scale)} rope factors do not fit {rope.dims} rope dimensions")
    if not all(math.isfinite(value) and value > 0 for value in scale):
        raise ModelError(f"{where}: rope factors must be finite numbers above 0, got {min(scale)} to {max(scale)}")


def collect(
    spec: DecoderSpec,
    names: Mapping[str, str],
    stored: Mapping[str, Tensor],
    where: str,
    *,
    norm_offset: float = 0.0,
    ignored: Callable[[str], bool] = lambda name: False,
) -> dict[str, Tensor]:
    """The tensors of a spec by canonical name, each of exactly the right shape; 1-D ones as f32.

    Args:
        names: canonical name to the name in the file.
        stored: the file's tensors.
        norm_offset: added to norm weights, for families that store weight - offset.
        ignored: names in the file that may be there without being used. Any other unused tensor is an error: the
            model would compute something else than its author meant.
    """
    tensors: dict[str, Tensor] = {}
    for name, shape in spec.tensor_shapes().items():
        tensor = stored.get(names[name])
        if tensor is None:
            raise ModelError(f"{where}: tensor {names[name]} is missing")
        if tensor.shape != shape:
            raise ModelError(f"{where}: tensor {names[name]} must have the shape {shape}, got {tensor.shape}")
        if len(shape) == 1:
            tensor = _as_f32(tensor, names[name], where, norm_offset if name.endswith("norm") else 0.0)
        tensors[name] = tensor
    used = {names[name] for name in tensors}
    for name in stored:
        if name not in used and not ignored(name):
            raise ModelError(f"{where}: tensor {name!r:.100} has no place in a {spec.family} model of these settings")
    return tensors


def float_values(tensor: Tensor) -> np.ndarray | None:
    """An f32, f16 or bf16 tensor's values as float32; None for a quantised one."""
    if tensor.type == "f32":
        return tensor.data.view("<f4")
    if tensor.type == "f16":
        return tensor.data.view("<f2").astype(np.float32)
    if tensor.type == "bf16":
        return (tensor.data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return None


def _as_f32(tensor: Tensor, name: str, where: str, offset: float) -> Tensor:
    values = float_values(tensor)
    if values is None:
        raise ModelError(f"{where}: tensor {name} must be f32, f16 or bf16, got {tensor.type}")
    if not np.isfinite(values).all():
        raise ModelError(f"{where}: tensor {name} holds values that are not finite")
    values = values + np.float32(offset)  # a copy: aligned, and no longer tied to the file
    return Tensor("f32", tensor.shape, values.view(np.uint8))
