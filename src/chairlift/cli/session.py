"""What the commands share before they compute: the model, fetched with a progress bar, and the in-process engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chairlift.config import EngineConfig

if TYPE_CHECKING:
    from chairlift.llm import LLM
    from chairlift.models.tokenizer import Tokenizer


def fetch(model: str) -> None:
    """Makes sure that the model is on disk, so that a long download shows and a wrong name fails at once."""
    from chairlift import models
    from chairlift.cli.progress import download_progress

    with download_progress() as progress:
        models.resolve(model, progress=progress)


def load(config: EngineConfig, tokenizer: Tokenizer | None = None) -> LLM:
    """The model in this process; with its tokenizer, if the command has that already."""
    import dataclasses

    from chairlift.llm import LLM

    fetch(config.model)
    return LLM(tokenizer=tokenizer, **dataclasses.asdict(config))
