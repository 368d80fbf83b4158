"""How well a model predicts a text, as the engine runs it: what quantisation costs, in one number."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.resources import files

from chairlift.config import EngineConfig
from chairlift.core.request import SamplingParams
from chairlift.llm import LLM
from chairlift.models import load_checkpoint
from chairlift.models.tokenizer import Tokenizer

WINDOW = 512  # tokens that share a context

Progress = Callable[[int, int], None]
"""Called with the tokens done and those in all."""


@dataclass(frozen=True, slots=True)
class Quality:
    """The perplexity of a text: e to the mean of -logprob over ``tokens``; ``seconds`` without loading the model."""

    perplexity: float
    tokens: int
    seconds: float


def bundled_text() -> str:
    """English prose of some five thousand tokens, written for Chairlift."""
    return files("chairlift").joinpath("english.txt").read_text(encoding="utf-8")


def unquantized(config: EngineConfig) -> EngineConfig:
    """The same model with the numbers that its file stands for, and no other rounding than that of f32."""
    return replace(config, quantization=None, weights="f32", kv_cache_dtype="f32")


def measure(config: EngineConfig, text: str, progress: Progress = lambda done, total: None) -> Quality:
    """The perplexity of ``text``, in windows of 512 tokens (or the model's context), each of which begins anew.

    Raises as `LLM` does.
    """
    context = min(WINDOW, load_checkpoint(config.model).spec.max_positions)
    logprobs: list[float] = []
    used_once = replace(config, max_model_len=context, max_num_seqs=1, weight_cache=0.0)
    with LLM(**asdict(used_once)) as llm:
        windows = _windows(llm.get_tokenizer(), text, context - 1)  # the engine adds one token
        total = sum(len(window) - 1 for window in windows)
        begin = time.perf_counter()
        for window in windows:
            logprobs += _logprobs(llm, window)
            progress(len(logprobs), total)
    return Quality(math.exp(-sum(logprobs) / total), total, time.perf_counter() - begin)


def _windows(tokenizer: Tokenizer, text: str, size: int) -> list[list[int]]:
    """The text's tokens, in windows with what the model wants in front of a text."""
    tokens, first = tokenizer.encode(text, add_special_tokens=False), tokenizer.encode("")
    step = size - len(first)
    return [first + tokens[i : i + step] for i in range(0, len(tokens), step)]


def _logprobs(llm: LLM, tokens: list[int]) -> list[float]:
    """Of every token but the first."""
    (result,) = llm.generate([tokens], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    assert result.prompt_logprobs is not None
    return [entry[token].logprob for token, entry in zip(tokens, result.prompt_logprobs, strict=True) if entry]
