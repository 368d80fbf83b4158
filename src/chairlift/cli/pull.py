"""``chairlift pull``: fetch a model."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(name: Annotated[str, typer.Argument(help="A known model (smollm2-135m, gemma3-270m) or a hub name.")]) -> None:
    """Fetch a model into the cache; goes on where it was interrupted, and checks the SHA-256."""
    from chairlift import models
    from chairlift.cli.progress import download_progress

    with download_progress() as progress:
        path = models.pull(name, progress=progress)
    print(path)
