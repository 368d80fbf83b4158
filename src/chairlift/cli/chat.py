"""``chairlift chat``: talk to a model in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.cli.options import ModelArgument, config_options
from chairlift.cli.sampling import SamplingOptions
from chairlift.config import DEFAULT_MODEL, EngineConfig

if TYPE_CHECKING:
    from chairlift.core.request import SamplingParams
    from chairlift.llm import LLM


@config_options
def chat(
    *,
    model: ModelArgument = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="An instruction that precedes the conversation.")] = None,
    engine_config: EngineConfig,
    sampling: SamplingOptions,
) -> None:
    """Talk to a model. Ctrl-C cuts an answer short; an empty line or Ctrl-D ends the conversation."""
    from chairlift.cli.session import load

    params = sampling.params()
    llm = load(engine_config)
    messages = [{"role": "system", "content": system}] if system else []
    while question := _ask():
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": _answer(llm, messages, params)})


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints the answer as it comes; returns what there is of it when it ended or was cut short."""
    answer = ""
    try:
        for piece in llm.stream(llm.get_tokenizer().encode_chat(messages), params):
            print(piece, end="", flush=True)
            answer += piece
    except KeyboardInterrupt:
        pass
    print()
    return answer
