"""Goodput: which samples were in time, and how they are counted."""

from __future__ import annotations

import pytest

from chairlift.config import EngineConfig
from chairlift.core.request import FinishReason, SamplingParams
from chairlift.server.goodput import OUTCOMES, Timing, outcome

LENGTH, DEADLINE = FinishReason.LENGTH, FinishReason.DEADLINE


def timing(*seconds: float) -> Timing:
    """Of a request that arrived at 10, and got a token so many seconds later each."""
    made = Timing(10.0)
    for second in seconds:
        made.add(1, 10.0 + second)
    return made


@pytest.mark.parametrize(
    ("settings", "params", "tokens", "reason", "expected"),
    [
        ({}, {}, (5.0, 900.0), LENGTH, "good"),
        ({}, {}, (), LENGTH, "good"),
        ({"slo_ttft": 1000.0}, {}, (1.0, 9.0), LENGTH, "good"),
        ({"slo_ttft": 1000.0}, {}, (1.1,), LENGTH, "late_ttft"),
        ({}, {"ttft_ms": 1000.0}, (1.1,), LENGTH, "late_ttft"),
        ({"slo_ttft": 5000.0}, {"ttft_ms": 1000.0}, (1.1,), LENGTH, "late_ttft"),
        ({"slo_itl": 100.0}, {}, (1.0, 1.3, 1.35, 1.375), LENGTH, "late_itl"),
        ({"slo_itl": 130.0}, {}, (1.0, 1.3, 1.35, 1.375), LENGTH, "good"),
        ({"slo_itl": 0.1}, {}, (1.0,), LENGTH, "good"),
        ({"slo_ttft": 500.0, "slo_itl": 100.0}, {}, (1.0, 3.0), LENGTH, "late_ttft"),
        ({}, {"deadline_ms": 1000.0}, (0.5, 1.1), LENGTH, "late_deadline"),
        ({}, {"deadline_ms": 1000.0}, (0.5, 0.9), LENGTH, "good"),
        ({}, {"deadline_ms": 1000.0}, (0.5, 0.9), DEADLINE, "late_deadline"),
        ({}, {"deadline_ms": 1000.0}, (), DEADLINE, "late_deadline"),
        ({"slo_ttft": 500.0}, {"deadline_ms": 1000.0}, (), DEADLINE, "late_deadline"),
        ({}, {"ttft_ms": 100.0}, (), DEADLINE, "late_ttft"),
        ({}, {"ttft_ms": 100.0, "deadline_ms": 1000.0}, (0.05, 0.9), DEADLINE, "late_deadline"),
    ],
)
def test_the_first_target_that_was_missed(settings, params, tokens, reason, expected):
    assert expected in OUTCOMES
    made = timing(*tokens)
    ended = made.last if made.last is not None else 11.0
    assert outcome(EngineConfig(**settings), SamplingParams(**params), made, reason, ended) == expected


def test_several_tokens_at_once_are_several_tokens():
    made = Timing(0.0)
    made.add(1, 1.0)
    made.add(4, 2.0)
    assert (made.ttft, made.mean_itl) == (1.0, 0.25)
