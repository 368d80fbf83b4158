"""The quantised kernels keep the model: perplexity of an English text, against the same weights dequantised to F32."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.config import EngineConfig
from chairlift.core.plan import StepItem, StepPlan
from chairlift.core.request import SamplingParams, SequenceInfo
from chairlift.models import load_checkpoint, load_tokenizer
from chairlift.models.spec import Checkpoint
from chairlift.runners.native import NativeRunner

TEXT = Path(__file__).parents[1] / "data" / "english.txt"
WINDOW = 512  # tokens that share a context; each window begins anew
MIN_TOKENS = 5000
LIMIT = 0.005
INT8_LIMIT = 0.01  # of an int8 cache against one of f16
BLOCK = 16


def windows_of(model: str) -> list[list[int]]:
    """The text's tokens in windows, each with what the model wants in front of a text."""
    tokenizer = load_tokenizer(model)
    tokens = tokenizer.encode(TEXT.read_text("utf-8"), add_special_tokens=False)
    assert len(tokens) >= MIN_TOKENS
    first = tokenizer.encode("")
    size = WINDOW - len(first)
    return [first + tokens[i : i + size] for i in range(0, len(tokens), size)]


def logprobs(checkpoint: Checkpoint, windows: list[list[int]], config: EngineConfig) -> list[float]:
    """The log-probability of every token of the windows but the first of each."""
    runner = NativeRunner(checkpoint, config)
    groups = len(runner.start().windows)
    found: list[float] = []
    for step, tokens in enumerate(windows):
        item = StepItem(
            SequenceInfo(str(step), 0, SamplingParams(prompt_logprobs=0), seed=0, num_prompt=len(tokens)),
            start=0,
            token_ids=tuple(tokens),
            block_table=tuple(range(-(-len(tokens) // BLOCK) * groups)),
            num_samples=0,
            prompt_targets=tuple(tokens[1:]),
        )
        scores = runner.submit(StepPlan(step_id=step, items=(item,))).prompt_logprobs[0]
        assert [score.token_id for score in scores] == tokens[1:]
        found.extend(score.logprob for score in scores)
    runner.close()
    return found


def perplexity(values: list[float]) -> float:
    return math.exp(-sum(values) / len(values))


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_quantised_perplexity(model: str, request: pytest.FixtureRequest) -> None:
    path = str(request.getfixturevalue(f"{model}_path"))
    checkpoint, windows = load_checkpoint(path), windows_of(path)
    config = EngineConfig(
        model=path, max_model_len=WINDOW, max_num_seqs=1, max_num_batched_tokens=WINDOW, block_size=BLOCK
    )
    quantised = logprobs(checkpoint, windows, config)
    exact = logprobs(checkpoint, windows, replace(config, weights="f32", kv_cache_dtype="f32"))
    assert len(exact) == len(quantised) == sum(len(window) - 1 for window in windows)
    assert 5 < perplexity(exact) < 60, "a model that knows English finds this text neither trivial nor strange"
    assert abs(perplexity(quantised) / perplexity(exact) - 1) < LIMIT
    assert quantised != exact, "both runs used the same arithmetic"


def test_perplexity_with_an_int8_cache(smollm2_path: Path) -> None:
    """What half the memory for the KV cache costs, on the first windows of the text."""
    path = str(smollm2_path)
    checkpoint, windows = load_checkpoint(path), windows_of(path)[:2]
    config = EngineConfig(
        model=path, max_model_len=WINDOW, max_num_seqs=1, max_num_batched_tokens=WINDOW, block_size=BLOCK
    )
    half, int8 = (logprobs(checkpoint, windows, replace(config, kv_cache_dtype=kv)) for kv in ("f16", "int8"))
    change = perplexity(int8) / perplexity(half) - 1
    print(f"perplexity {perplexity(half):.3f} with f16, {perplexity(int8):.3f} with int8: {change:+.2%}")
    assert abs(change) < INT8_LIMIT
    assert int8 != half
