"""Runs in the environment `export`: what transformers answers, greedily, with the dequantised weights.

    reference.py CHECKPOINT FILE

Writes a list of {"prompt": ids, "ids": the answer's, "texts": of its first one, two, three ... tokens, "margins": per
token, how much likelier it was than the next best, in natural logarithms}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 16
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The three primary colours are",
    "A healthy breakfast could be",
    "In 1969, the first people landed on",
    "The difference between a virus and a bacterium is that",
)


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    ids: list[int] = []
    margins: list[float] = []
    for _ in range(TOKENS):
        logits = model(torch.tensor([prompt + ids])).logits[0, -1]
        best = logits.topk(2)
        ids.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    texts = [tokenizer.decode(ids[: n + 1]) for n in range(TOKENS)]
    return {"prompt": prompt, "ids": ids, "texts": texts, "margins": margins}


def main(checkpoint: str, file: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    Path(file).write_text(json.dumps([answer(model, tokenizer, text) for text in PROMPTS]))


if __name__ == "__main__":
    main(*sys.argv[1:])
