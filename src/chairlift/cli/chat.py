"""``chairlift chat``: talk to a model in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.cli.options import ModelArgument, config_options
from chairlift.cli.sampling import SamplingOptions
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.core.request import SamplingParams
    from chairlift.llm import LLM

Messages = list[dict[str, str]]


@config_options
def chat(
    *,
    model: ModelArgument = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="An instruction that precedes the conversation.")] = None,
    engine_config: EngineConfig,
    sampling: SamplingOptions,
) -> None:
    """Talk to a model. Ctrl-C cuts an answer short; at the prompt it ends, as Ctrl-D and an empty line do.

    When the conversation outgrows the context, its oldest turns are forgotten.
    """
    from chairlift.cli.session import fetch, load
    from chairlift.models import load_tokenizer

    params = sampling.params()
    fetch(model)
    tokenizer = load_tokenizer(model)
    if not tokenizer.has_chat_template:  # known before the weights are read
        raise ConfigError(
            f"{model} has no chat template, so it is not made to chat; continue a text with chairlift generate"
        )
    instruction = [{"role": "system", "content": system}] if system else []
    turns: Messages = []
    with load(engine_config, tokenizer) as llm:
        while question := _ask():
            turns.append({"role": "user", "content": question})
            prompt = _fit(llm, instruction, turns)
            turns.append({"role": "assistant", "content": _answer(llm, prompt, params)})


def _ask() -> str:
    """The next question; empty at the end."""
    terminal = sys.stdin.isatty()
    try:
        return input("> " if terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        if terminal:
            print()
        return ""


def _fit(llm: LLM, instruction: Messages, turns: Messages) -> list[int]:
    """The prompt's tokens, with a quarter of the context left to answer; drops the oldest turns until that is so."""
    room = llm.engine.scheduler.capacity.max_model_len * 3 // 4
    while True:
        prompt = llm.get_tokenizer().encode_chat(instruction + turns)
        if len(prompt) <= room or len(turns) == 1:  # one question that is too long is refused, with the limit
            return prompt
        del turns[:2]


def _answer(llm: LLM, prompt: list[int], params: SamplingParams) -> str:
    """Prints the answer as it comes; returns what there is of it when it ended or was cut short."""
    answer = ""
    try:
        for piece in llm.stream(prompt, params):
            print(piece, end="", flush=True)
            answer += piece
    except KeyboardInterrupt:
        pass
    print()
    return answer
