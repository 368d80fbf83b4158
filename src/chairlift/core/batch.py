"""A step while it is put together: what each sequence computes in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from chairlift.core.pace import NO_WORK, Work
from chairlift.core.plan import StepItem, StepPlan
from chairlift.core.request import Request


@dataclass(slots=True)
class Batch:
    """A step that is being filled. ``requests`` run parallel to ``items``; None for what nobody waits for.

    Taking a sequence moves its ``num_planned``, and counts the token that it will draw as pending.
    """

    budget: int
    items: list[StepItem] = field(default_factory=list)
    requests: list[Request | None] = field(default_factory=list)
    num_draws: int = 0
    num_drafts: int = 0
    left: int = 0  # of the budget
    work: Work = NO_WORK
    paced: bool = False  # the budget was cut to keep the time between tokens

    def take(self, request: Request, n: int) -> None:
        """The next ``n`` tokens of a request go into the step."""
        end = request.num_planned + n
        ends = end == len(request.token_ids) + request.num_pending
        self._add(_item(request, n, ends), request)
        if request.finish_reason is not None:  # a row that is held: it computes the same again
            return
        request.num_planned = end
        if ends and request.num_samples == 1 and not request.params.use_beam_search:
            request.num_pending, request.pending = request.num_pending + 1, -self.num_draws

    def pad(self, request: Request, padding: int) -> None:
        """Rows after the known tokens, at positions that real ones will overwrite before anybody reads them."""
        assert request.info is not None and request.table is not None
        known = request.token_ids
        tokens = (known[-1],) * padding
        self._add(StepItem(request.info, len(known), tokens, request.table, 0, discard=True), None)

    def add_drafts(self, i: int, request: Request, drafts: Sequence[int]) -> None:
        """Guesses at what comes after the tokens of the i-th item, for which the request has room."""
        item, n = self.items[i], len(drafts)
        if request.table is None:
            request.table = tuple(request.block_table)
        self.items[i] = item._replace(token_ids=(*item.token_ids, *drafts), block_table=request.table, num_drafts=n)
        self.num_drafts += n
        self.left -= n
        self.work = self.work.plus(request.num_planned, n)

    def _add(self, item: StepItem, request: Request | None) -> None:
        n = len(item.token_ids)
        self.items.append(item)
        self.requests.append(request)
        self.num_draws += item.num_samples
        self.left -= n
        self.work = self.work.plus(item.start, n)


@dataclass(slots=True)
class Flight:
    """A plan that is not committed yet. ``requests`` run parallel to its items, as in the batch."""

    plan: StepPlan
    requests: list[Request | None]
    work: Work
    num_drafts: int = 0

    def ignore(self, request: Request) -> None:
        """Whatever is computed for this request is worthless."""
        self.requests = [None if other is request else other for other in self.requests]


def _item(request: Request, n: int, ends: bool) -> StepItem:
    """The next ``n`` tokens of a request. A row held by a static batch repeats its last token, for nothing."""
    params, start, known = request.params, request.num_planned, request.token_ids
    end = start + n
    pending = (request.pending,) if end > len(known) else ()
    targets = known[start + 1 : min(end + 1, request.num_prompt)] if params.prompt_logprobs is not None else ()
    if request.table is None:
        request.table = tuple(request.block_table)
    assert request.info is not None
    draws = 1 if params.use_beam_search else request.num_samples  # beams choose from the logprobs of a single draw
    return StepItem(
        request.info,
        start,
        (*known[start:end], *pending),
        request.table,
        draws if ends else 0,
        (*known[:end], *pending) if params.uses_history else (),
        tuple(targets),
        request.finish_reason is not None,
    )
