"""Models: specs, checkpoints, tokenizers, and where they come from.

| module         | what it does                                                             |
|----------------|--------------------------------------------------------------------------|
| spec           | `DecoderSpec` and `Checkpoint`: a model as data                          |
| checkpoint     | `load_checkpoint`: files to a `Checkpoint`                               |
| gguf           | reads GGUF files                                                         |
| safetensors    | reads safetensors files and their index                                  |
| fields         | typed, checked reading of settings                                       |
| checks         | sizes in range, tensors of the right shapes                              |
| families       | the list of families; llama and gemma3 are one file each                 |
| rope           | rope scaling                                                             |
| tokenizer      | `Tokenizer`, and `load_tokenizer`                                        |
| gguf_tokenizer | builds a tokenizer from GGUF metadata                                    |
| hf_tokenizer   | reads a Hugging Face folder's tokenizer                                  |
| detokenize     | tokens to text, incrementally                                            |
| chat           | chat templates                                                           |
| hub            | the known models; from what the user typed to a path                     |
| fetch          | fetches a known model into the cache                                     |

This file imports nothing heavy: what a function needs is imported when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.models.hub import KNOWN, KnownModel, Progress, pull, resolve

if TYPE_CHECKING:
    from chairlift.models.spec import Checkpoint
    from chairlift.models.tokenizer import Tokenizer

__all__ = ["KNOWN", "KnownModel", "Progress", "load_checkpoint", "load_tokenizer", "pull", "resolve"]


def load_checkpoint(model: str, *, progress: Progress | None = None) -> Checkpoint:
    """A model ready for a runner. See `chairlift.models.checkpoint.load_checkpoint`."""
    from chairlift.models.checkpoint import load_checkpoint as load

    return load(model, progress=progress)


def load_tokenizer(model: str, *, progress: Progress | None = None) -> Tokenizer:
    """A model's tokenizer, without its weights. See `chairlift.models.tokenizer.load_tokenizer`."""
    from chairlift.models.tokenizer import load_tokenizer as load

    return load(model, progress=progress)
