"""SamplingParams: every value out of range raises `ParameterError`, which names the parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest

from chairlift.core.request import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from chairlift.errors import ParameterError

NAN, INF = math.nan, math.inf
REAL = ("1", None, True, [1.0], 10**400)  # nothing of this is a number in any of the ranges
WHOLE = (*REAL, 1.0, NAN)

BAD: dict[str, tuple[Any, ...]] = {
    "n": (0, -1, 129, *WHOLE),
    "max_tokens": (0, -1, 2**31, "1", True, 1.0),
    "min_tokens": (-1, 17, *WHOLE),
    "temperature": (-0.1, 2.1, NAN, INF, *REAL),
    "top_p": (0.0, -0.1, 1.1, NAN, INF, "1", None, True),
    "top_k": (-2, 2**31, *WHOLE),
    "min_p": (-0.1, 1.1, NAN, *REAL),
    "seed": (-1, 2**64, "1", True, 1.0),
    "stop": (5, ("",), "", (1,), (None,), [["a"]], tuple("abcdefghijklmnopq")),
    "stop_token_ids": (5, tuple(range(MAX_STOP_TOKEN_IDS + 1)), (-1,), (2**31,), ("1",), (1.5,), (True,), "12"),
    "logprobs": (-1, 21, "1", True, 1.0),
    "prompt_logprobs": (-1, 21, "1", True, 1.0),
    "repetition_penalty": (0.0, -1.0, 101.0, NAN, *REAL),
    "presence_penalty": (-2.1, 2.1, NAN, *REAL),
    "frequency_penalty": (-2.1, 2.1, INF, *REAL),
    "logit_bias": (
        5,
        "a",
        [1],
        {-1: 1.0},
        {"1": 1.0},
        {1: 101.0},
        {1: -101.0},
        {1: NAN},
        {1: "1"},
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0),
    ),
    "ignore_eos": (1, "false", None),
    "skip_special_tokens": (0, "no", None),
    "include_stop_str_in_output": (1, "", None),
}

GOOD: dict[str, tuple[Any, ...]] = {
    "n": (1, 128),
    "max_tokens": (1, None, 2**31 - 1),
    "min_tokens": (0, 16),
    "temperature": (0, 0.0, 1, 2.0),
    "top_p": (0.001, 1, 1.0),
    "top_k": (-1, 0, 1),
    "min_p": (0, 0.5, 1.0),
    "seed": (None, 0, 2**64 - 1),
    "stop": ((), None, "a", ["a", "b"], tuple("abcdefghijklmnop")),
    "stop_token_ids": ((), None, [0, 5], list(range(MAX_STOP_TOKEN_IDS))),
    "logprobs": (None, 0, 20),
    "prompt_logprobs": (None, 0, 20),
    "repetition_penalty": (0.01, 1, 100.0),
    "presence_penalty": (-2, 2.0),
    "frequency_penalty": (-2, 2.0),
    "logit_bias": (None, {}, {0: -100, 7: 100.0}),
    "ignore_eos": (True, False),
    "skip_special_tokens": (True, False),
    "include_stop_str_in_output": (True, False),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_out_of_range_is_named(name: str, value: Any) -> None:
    """A7, F1: one line that says which parameter, and that can be shown to a client."""
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(name) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_the_ends_of_each_range_are_in_it(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


def test_every_parameter_is_tested() -> None:
    assert set(BAD) == set(GOOD) == set(SamplingParams.__dataclass_fields__)


def test_a_huge_value_gives_a_short_message() -> None:
    huge = ({"n": 10**5000}, {"n": [10**5000]}, {"seed": "x" * 10**6}, {"top_p": {"a": [[[0] * 10**6] * 9]}})
    for params in (*huge, {"logit_bias": {10**4000: 1}}, {"stop_token_ids": [10**4000]}):
        with pytest.raises(ParameterError) as caught:
            SamplingParams(**params)
        assert len(str(caught.value)) < 200


def test_too_many_are_counted_not_looked_at() -> None:
    """The number is wrong before any of the elements is."""
    for name, value in (("stop_token_ids", [-1] * 10**6), ("stop", [""] * 10**6)):
        with pytest.raises(ParameterError, match=f"{name} holds 1000000 .* at most"):
            SamplingParams(**{name: value})


def test_containers_are_copied() -> None:
    """Parameters are shared by all steps of a request, so a caller's later changes must not reach them."""
    bias, ids = {1: 2.0}, [3]
    params = SamplingParams(logit_bias=bias, stop_token_ids=ids, stop="end")
    bias[1], ids[0] = 5.0, 6
    assert (params.logit_bias, params.stop_token_ids, params.stop) == ({1: 2.0}, (3,), ("end",))


@pytest.mark.parametrize(
    ("params", "uses"),
    [
        ({}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
    ],
)
def test_only_penalties_need_the_history(params: dict[str, Any], uses: bool) -> None:
    assert SamplingParams(**params).uses_history is uses
