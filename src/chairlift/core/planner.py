"""Filling a step: one token for each that decodes, then pieces of prompts while the token budget lasts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from chairlift.core.batch import Batch
from chairlift.core.boarding import Boarding
from chairlift.core.pace import Pace, Work
from chairlift.core.plan import new_item
from chairlift.core.policy import Group, Policy
from chairlift.core.request import Request, Status
from chairlift.core.searches import Searches
from chairlift.core.settings import Settings
from chairlift.core.speculation import Speculation

_LEAST_CHUNK = 4  # prompt tokens in a step, whatever the target for its time


class Planner:
    """Attributes:
    budget: tokens that the last step could have had.
    """

    def __init__(
        self,
        policy: Policy,
        settings: Settings,
        boarding: Boarding,
        searches: Searches,
        pace: Pace,
        speculation: Speculation,
    ) -> None:
        self.budget = 0
        self._policy = policy
        self._settings = settings
        self._boarding = boarding
        self._searches = searches
        self._pace = pace
        self._speculation = speculation

    def fill(self, group: Group, now: float) -> Batch:
        """Takes candidates in the group's order while the token budget lasts."""
        batch = Batch(self._settings.max_num_batched_tokens)
        self._add_decodes(batch, group.running)
        self._speculation.add_drafts(batch)
        if self._settings.slo_itl is not None and batch.items:
            self._keep_pace(batch, self._settings.slo_itl)
        self.budget = batch.work.tokens + batch.left
        self._add_prefills(batch, group, now)
        return batch

    def fill_alone(self, samples: Sequence[Request]) -> Batch:
        """A step for the sequences of one request, at the cost of all others."""
        batch = Batch(self._settings.max_num_batched_tokens)
        self._add_decodes(batch, [r for r in samples if r.status is Status.RUNNING and r.num_remaining == 1])
        for request in samples:
            if request.status is not Status.RUNNING:
                self._board_alone(batch, request)
            elif request.num_remaining > 1:
                self._continue(batch, request)
        return batch

    def _board_alone(self, batch: Batch, request: Request) -> None:
        self._boarding.retry()
        while batch.left > 0 and not self._boarding.board(batch, request):
            other = next((r for r in reversed(self._boarding.running.values()) if r.id != request.id), None)
            if other is None:
                return
            if other.id in self._searches:
                self._searches.restart(other.id)
            else:
                self._boarding.preempt(other, "a step of its own for a request whose steps failed")

    def _add_decodes(self, batch: Batch, running: Sequence[Request]) -> None:
        """One token for each. The loop that a step's cost depends on: for each sequence it does only what must be done.

        `KVManager.grow` is asked only where ``writable_end`` says that there is something to grow.
        """
        items, requests, draws, positions = batch.items, batch.requests, 0, 0
        for request in running:
            start, pending = request.num_planned, request.num_pending
            if pending and len(request.token_ids) + pending >= request.max_len:  # its last token is being drawn
                continue
            if start >= request.writable_end and (
                request.status is not Status.RUNNING or not self._boarding.make_room(request, 1)
            ):
                continue  # preempted a moment ago by one before it, or just now, or it must wait
            if not request.plain or request.finish_reason is not None:
                batch.num_draws = draws
                batch.take(request, 1)
                draws = batch.num_draws
            else:
                table = request.table
                if table is None:
                    table = request.table = tuple(request.block_table)
                token = request.pending if pending else request.token_ids[-1]
                items.append(new_item((request.info, start, (token,), table, 1, (), (), False, 0)))
                requests.append(request)
                draws += 1
                request.num_planned = start + 1
                request.num_pending = pending + 1
                request.pending = -draws
            positions += start
        count = len(items)
        batch.num_draws, batch.left = draws, batch.budget - count
        batch.work = Work(count, positions + count)

    def _keep_pace(self, batch: Batch, target: float) -> None:
        """Cuts the budget to what keeps the time between the tokens of the decodes in this step. A prompt that is
        aboard goes on in any case: it holds memory that others wait for."""
        aboard = [r.num_planned for r in self._boarding.running.values() if r.num_remaining > 1]
        start, least = max(aboard, default=0), _LEAST_CHUNK if aboard else 0
        left = self._pace.chunk(batch.work, start, batch.left, target, least)
        batch.left, batch.paced = left, left < batch.left

    def _add_prefills(self, batch: Batch, group: Group, now: float) -> None:
        """Pieces of prompts, by rank: of those aboard and of those who wait."""
        rank, favoured = self._boarding.waiting.rank, self._boarding.favoured
        aboard = deque(sorted(group.partial, key=lambda request: (request is not favoured, rank(request))))
        boards = group.boards
        while aboard or boards:
            head = self._boarding.next(now) if boards else None
            if aboard and (head is None or aboard[0] is favoured or rank(aboard[0]) <= rank(head)):
                request = aboard.popleft()
                if batch.left > 0 and request.status is Status.RUNNING:
                    self._continue(batch, request)
            else:
                boards = head is not None and self._boarding.board(batch, head)

    def _continue(self, batch: Batch, request: Request) -> None:
        """The next piece of a prompt that is computed in part."""
        n = self._policy.quota(request.num_remaining, batch.left)
        if n and self._boarding.make_room(request, n):
            self._boarding.take(batch, request, n)
