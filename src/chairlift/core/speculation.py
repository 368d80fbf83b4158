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

from math import inf, log

from chairlift.core.batch import Batch
from chairlift.core.boarding import Boarding
from chairlift.core.lookup import Lookup
from chairlift.core.pace import Pace, Work
from chairlift.core.request import Request
from chairlift.core.settings import Settings

_EXPECTED = 0.6  # likelihood of a draft, before any was tried


class Speculation:
    """Attributes:
    num_drafts, num_accepted: tokens tried, and of those the ones that were right, from the start of the engine.
    """

    def __init__(self, settings: Settings, boarding: Boarding, pace: Pace) -> None:
        self.num_drafts = 0
        self.num_accepted = 0
        self._most = settings.num_speculative_tokens
        self._slo_itl = settings.slo_itl
        self._boarding = boarding
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
        rate = len(batch.items) / seconds  # tokens a second, without drafts
        for_prompts = batch.left - batch.left // 2
        limit = self._limit(batch.work)
        for i, request in enumerate(batch.requests):
            if request is None or not request.plain:
                continue
            most = min(self._most, request.max_len - len(request.token_ids) - 1, batch.left - for_prompts)
            row = self._pace.seconds(batch.work.plus(request.num_planned, 1)) - self._pace.seconds(batch.work)
            if most > 0 and rate * row < 1.0:
                self._add(batch, i, request, most, rate * row, limit)
        if not batch.num_drafts:
            self._all.pass_over()

    def _limit(self, work: Work) -> float:
        """The time that a step may take with drafts: half of what the target leaves, if prompts want the rest."""
        if self._slo_itl is None:
            return inf
        running = self._boarding.running.values()
        if not self._boarding.waiting and all(request.num_remaining <= 1 for request in running):
            return self._slo_itl
        without = self._pace.safe_seconds(work)
        return without + max(0.0, self._slo_itl - without) / 2

    def _add(self, batch: Batch, i: int, request: Request, most: int, needed: float, limit: float) -> None:
        """At most ``most`` that are right with a probability of ``needed``, in a step of ``limit`` seconds."""
        lookup = request.lookup
        if lookup is None:
            lookup = request.lookup = Lookup()
        drafts = lookup.draft(request.token_ids, most)
        if not drafts:
            return
        most = how_many(lookup.likelihood(self._all.likelihood(_EXPECTED)), needed, most)
        while most and self._pace.safe_seconds(batch.work.plus(request.num_planned, most)) > limit:
            most -= 1
        if not most:
            lookup.pass_over()
            return
        most = self._boarding.spare_room(request, most)
        if most:
            batch.add_drafts(i, request, drafts[:most])

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
