"""From tokens to text: whatever the steps, the text is the same, and no part of a stop string is given out."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.plan import Output, TokenLogprob
from chairlift.core.request import FinishReason, SamplingParams
from chairlift.server.text import Delta, Transcript

TEXTS = st.text(st.sampled_from("ab é🚠山"), max_size=24)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, a character at a time: the first stop string to be complete ends the text; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def outputs(tokens: list[int], cuts: list[int], finish: FinishReason, logprobs: bool) -> list[Output]:
    """The tokens in steps that end at ``cuts``."""
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    return [
        Output(
            "r",
            new_token_ids=tuple(tokens[begin:end]),
            finish_reason=finish if end == len(tokens) else None,
            logprobs=tuple(TokenLogprob(token, -1.0, 1) for token in tokens[begin:end]) if logprobs else (),
        )
        for begin, end in pairwise(edges)
    ]


def feed(transcript: Transcript, news: list[Output]) -> tuple[Delta, list[str]]:
    """All deltas joined, and the text after each."""
    whole, texts = Delta(), []
    for output in news:
        whole.extend(transcript.feed(output))
        texts.append(whole.text)
        if whole.finish_reason is not None:
            break
    return whole, texts


@given(
    TEXTS,
    st.lists(st.text(st.sampled_from("ab é🚠山"), min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 60), max_size=12),
)
def test_stop_strings(toy, text, stops, include, cuts):
    """C7, C8: tokens are single bytes here, so characters and stop strings span tokens and steps in every way."""
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, logprobs=0)
    tokens = list(text.encode())
    if not tokens:
        return
    wanted, stop = expected(text, stops, include)
    whole, texts = feed(
        Transcript(toy.ToyStream(True), params, frozenset()), outputs(tokens, cuts, FinishReason.LENGTH, True)
    )
    assert whole.text == wanted
    assert (whole.finish_reason, whole.stop_reason) == (
        (FinishReason.STOP, stop) if stop else (FinishReason.LENGTH, None)
    )
    assert all(wanted.startswith(part) for part in texts), "text was given out that is not part of the result"
    assert b"".join(bytes([entry.token_id]) for entry in whole.logprobs) == wanted.encode()
    for entry, offset in zip(whole.logprobs, whole.offsets, strict=True):
        assert entry.token_id in wanted[offset].encode()
    if stop:
        assert bytes(whole.token_ids) == text.encode()[: len(expected(text, stops, True)[0].encode())]


def test_text_is_not_held_back_without_need(toy):
    transcript = Transcript(toy.ToyStream(True), SamplingParams(stop=("abc",)), frozenset())
    given_out = [transcript.feed(Output("r", new_token_ids=(byte,))).text for byte in b"xababx"]
    assert given_out == ["x", "", "", "ab", "", "abx"]


def test_tokens_are_told_when_they_come_though_their_text_waits(toy):
    """Q1"""
    transcript = Transcript(toy.ToyStream(True), SamplingParams(stop=("abc",)), frozenset())
    assert transcript.feed(Output("r", new_token_ids=tuple(b"ab"))).token_ids == list(b"ab")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_has_no_text_unless_asked_for(toy, include):
    params = SamplingParams(stop_token_ids=(ord("!"),), include_stop_str_in_output=include)
    transcript = Transcript(toy.ToyStream(True), params, frozenset(b"!"))
    delta = transcript.feed(
        Output("r", new_token_ids=tuple(b"ab!"), finish_reason=FinishReason.STOP, stop_token_id=ord("!"))
    )
    assert delta.text == ("ab!" if include else "ab")
    assert delta.token_ids == list(b"ab!")
    assert delta.stop_reason == ord("!")


def test_an_end_that_comes_later_than_its_token(toy):
    """Under static batching a row is held after its stop token, and its end is told without a token."""
    transcript = Transcript(toy.ToyStream(False), SamplingParams(), frozenset({toy.EOS}))
    assert transcript.feed(Output("r", new_token_ids=(ord("a"), toy.EOS))).text == "a"
    delta = transcript.feed(Output("r", finish_reason=FinishReason.STOP, stop_token_id=toy.EOS))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", FinishReason.STOP, None)


def test_min_tokens_come_before_any_stop_string(toy):
    params = SamplingParams(stop=("a",), min_tokens=3)
    whole, _ = feed(
        Transcript(toy.ToyStream(True), params, frozenset()),
        outputs(list(b"aaaa"), [1, 2, 3], FinishReason.LENGTH, False),
    )
    assert whole.text == "aaa"


def test_nothing_changes_after_the_end(toy):
    transcript = Transcript(toy.ToyStream(True), SamplingParams(stop=("a",)), frozenset())
    transcript.feed(Output("r", new_token_ids=tuple(b"xa")))
    assert transcript.feed(Output("r", new_token_ids=tuple(b"more"))) == Delta()


def test_an_end_is_not_undone():
    """What a reader finds in one go may hold a later step's news of a sample that has ended."""
    whole = Delta(finish_reason=FinishReason.STOP, stop_reason="x")
    whole.extend(Delta())
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, "x")


def test_half_a_character_at_the_end_is_marked(toy):
    transcript = Transcript(toy.ToyStream(True), SamplingParams(), frozenset())
    delta = transcript.feed(Output("r", new_token_ids=tuple("é".encode()[:1]), finish_reason=FinishReason.LENGTH))
    assert delta.text == "\ufffd"
