"""Equal quality comes before speed: the same greedy text as transformers with the dequantised weights.

Engines round differently, so where the two likeliest tokens are nearly equal, each may take another one, and the texts
part there. Where they part, how much likelier the reference's token was tells whether that is rounding or an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.figures import Answer
from peers.processes import Running
from peers.workloads import Request


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far an engine's texts go with the reference's.

    Fields:
        tokens: of each text.
        same: per prompt, how many of the reference's tokens come first.
        margins: for each prompt on which the texts part, the reference's margin there, in natural logarithms.
    """

    tokens: int
    same: tuple[int, ...]
    margins: tuple[float, ...]

    def __str__(self) -> str:
        whole = sum(count == self.tokens for count in self.same)
        parting = f"; parts at margins up to {max(self.margins):.2f}" if self.margins else ""
        mean = sum(self.same) / len(self.same)
        return f"{whole} of {len(self.same)} texts whole, {mean:.1f} of {self.tokens} tokens{parting}"


def check(engine: Running, reference: Path) -> Agreement:
    """Lets the engine answer the reference's prompts, all at once."""
    expected = json.loads(reference.read_text())
    requests = [Request(tuple(one["prompt"]), len(one["ids"])) for one in expected]
    return compare(engine.answer(requests), expected)


def compare(answers: Sequence[Answer], expected: Sequence[dict[str, Any]]) -> Agreement:
    same = tuple(leading(answer, one) for answer, one in zip(answers, expected, strict=True))
    margins = tuple(one["margins"][n] for n, one in zip(same, expected, strict=True) if n < len(one["ids"]))
    return Agreement(len(expected[0]["ids"]), same, margins)


def leading(answer: Answer, expected: dict[str, Any]) -> int:
    """How many of the expected tokens an answer begins with. Of a server only the text is known."""
    ids, texts = expected["ids"], expected["texts"]
    if answer.ids:
        agree = [answer.ids[:n] == tuple(ids[:n]) for n in range(1, len(ids) + 1)]
    else:
        agree = [answer.text.startswith(text) for text in texts]
    return max((n for n, agrees in enumerate(agree, 1) if agrees), default=0)
