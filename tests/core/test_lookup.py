"""Drafts by prompt lookup: where they come from, and how likely they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.lookup import NGRAM, Lookup


def drafts_by_definition(tokens: Sequence[int], most: int) -> list[int]:
    """Again and again what followed the last place where the last tokens stood before."""
    if len(tokens) <= NGRAM:
        return []
    places = [p for p in range(NGRAM, len(tokens)) if tokens[p - NGRAM : p] == tokens[-NGRAM:]]
    if not places:
        return []
    text = list(tokens)
    for _ in range(most):
        text.append(text[len(text) - (len(tokens) - places[-1])])
    return text[len(tokens) :]


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 9), st.lists(st.integers(1, 5), max_size=9))
def test_drafts_are_what_followed_before(tokens: list[int], most: int, lengths: list[int]) -> None:
    """However the tokens came."""
    lookup = Lookup()
    end = 0
    for length in (*lengths, len(tokens)):
        end = min(end + length, len(tokens))
        assert lookup.draft(tokens[:end], most) == drafts_by_definition(tokens[:end], most)


def test_the_likelihood_follows_the_last_drafts() -> None:
    lookup = Lookup()
    assert lookup.likelihood(0.6) == pytest.approx(0.6)
    for _ in range(40):
        lookup.learn(4, 4)
    assert lookup.likelihood(0.6) > 0.95
    for _ in range(4):
        lookup.learn(4, 0)
    assert 0.7 < lookup.likelihood(0.6) < 0.95
    for _ in range(40):
        lookup.learn(4, 0)
    assert lookup.likelihood(0.6) < 0.15
    for _ in range(400):
        lookup.pass_over()
    assert lookup.likelihood(0.6) == pytest.approx(0.6, abs=0.01), "tried again, some day"


def test_what_comes_after_a_wrong_draft_says_nothing() -> None:
    """Two of three tries were right, of five drafts."""
    lookup = Lookup()
    for _ in range(100):
        lookup.learn(5, 2)
    assert lookup.likelihood(0.0) == pytest.approx(2 / 3, abs=0.05)


def test_a_long_text_is_taken_in_by_and_by() -> None:
    """So that no step waits for it; and no more is kept than its last few thousand places."""
    for period in (1000, 20_000):  # the second says nothing twice
        lookup, text = Lookup(), [i % period for i in range(20_000)]
        sizes = []
        for end in range(3000, 20_000, 3):
            lookup.draft(text[:end], 4)
            sizes.append(len(lookup._follows))
        assert max(sizes) <= 4096 + 256 and sizes[0] <= 256
        assert lookup.draft(text, 4) == (text[:4] if period == 1000 else [])
