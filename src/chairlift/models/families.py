"""The model families, and how to find one. A family is a module with what `Family` lists."""

from __future__ import annotations

from typing import Protocol, cast

from chairlift.models import gemma3, llama
from chairlift.models.fields import Fields
from chairlift.models.gguf import GGUFFile
from chairlift.models.spec import DecoderSpec


class Family(Protocol):
    """What a family's module offers.

    HF_NORM_OFFSET: what its Hugging Face checkpoints leave out of the norm weights (1 if they store weight - 1).
    gguf_names, hf_names: canonical tensor name to the file's. gguf_ignored, hf_ignored: which tensors may go unused.
    """

    NAME: str
    GGUF_ARCHITECTURES: tuple[str, ...]
    HF_ARCHITECTURES: tuple[str, ...]
    HF_MODEL_TYPES: tuple[str, ...]
    HF_NORM_OFFSET: float

    def spec_from_gguf(self, file: GGUFFile) -> DecoderSpec: ...
    def spec_from_config(self, config: Fields) -> DecoderSpec: ...
    def gguf_names(self, spec: DecoderSpec) -> dict[str, str]: ...
    def hf_names(self, spec: DecoderSpec) -> dict[str, str]: ...
    def gguf_ignored(self, name: str) -> bool: ...
    def hf_ignored(self, name: str) -> bool: ...


FAMILIES = cast(tuple[Family, ...], (llama, gemma3))


def gguf_family(file: GGUFFile) -> Family:
    """The family of a GGUF file, by its ``general.architecture``."""
    architecture = file.fields.text("general.architecture")
    for family in FAMILIES:
        if architecture in family.GGUF_ARCHITECTURES:
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.GGUF_ARCHITECTURES)
    raise file.fields.fail(f"architecture {architecture!r:.60} is not supported (supported: {supported})")


def config_family(config: Fields) -> Family:
    """The family of a Hugging Face config, by ``architectures`` or, without those, by ``model_type``."""
    names = config.raw("architectures", None)
    if names is None:
        names, kind = [config.text("model_type", "unknown")], "HF_MODEL_TYPES"
    else:
        kind = "HF_ARCHITECTURES"
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.wrong("architectures", names, "a list of names")
    for family in FAMILIES:
        if any(name in getattr(family, kind) for name in names):
            return family
    supported = ", ".join(name for family in FAMILIES for name in family.HF_ARCHITECTURES)
    raise config.fail(f"architecture {', '.join(names)!r:.80} is not supported (supported: {supported})")
