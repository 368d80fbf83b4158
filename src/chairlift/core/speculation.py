"""Speculative decoding: drafts of a sequence's next tokens are verified in the step that draws the next one anyway.

A draft is one more row of the step, with a draw of its own. As long as the draws say the same as the drafts, each of
them is what it would have been without, to the last bit: the row has seen the same tokens, and the noise depends on the
position alone. So a step yields one token more than drafts were right, and the answer is the same.

A row costs time, so a draft is tried only if it is likelier to be right than it must be to pay: its share in the tokens
that the step yields must be no less than its share in the time it takes. `Pace` knows what a row costs here and now.
In a small batch that is little, since a step's time is that of reading the weights; in a large one a row costs about
as much as any other, and only sure drafts are tried, or none.
"""

from __future__ import annotations

from math import log

from chairlift.core.batch import Batch
from chairlift.core.kv import KVManager
from chairlift.core.lookup import Lookup
from chairlift.core.pace import Pace, Work
from chairlift.core.request import Request
from chairlift.core.settings import Settings

_EXPECTED = 0.6  # likelihood of a draft, before any was tried


class Speculation:
    """Attributes:
    num_drafts, num_accepted: tokens tried, and of those the ones that were right, from the start of the engine.
    """

    def __init__(self, settings: Settings, kv: KVManager, pace: Pace) -> None:
        self.num_drafts = 0
        self.num_accepted = 0
        self._most = settings.num_speculative_tokens
        self._slo_itl = settings.slo_itl
        self._kv = kv
        self._pace = pace
        self._all = Lookup()  # of which only the estimate is used: what sequences have in common

    def add_drafts(self, batch: Batch) -> None:
        """Gives the decodes of a step drafts, as far as they pay, in at most half of what is left of it. To be called
        while it has nothing but decodes."""
        if not self._most or not batch.items or not self._pace.known:
            return
        seconds = self._pace.seconds(batch.work)
        if seconds <= 0.0:
            return
        rate = len(batch.items) / seconds
        for_prompts = batch.left - batch.left // 2
        for i, request in enumerate(batch.requests):
            if request is None or not request.plain:
                continue
            most = min(self._most, request.max_len - len(request.token_ids) - 1, batch.left - for_prompts)
            if most > 0:
                self._add(batch, i, request, most, rate)

    def _add(self, batch: Batch, i: int, request: Request, most: int, rate: float) -> None:
        """``rate``: tokens a second that the step yields without drafts."""
        lookup = request.lookup
        if lookup is None:
            lookup = request.lookup = Lookup()
        drafts = lookup.draft(request.token_ids, most)
        if not drafts:
            return
        start = request.num_planned
        row = self._pace.seconds(batch.work.plus(start, 1)) - self._pace.seconds(batch.work)
        most = how_many(lookup.likelihood(self._all.likelihood(_EXPECTED)), rate * row, most)
        while most and self._too_slow(batch.work.plus(start, most)):
            most -= 1
        if not most:
            lookup.pass_over()
            self._all.pass_over()
            return
        most = min(most, self._room(request, most, len(batch.items)))
        if most:
            batch.add_drafts(i, request, drafts[:most])

    def _too_slow(self, work: Work) -> bool:
        return self._slo_itl is not None and self._pace.safe_seconds(work) > self._slo_itl

    def _room(self, request: Request, most: int, decodes: int) -> int:
        """How many drafts have a place in the cache. For drafts a block is taken only while there is one for the next
        token of every other sequence, too."""
        spare = self._kv.num_available > decodes * self._kv.layout.num_groups
        if request.num_planned + most > request.writable_end and spare:
            self._kv.grow(request, most)
        return max(0, request.writable_end - request.num_planned)

    def learn(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Of a request's drafts in a step so many were right."""
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted
        assert request.lookup is not None
        request.lookup.learn(num_drafts, num_accepted)
        self._all.learn(num_drafts, num_accepted)


def how_many(likelihood: float, needed: float, most: int) -> int:
    """Of ``most`` drafts, each right with this likelihood if the one before it is, those that are right with a
    probability of at least ``needed``."""
    if likelihood >= 1.0:
        return most if needed <= 1.0 else 0
    if needed <= 0.0:
        return most
    return max(0, min(most, int(log(needed) / log(likelihood)))) if likelihood > 0.0 else 0
