"""SamplingParams: every value out of range raises `ParameterError`, which names the parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest

from chairlift.core.request import MAX_BEAMS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams, make_request
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
    "best_of": (0, -1, 129, "1", True, 1.0, NAN),
    "use_beam_search": (1, "true", None),
    "length_penalty": (10.1, -10.1, 0.5, NAN, *REAL),  # without beam search even 0.5 is an error
    "ttft_ms": (0, 0.0, -1.0, 1e10, NAN, INF, "1", True, [1.0], 10**400),
    "deadline_ms": (0, 0.0, -1.0, 1e10, NAN, INF, "1", True, [1.0], 10**400),
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
    "best_of": (None, 1, 128),
    "use_beam_search": (True, False),
    "length_penalty": (1, 1.0),
    "ttft_ms": (None, 0.001, 5, 1e9),
    "deadline_ms": (None, 0.001, 5, 1e9),
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


# -- several samples, and beams


def test_best_of_is_at_least_n() -> None:
    assert SamplingParams(n=3, best_of=3).width == 3
    assert (SamplingParams(n=2, best_of=5).width, SamplingParams(n=2).width) == (5, 2)
    with pytest.raises(ParameterError, match="best_of must be a whole number from 3 to 128, got 2"):
        SamplingParams(n=3, best_of=2)


NOT_FOR_BEAMS = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 0,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {1: 1.0},
    "min_tokens": 1,
    "stop": ("a",),
    "logprobs": 0,
    "prompt_logprobs": 0,
}


@pytest.mark.parametrize("name", NOT_FOR_BEAMS)
def test_what_has_no_effect_on_a_beam_search_is_an_error(name: str) -> None:
    """A6: it is not dropped in silence."""
    with pytest.raises(ParameterError, match=f"{name} has no effect with use_beam_search") as caught:
        SamplingParams(use_beam_search=True, **{name: NOT_FOR_BEAMS[name]})
    assert caught.value.param == name


def test_a_beam_search_may_be_told_to_be_greedy_and_has_a_width_of_its_own() -> None:
    SamplingParams(use_beam_search=True, temperature=0, n=2, best_of=MAX_BEAMS, length_penalty=-0.5)
    for params, name in (({"best_of": MAX_BEAMS + 1}, "best_of"), ({"n": MAX_BEAMS + 1}, "n")):
        with pytest.raises(ParameterError) as caught:
            SamplingParams(use_beam_search=True, **params)
        assert caught.value.param == name


def test_a_length_penalty_without_beams_is_an_error() -> None:
    """A6"""
    with pytest.raises(ParameterError, match="length_penalty has no effect without use_beam_search"):
        SamplingParams(length_penalty=2.0)


# -- requests


def request(**params: Any) -> Any:
    return make_request("a", [1, 2], SamplingParams(**params), vocab_size=9, eos_token_ids=frozenset({3}), arrival=10.0)


def test_a_request_runs_as_many_sequences_as_are_drawn() -> None:
    assert [request(n=2, best_of=k).num_samples for k in (None, 2, 4)] == [2, 2, 4]
    assert request(n=2, best_of=4).outputs == range(4), "the server picks the best of them"
    assert request(n=2, best_of=4, use_beam_search=True).outputs == range(2)


@pytest.mark.parametrize(
    ("limits", "first", "last"),
    [
        ({}, None, None),
        ({"ttft_ms": 500}, 10.5, None),
        ({"deadline_ms": 500}, 10.5, 10.5),
        ({"ttft_ms": 250, "deadline_ms": 2000}, 10.25, 12.0),
        ({"ttft_ms": 3000, "deadline_ms": 2000}, 12.0, 12.0),
    ],
)
def test_deadlines_count_from_the_arrival(limits: dict[str, float], first: float | None, last: float | None) -> None:
    """S9: the first token is due when the last is, if not before."""
    assert (request(**limits).ttft_deadline, request(**limits).deadline) == (first, last)
