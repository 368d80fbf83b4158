"""Writes workload.json again: the fixed requests that every engine is measured on.

    python benchmarks/peers/make_workload.py FILE [MODEL]

Prompts are random sequences of whole lower-case words that are single tokens of the model's tokenizer, so the text and
the token ids are two exact spellings of the same prompt. For the same model the file is the same, byte by byte.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

from chairlift.models import load_tokenizer

SEED = 20260801
OUTPUTS = (10, 30, 50, 200)


def make(words: list[int]) -> dict[str, Any]:
    rng = random.Random(SEED)

    def request(prompt: int, output: int) -> dict[str, Any]:
        return {"prompt_len": prompt, "output_len": output, "ids": [rng.choice(words) for _ in range(prompt)]}

    def mixed(count: int) -> list[dict[str, Any]]:
        lengths = []
        for i in range(count):
            prompt = _lognormal(rng)
            lengths.append((prompt, rng.choice(OUTPUTS) if i % 2 == 0 else rng.randint(16, 256)))
        return [request(*length) for length in lengths]

    made: dict[str, Any] = {"model": "SmolLM2-135M-Instruct Q4_1", "pool": words}
    made["W-single"] = [request(128, 256)]
    made["W-prefill"] = [request(2048, 1)]
    made["W-batch"] = mixed(64)
    made["W-long"] = [request(1024, 128) for _ in range(16)]
    made["W-seed"] = [request(32, output) for output in (200, 50, 30, 10, 40, 40)]
    made["W-rate"] = mixed(60)
    arrival = 0.0  # at 1 request/s; to be divided by the rate
    for one in made["W-rate"]:
        one["arrival"] = round(arrival, 6)
        arrival += rng.expovariate(1.0)
    return made


def words_of(model: str) -> list[int]:
    tokenizer = load_tokenizer(model)
    texts = ((token, tokenizer.decode([token])) for token in range(tokenizer.vocab_size))
    return [token for token, text in texts if re.fullmatch(" [a-z]{3,8}", text)]


def _lognormal(rng: random.Random) -> int:
    """Prompt tokens: 120 on average but for the bounds."""
    sigma = 0.8
    return max(16, min(512, round(math.exp(rng.gauss(math.log(120) - sigma * sigma / 2, sigma)))))


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(make(words_of(sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m"))))
