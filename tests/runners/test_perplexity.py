"""The quantised kernels keep the model: perplexity of an English text, against the same weights in F32.

The model runs in the engine, which is asked for prompt_logprobs; `quality` does the same for `chairlift doctor`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chairlift.config import EngineConfig
from chairlift.quality import Quality, bundled_text, measure, unquantized

MIN_TOKENS = 5000
LIMIT = 0.005
INT8_CACHE_LIMIT = 0.01  # of an int8 cache against one of f16
PART = 8000  # characters, where some four windows are enough


def change(of: Quality, against: Quality) -> float:
    assert of.tokens == against.tokens
    print(f"perplexity {of.perplexity:.3f}, {of.perplexity / against.perplexity - 1:+.2%}, {of.tokens} tokens")
    return of.perplexity / against.perplexity - 1


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_quantised_perplexity(model: str, request: pytest.FixtureRequest) -> None:
    config = EngineConfig(model=str(request.getfixturevalue(f"{model}_path")))
    quantised, exact = (measure(one, bundled_text()) for one in (config, unquantized(config)))
    assert quantised.tokens > MIN_TOKENS
    assert 5 < exact.perplexity < 60, "a model that knows English finds this text neither trivial nor strange"
    assert abs(change(quantised, exact)) < LIMIT
    assert quantised.perplexity != exact.perplexity, "both runs used the same arithmetic"


@pytest.mark.parametrize(("kv", "limit"), [("int8", INT8_CACHE_LIMIT), ("bf16", LIMIT)])
def test_perplexity_with_fewer_bits_in_the_cache(smollm2_path: Path, kv: str, limit: float) -> None:
    """What fewer bits of keys and values cost, on the first windows of the text."""
    config = EngineConfig(model=str(smollm2_path))
    f16, small = (measure(replace(config, kv_cache_dtype=name), bundled_text()[:PART]) for name in ("f16", kv))
    assert abs(change(small, f16)) < limit
    assert small.perplexity != f16.perplexity


def test_what_quantisation_at_load_costs(smollm2_folder: Path) -> None:
    config = EngineConfig(model=str(smollm2_folder))
    runs = (unquantized(config), config, *(replace(config, quantization=name) for name in ("int8", "int4")))
    exact, plain, int8, int4 = (measure(one, bundled_text()[:PART]) for one in runs)
    assert 5 < exact.perplexity < 60
    assert abs(change(plain, exact)) < 0.001
    assert abs(change(int8, exact)) < 0.008
    assert 0.01 < change(int4, exact) < 0.04
