"""In which format each weight is kept in memory, by --weights and --quantization, and what that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from chairlift import _native, log
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.models.spec import Checkpoint, Tensor, TensorType

GROUP = 32  # weights that share a scale
_FORMATS: dict[str, TensorType] = {"int8": "q8_0", "int4": "q4_1"}
_FLOATS = ("f32", "f16", "bf16")
# At 8 bits with int4 too. With 4 bits for the embeddings SmolLM2's perplexity rises by 8 %, with 4 bits for v, the
# smallest matrix of a layer, Gemma 3's by 4 %: each more than by any other kind of matrix.
_SENSITIVE = ("embed", "lm_head", "v")
_log = log.get("weights")


def packed_types(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, TensorType]:
    """The format of each tensor in memory, by name: the file's own, f32 with ``weights="f32"``, or what
    ``quantization`` makes of a matrix of floats.

    Raises ConfigError if ``quantization`` has nothing to do.
    """
    types = {name: _packed_type(name, tensor, config) for name, tensor in checkpoint.tensors.items()}
    if config.quantization is not None:
        _tell(checkpoint, types, config.quantization)
    return types


def packed_bytes(checkpoint: Checkpoint, types: Mapping[str, TensorType]) -> int:
    """What the weights take in memory, known before they are read."""
    return sum(
        _native.packed_bytes(types[name], *tensor.shape) if len(tensor.shape) == 2 else tensor.data.nbytes
        for name, tensor in checkpoint.tensors.items()
    )


def _packed_type(name: str, tensor: Tensor, config: EngineConfig) -> TensorType:
    if config.weights == "f32" or len(tensor.shape) == 1:
        return "f32"
    if config.quantization is None or tensor.type not in _FLOATS or tensor.shape[1] % GROUP:
        return tensor.type
    return _FORMATS["int8" if name.rpartition(".")[2] in _SENSITIVE else config.quantization]


def _tell(checkpoint: Checkpoint, types: Mapping[str, TensorType], quantization: str) -> None:
    """Logs how many matrices are quantised and why others are not; nothing to quantise is an error."""
    matrices = {name: tensor for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}
    done = sum(types[name] != tensor.type for name, tensor in matrices.items())
    kept = Counter(
        f"have rows that are no multiple of {GROUP} values" if tensor.type in _FLOATS else "are quantised in the file"
        for name, tensor in matrices.items()
        if types[name] == tensor.type
    )
    reasons = " and ".join(f"{count} {reason}" for reason, count in kept.items())
    if not done:
        raise ConfigError(
            f"--quantization {quantization} has no effect: of the {len(matrices)} matrices of {checkpoint.name}, "
            f"{reasons}; leave it out, or give a model of f32, f16 or bf16 weights"
        )
    rest = f"; {reasons}, and stay as they are" if kept else ""
    _log.info("--quantization %s: %d of %d matrices are quantised%s", quantization, done, len(matrices), rest)
