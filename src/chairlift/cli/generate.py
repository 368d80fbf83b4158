"""``chairlift generate``: continue one prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from chairlift.cli.options import config_options
from chairlift.cli.sampling import SamplingOptions
from chairlift.config import EngineConfig


@config_options
def generate(
    *,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    engine_config: EngineConfig,
    sampling: SamplingOptions,
) -> None:
    """Continue a prompt, and print the text as it comes."""
    from chairlift.cli.session import load

    params = sampling.params()
    text = sys.stdin.read() if prompt == "-" else prompt
    with load(engine_config) as llm:
        for piece in llm.stream(llm.get_tokenizer().encode(text), params):
            print(piece, end="", flush=True)
        print()
