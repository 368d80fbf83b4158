"""Drafts by prompt lookup: what a sequence says next is what followed when it said the same before.

Texts that are edited, summarised or quoted say much of their prompt again, and a table finds it: no model is asked.
(Saxena, "Prompt Lookup Decoding", 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3
"""Tokens that must be the same. Fewer find drafts more often, that are right less often."""

_MOST_PLACES = 4096  # of a sequence, the last ones, or down to half as many
_MOST_AT_ONCE = 256  # taken in by one call: a long prompt is known after some steps

_PRIOR = 2.0  # drafts that an estimate counts for, before there are any
_FADING = 0.9  # weight of what was learnt one draft earlier
_FORGETTING = 0.98  # and one step without a draft earlier, so that it is tried again some day


class Lookup:
    """One sequence's drafts, and how many of them were right lately. Costs a moment for each new token, and a hundred
    bytes for each of the last ones."""

    __slots__ = ("_follows", "_known", "_right", "_tried")

    def __init__(self) -> None:
        self._follows: dict[tuple[int, ...], int] = {}  # tokens -> the position after their last place
        self._known = NGRAM  # places that end before this position are in the table
        self._right = 0.0
        self._tried = 0.0

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """The next tokens, if the last ones were seen before: ``most`` of them, or none. The end of the sequence may
        be part of what followed; then it goes on in a circle."""
        end = len(tokens)
        self._learn_places(tokens, end)
        follows = self._follows
        at = follows.get(tuple(tokens[-NGRAM:]))
        if at is None:
            return []
        period = end - at
        if most <= period:
            return list(tokens[at : at + most])
        return [tokens[at + i % period] for i in range(most)]

    def _learn_places(self, tokens: Sequence[int], end: int) -> None:
        follows = self._follows
        if len(follows) >= _MOST_PLACES:
            follows.clear()
            self._known = max(NGRAM, self._known - _MOST_PLACES // 2)
        first = max(self._known, end - _MOST_PLACES)
        last = min(end, first + _MOST_AT_ONCE)
        for position in range(first, last):
            follows[tuple(tokens[position - NGRAM : position])] = position
        self._known = max(last, NGRAM)

    def likelihood(self, expected: float) -> float:
        """That a draft is right if the one before it is. ``expected`` before anything is known."""
        return (self._right + _PRIOR * expected) / (self._tried + _PRIOR)

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Of so many drafts the first ones were right; of those after a wrong one nothing is known."""
        self._right = _FADING * self._right + num_accepted
        self._tried = _FADING * self._tried + min(num_accepted + 1, num_drafts)

    def pass_over(self) -> None:
        """There was a draft, and it did not pay to try it."""
        self._right *= _FORGETTING
        self._tried *= _FORGETTING
