"""The scheduler: add, abort and expire requests, schedule a step, commit its result.

`schedule` turns the running and the waiting into a `StepPlan`; `commit` takes the step's result back into them. What
goes into a step is the policy's decision, who boards and who is preempted `Boarding`'s work, where it lives in memory
the KV manager's. This file is the only writer of tokens and ends. Several plans may be in flight, as long as they are
committed in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from chairlift.core.batch import Batch, Flight, new_item
from chairlift.core.beams import BeamSearch, num_candidates
from chairlift.core.boarding import Boarding
from chairlift.core.deadlines import Deadlines, is_late
from chairlift.core.kv import KVManager
from chairlift.core.pace import Pace, Work
from chairlift.core.plan import (
    BAD_LOGITS,
    BlockOpKind,
    Capacity,
    Event,
    Output,
    StepItem,
    StepPlan,
    StepResult,
    StepStats,
    TokenLogprob,
)
from chairlift.core.policy import Group, Policy
from chairlift.core.queue import WaitingQueue
from chairlift.core.request import FinishReason, Key, Request, SamplingParams, Status
from chairlift.core.settings import Settings
from chairlift.core.shares import Shares
from chairlift.errors import ConfigError, RequestRefused

__all__ = ["Key", "Scheduler", "Settings"]

_BAD_LOGITS = "the model's logits are not finite numbers"
_LEAST_CHUNK = 4  # prompt tokens in a step, whatever the target for its time
_MOST_FAILURES_TOGETHER = 2  # steps of a request in a row that fail before it is tried alone
_MOST_FAILURES_ALONE = 3  # and then before it ends


class Scheduler:
    """See the module. Not thread-safe; one engine owns it."""

    def __init__(
        self,
        capacity: Capacity,
        policy: Policy,
        settings: Settings,
        *,
        shares: Shares | None = None,
        secret: bytes | None = None,
        disk_contents: Iterable[tuple[int, bytes]] = (),
    ) -> None:
        """With ``shares``, tenants are treated fairly. The last two are `KVManager`'s."""
        _require_budget(settings.max_num_batched_tokens, "max-num-seqs", settings.max_num_seqs)
        if policy.whole:
            _require_budget(settings.max_num_batched_tokens, "max-model-len", capacity.max_model_len)
        self.policy = policy
        self.capacity = capacity
        self.settings = settings
        self.kv = KVManager(
            capacity,
            max_chunk=settings.max_num_batched_tokens,
            enable_prefix_caching=settings.enable_prefix_caching,
            secret=secret,
            disk_contents=disk_contents,
        )
        self.pace = Pace()
        self.boarding = Boarding(capacity, policy, settings, self.kv, self.pace, shares, self._tell)
        self.wake_at: float | None = None  # the time until which an idle engine waits for more requests
        self._shares = shares
        self._live: dict[str, dict[int, Request]] = {}  # request id -> sample index -> sequence
        self._beams: dict[str, BeamSearch] = {}
        self._deadlines = Deadlines()
        self._in_flight: deque[Flight] = deque()
        self._longest = capacity.max_model_len  # prompt and output of a request
        self._suspects: dict[str, None] = {}  # ids of requests whose steps failed again and again: each is tried alone
        self._finished_ids: list[str] = []
        self._events: list[Event] = []
        self._next_step = 0
        self._next_ticket = 0
        self._now = 0.0
        self._idle_since = 0.0  # when the first of those who wait came to an idle engine
        self._budget = 0
        self._last_tokens = 0
        self._last_seconds = 0.0

    @property
    def waiting(self) -> WaitingQueue:
        return self.boarding.waiting

    @property
    def running(self) -> dict[Key, Request]:
        """In the order of boarding."""
        return self.boarding.running

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def live(self) -> Iterator[Request]:
        return (request for samples in self._live.values() for request in samples.values())

    # -- add, abort, expire

    def add(self, request: Request, now: float = 0.0) -> None:
        """Queues a request, or raises `RequestRefused` if it could never run here."""
        self._refuse(request)
        limit, params = self._longest, request.params
        request.max_len = limit if params.max_tokens is None else min(limit, request.num_prompt + params.max_tokens)
        needed = self._needed(request)
        if needed > self.boarding.room:
            raise RequestRefused(
                f"the request needs up to {needed} KV blocks of {self.kv.block_size} tokens, and the cache has "
                f"{self.boarding.room} for it; lower max_tokens or n, or raise --kv-cache-memory"
            )
        self._now = now
        self._next_ticket += 1
        request.ticket, request.queued_at = self._next_ticket, now
        self._prepare(request)
        if not self.has_work:
            self._idle_since = now
        self._deadlines.watch(request, self._live)
        if self._shares:
            self._shares.join(request.tenant)
        self._live[request.id] = {request.index: request}
        self._tell(request, "queued", f"prompt of {request.num_prompt} tokens")
        self.waiting.push(request)

    def _needed(self, request: Request) -> int:
        """Blocks without which a request cannot run to its end."""
        needed = max(self.kv.held(request.max_len, prefilling=True), self.policy.gate.total(request, self.kv))
        if request.params.use_beam_search or not self.policy.gate.preempts:
            needed = max(needed, self.kv.full_blocks(request))
        return needed

    def _refuse(self, request: Request) -> None:
        """Raises `RequestRefused` for what can be told without looking at memory."""
        limit, slots = self._longest, self.settings.max_num_seqs
        if request.id in self._live:
            raise RequestRefused(f"a request with the id {request.id!r} is already here")
        if request.num_prompt < 1:
            raise RequestRefused("the prompt is empty; it must hold at least one token")
        if request.num_prompt >= limit:
            raise RequestRefused(
                f"the prompt has {request.num_prompt} tokens, and max-model-len is {limit} with at least one token of "
                f"output; shorten the prompt to {limit - 1} tokens or raise --max-model-len"
            )
        if request.num_samples > slots:
            raise RequestRefused(
                f"n is {request.num_samples}, and at most {slots} sequences run at once; "
                f"lower n (or best_of) to {slots} or raise --max-num-seqs"
            )
        if request.params.use_beam_search and self.policy.holds:
            raise RequestRefused("static batching cannot search with beams; use another --scheduler-policy")

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        """Ends a request, or one sample of it, now. An unknown one is ignored: it may have just finished."""
        outputs: list[Output] = []
        if index is not None and any(r.params.use_beam_search for r in self._live.get(request_id, {}).values()):
            return outputs  # its results are known all together, at its end
        for request in list(self._live.get(request_id, {}).values()):
            if request.status is Status.FINISHED:  # as a beam of a search that just ended
                continue
            if index is None:
                outputs += self._end(request, FinishReason.ABORT)
            elif index in request.samples:
                request.aborted.add(index)  # not forked from its prompt yet, it ends when it is
                if len(request.aborted) == request.num_samples:
                    outputs += self._end(request, FinishReason.ABORT)
        return outputs + self._retire_batch()

    def expire(self, now: float) -> list[Output]:
        """Ends the requests whose time is over, and those that wait and could not produce a token in time any more."""
        self._now = now
        outputs: list[Output] = []
        for request in self._deadlines.due(now):
            for sample in list(self._live.get(request.id, {}).values()):
                if sample.ticket == request.ticket and sample.finish_reason is None and is_late(sample, now):
                    outputs += self._end(sample, FinishReason.DEADLINE)
        while self._deadlines and self.waiting:
            head = self.waiting.first(self.kv, now)
            if not self._hopeless(head):
                break
            outputs += self._end(head, FinishReason.DEADLINE)
        return outputs + self._retire_batch()

    def _hopeless(self, request: Request) -> bool:
        """Whether a waiting request cannot have its first token in time even if it boards now."""
        due = request.ttft_deadline if request.num_output == 0 else request.deadline
        if due is None or not self.pace.known:
            return False
        known = self.kv.lookup(request).num_tokens
        return self._now + self.pace.seconds(Work().plus(known, len(request.token_ids) - known)) > due

    # -- schedule

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run: while steps are in flight, or until `wake_at`."""
        self._now = now
        self.wake_at = self._delayed_until(now)
        if self.wake_at is not None:
            self.boarding.bind(self.waiting.first(self.kv, now), "delay")
            return None
        if not self.waiting:
            self.boarding.bind(None, "")
        elif self.policy.holds and self.running:
            self.boarding.bind(self.waiting.first(self.kv, now), "batch")
        if self._suspects:
            return self._schedule_alone()
        running = list(self.running.values())
        leaving = None if self.policy.holds else self.boarding.make_way(now)
        if leaving is not None:
            running.remove(leaving)
        for group in self.policy.groups(self.waiting, running, self.settings.max_num_seqs):
            batch = self._fill(group)
            if batch.items:
                return self._depart(batch)
        return None

    def _schedule_alone(self) -> StepPlan | None:
        """A step of one suspect alone, so that a request that makes its steps fail takes no other with it."""
        if self._in_flight:
            return None
        samples = list(self._live[next(iter(self._suspects))].values())
        batch = Batch(self.settings.max_num_batched_tokens)
        self._add_decodes(batch, [r for r in samples if r.status is Status.RUNNING and r.num_remaining == 1])
        for request in samples:
            if request.status is not Status.RUNNING:
                self._board_alone(batch, request)
            elif request.num_remaining > 1:
                self._continue(batch, request)
        return self._depart(batch) if batch.items else None

    def _board_alone(self, batch: Batch, request: Request) -> None:
        """Boards a suspect at the cost of those aboard, who have just begun again."""
        self.boarding.retry()
        while batch.left > 0 and not self.boarding.board(batch, request):
            other = next((r for r in reversed(self.running.values()) if r.id != request.id), None)
            if other is None:
                return
            if other.id in self._beams:
                self._restart_search(other.id)
            else:
                self.boarding.preempt(other, "a step of its own for a request whose steps failed")

    def _depart(self, batch: Batch) -> StepPlan:
        plan = StepPlan(self._next_step, tuple(batch.items), self.kv.take_ops(), tuple(self._finished_ids))
        self._next_step += 1
        self._finished_ids.clear()
        self._in_flight.append(Flight(plan, batch.requests, batch.work))
        if self.settings.check:
            self.check()
        return plan

    def _delayed_until(self, now: float) -> float | None:
        """An idle engine may wait a moment for more requests; None if it does not wait."""
        until = self._idle_since + self.settings.max_batch_delay
        if not self.waiting or self.running or now >= until or len(self.waiting) >= self.settings.max_num_seqs:
            return None
        return until

    def _fill(self, group: Group) -> Batch:
        """Takes candidates in the group's order while the token budget lasts."""
        batch = Batch(self.settings.max_num_batched_tokens)
        self._add_decodes(batch, group.running)
        if self.settings.slo_itl is not None and batch.items:
            self._keep_pace(batch)
        self._budget = len(batch.items) + batch.left
        self._add_prefills(batch, group)
        return batch

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
                request.status is not Status.RUNNING or not self.boarding.make_room(request, 1)
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
                items.append(new_item((request.info, start, (token,), table, 1, (), (), False)))
                requests.append(request)
                draws += 1
                request.num_planned = start + 1
                request.num_pending = pending + 1
                request.pending = -draws
            positions += start
        count = len(items)
        batch.num_draws, batch.left = draws, batch.budget - count
        batch.work = Work(count, positions + count)

    def _keep_pace(self, batch: Batch) -> None:
        """Cuts the budget to what keeps the time between the tokens of the decodes in this step. A prompt that is
        aboard goes on in any case: it holds memory that others wait for."""
        assert self.settings.slo_itl is not None
        aboard = [r.num_planned for r in self.running.values() if r.num_remaining > 1]
        start, least = max(aboard, default=0), _LEAST_CHUNK if aboard else 0
        left = self.pace.chunk(batch.work, start, batch.left, self.settings.slo_itl, least)
        batch.left, batch.paced = left, left < batch.left

    def _add_prefills(self, batch: Batch, group: Group) -> None:
        """Pieces of prompts, by rank: of those aboard and of those who wait."""
        aboard = deque(sorted(group.partial, key=self.waiting.rank))
        boards = group.boards
        while aboard or boards:
            head = self.boarding.next(self._now) if boards else None
            if aboard and (head is None or self.waiting.rank(aboard[0]) <= self.waiting.rank(head)):
                request = aboard.popleft()
                if batch.left > 0 and request.status is Status.RUNNING:
                    self._continue(batch, request)
            else:
                boards = head is not None and self.boarding.board(batch, head)

    def _continue(self, batch: Batch, request: Request) -> None:
        """The next piece of a prompt that is computed in part."""
        n = min(self.policy.quota(request.num_remaining, batch.left), batch.left)
        if n and self.boarding.make_room(request, n):
            self.boarding.take(batch, request, n)

    # -- commit

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Takes a step's result; returns the news of every sequence that gained tokens or ended."""
        flight = self._in_flight.popleft()
        assert flight.plan is plan, "plans are committed in the order in which they were made"
        self._now = now
        if result.damaged:
            self._drop_damaged(flight, result.damaged)
        outputs: list[Output] = []
        requests = flight.requests
        for i, item in enumerate(plan.items):
            request = requests[i]
            if request is None or request.finish_reason is not None:  # padding, a held row, or ended meanwhile
                continue
            prompt_logprobs: tuple[TokenLogprob, ...] = ()
            if item.prompt_targets:
                prompt_logprobs = self._new_prompt_logprobs(request, item, result, i)
                if any(entry.token_id == BAD_LOGITS for entry in prompt_logprobs):
                    outputs += self._end(request, FinishReason.ERROR, _BAD_LOGITS)
                    continue
            self.kv.commit(request, len(item.token_ids))
            if (request.num_failures or self._suspects) and request.num_computed >= request.failed_end:
                self._acquit(request)
            if not item.num_samples:
                if prompt_logprobs:
                    outputs.append(Output(request.id, request.index, prompt_logprobs=prompt_logprobs))
                continue
            tokens, logprobs = result.tokens[i], result.logprobs[i]
            if not request.plain:
                outputs += self._sampled(request, tokens, logprobs, prompt_logprobs)
                continue
            # What _sampled does for a single sequence, for nearly all of them in nearly every step.
            token = tokens[0]
            request.num_pending -= 1
            if token == BAD_LOGITS:
                outputs += self._end(request, FinishReason.ERROR, _BAD_LOGITS)
                continue
            known = request.token_ids
            known.append(token)
            news = Output(request.id, request.index, tokens, None, logprobs, prompt_logprobs, request.num_cached_tokens)
            if token in request.stop_ids or len(known) >= request.max_len:
                outputs += self._finish_if_done(request, token, news)
            else:
                outputs.append(news)
        outputs += self._retire_batch()
        self._learn(flight, result)
        if self.settings.check:
            self.check()
        return outputs

    def _learn(self, flight: Flight, result: StepResult) -> None:
        """What the step says about the time of steps."""
        self._last_tokens, self._last_seconds = flight.work.tokens, result.seconds
        if flight.work.tokens > len(flight.requests):  # a prompt may be done: the gate may see further now
            self.boarding.retry()
        self.pace.learn(flight.work, result.seconds - result.swap_seconds)
        swaps = sum(op.kind is not BlockOpKind.COPY for op in flight.plan.block_ops) if result.swap_seconds else 0
        if swaps:
            self.pace.learn_swap(swaps, result.swap_seconds)

    def _new_prompt_logprobs(
        self, request: Request, item: StepItem, result: StepResult, i: int
    ) -> tuple[TokenLogprob, ...]:
        """Those not given out before: a preempted request computes its prompt again."""
        known = max(0, request.num_prompt_logprobs - item.start)
        new = result.prompt_logprobs[i][known:]
        request.num_prompt_logprobs += len(new)
        return new

    def _sampled(
        self,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        prompt_logprobs: tuple[TokenLogprob, ...],
    ) -> list[Output]:
        """Appends the drawn token; of an n-way prompt, forks a sequence for each further sample first."""
        if request.params.use_beam_search:
            return self._search(request, tokens, logprobs)
        if len(tokens) == 1:
            request.num_pending -= 1
        sequences = [request, *(self._fork(request, request.index + k) for k in range(1, len(tokens)))]
        request.num_samples, request.plain = 1, not request.params.uses_history
        if len(tokens) > 1:
            self.kv.settle(request)
        aborted, request.aborted = request.aborted, set()
        outputs: list[Output] = []
        for k, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
            if sequence.index in aborted:
                outputs += self._end(sequence, FinishReason.ABORT)
                continue
            if token == BAD_LOGITS:
                outputs += self._end(sequence, FinishReason.ERROR, _BAD_LOGITS)
                continue
            sequence.token_ids.append(token)
            news = Output(
                sequence.id,
                sequence.index,
                (token,),
                logprobs=logprobs[k : k + 1],
                prompt_logprobs=prompt_logprobs if k == 0 else (),
                num_cached_tokens=request.num_cached_tokens,
            )
            outputs += self._finish_if_done(sequence, token, news)
        return outputs

    def _prepare(self, request: Request) -> None:
        params = request.params
        request.prepare(num_candidates(params.width, len(request.stop_ids)) if params.use_beam_search else None)

    def _fork(self, parent: Request, index: int) -> Request:
        child = parent.copy(index, len(parent.token_ids))
        child.status = Status.RUNNING
        self._prepare(child)
        self.kv.fork(parent, child)
        self._live[child.id][child.index] = child
        self.running[child.key] = child
        if self._shares:
            self._shares.join(child.tenant)
        return child

    def _finish_if_done(self, request: Request, token: int, news: Output) -> list[Output]:
        if token in request.stop_ids:
            request.finish_reason = FinishReason.STOP
        elif len(request.token_ids) >= request.max_len:
            request.finish_reason = FinishReason.LENGTH
        if request.finish_reason is None:
            return [news]
        if not self.policy.holds or self._suspects:  # while some are tried alone, there is no batch
            return self._retire(request, news)
        request.num_pending, request.num_planned = 0, request.num_computed  # what more is in flight does not count
        return [news]

    # -- beam search

    def _search(self, request: Request, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> list[Output]:
        """A beam has its candidates. When all have, the best go on: on the blocks of their parents, as far as the
        tokens are the same."""
        if tokens[0] == BAD_LOGITS:
            return self._end(request, FinishReason.ERROR, _BAD_LOGITS)
        search = self._beams.get(request.id)
        if search is None:
            search = self._beams[request.id] = BeamSearch(request)
            request.num_samples = 1
        if not search.offer(request.index, logprobs[0].top):
            return []
        beams = dict(self._live[request.id])
        choices = search.advance({index: beam.token_ids for index, beam in beams.items()})
        if not choices:
            return self._end_search(request.id, self._results(request, search))
        indexes = search.begin_round(choices)
        chosen = [
            beams[choice.parent] if index in beams else self._fork(beams[choice.parent], index)
            for index, choice in zip(indexes, choices, strict=True)
        ]
        for index, beam in beams.items():  # after the forks, so that no block of theirs is lost
            if index not in indexes:
                self._drop_beam(beam)
        for beam, choice in zip(chosen, choices, strict=True):
            beam.token_ids.append(choice.token)
        self.kv.settle(chosen[0])
        return []

    def _results(self, request: Request, search: BeamSearch) -> list[Output]:
        found = len(search.results)
        missing = f"the search found {found} texts, not {search.num_results}; ask for fewer"
        return [
            Output(request.id, rank, finish_reason=FinishReason.ERROR, error=missing)
            for rank in range(found, search.num_results)
        ] + [
            Output(
                request.id,
                rank,
                result.token_ids,
                result.reason,
                num_cached_tokens=request.num_cached_tokens,
                stop_token_id=result.stop_token_id,
                cumulative_logprob=result.logprob,
            )
            for rank, result in enumerate(search.results)
        ]

    def _drop_beam(self, beam: Request) -> None:
        """A beam that does not go on; the search keeps its slots."""
        self.kv.release(beam)
        del self.running[beam.key]
        del self._live[beam.id][beam.index]
        beam.status, beam.finish_reason = Status.FINISHED, FinishReason.ABORT
        self.boarding.retry()
        if self._shares:
            self._shares.leave(beam.tenant)

    def _end_search(self, request_id: str, outputs: list[Output]) -> list[Output]:
        search = self._beams.pop(request_id)
        beams = list(self._live[request_id].values())
        for beam in beams[1:]:
            self._drop_beam(beam)
        beams[0].num_samples = search.width  # it gives all the slots back
        beams[0].finish_reason = outputs[0].finish_reason
        self._forget(beams[0])
        return outputs

    def _restart_search(self, request_id: str) -> None:
        """Beams that lost their KV: the search begins again with the prompt, and comes to the same results."""
        search = self._beams.pop(request_id)
        beams = list(self._live[request_id].values())
        again = beams[0].copy(0, beams[0].num_prompt)
        again.num_samples, again.status = search.width, Status.PREEMPTED
        again.failed_end = max(beam.failed_end for beam in beams)
        again.num_failures = max(beam.num_failures for beam in beams)
        self._prepare(again)
        for beam in beams:
            self._drop_beam(beam)
        self.boarding.give_back_slots(again)
        self._live[request_id][again.index] = again
        if self._shares:
            self._shares.join(again.tenant)
        self._tell(again, "preempted", "the search begins again")
        self.waiting.push(again)

    # -- ends

    def _retire_batch(self) -> list[Output]:
        """The rows of a static batch leave together, when the last of them has ended."""
        if not self.policy.holds or not all(request.finish_reason for request in self.running.values()):
            return []
        return [output for request in list(self.running.values()) for output in self._retire(request)]

    def _retire(self, request: Request, news: Output | None = None) -> list[Output]:
        """A request that came to its own end leaves; its last news, if given, carries the reason."""
        reason = request.finish_reason
        assert reason is not None
        news = news or Output(request.id, request.index, num_cached_tokens=request.num_cached_tokens)
        stop = request.token_ids[-1] if reason is FinishReason.STOP else None
        self._forget(request)
        return [news._replace(finish_reason=reason, stop_token_id=stop)]

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> list[Output]:
        """Ends a request early, with an output for each of its samples, forked or not."""
        outputs = [Output(request.id, index, finish_reason=reason, error=error) for index in request.outputs]
        if request.id in self._beams:
            return self._end_search(request.id, outputs)
        request.finish_reason = reason
        self._forget(request)
        return outputs

    def _forget(self, request: Request) -> None:
        """Frees all that a request holds, whatever its state."""
        assert request.finish_reason is not None
        self._tell(request, "ended", f"{request.finish_reason.value} after {request.num_output} tokens")
        self.kv.release(request)
        if request.status is Status.RUNNING:
            self.boarding.leave(request)
        else:
            self.boarding.leave_queue(request)
        request.status = Status.FINISHED
        if self._shares:
            self._shares.leave(request.tenant)
        samples = self._live[request.id]
        del samples[request.index]
        if not samples:
            del self._live[request.id]
            self._suspects.pop(request.id, None)
            self._finished_ids.append(request.id)

    # -- what goes wrong

    def _drop_damaged(self, flight: Flight, damaged: Sequence[int]) -> None:
        """What was to be swapped in is not there: the requests that got it are computed again."""
        bad = {op.dst for op in flight.plan.block_ops if op.kind is BlockOpKind.SWAP_IN and op.src in damaged}
        self.kv.tiers.forget(damaged)
        aboard = [r for r in flight.requests if r is not None and r.status is Status.RUNNING]
        for request in [r for r in aboard if not bad.isdisjoint(r.block_table)]:
            for other in (flight, *self._in_flight):
                other.ignore(request)
            self.boarding.preempt(request, "its blocks, which were damaged", lost=True)

    def fail(self, plan: StepPlan, error: str) -> list[Output]:
        """A step in flight failed, and all in flight are void. Nothing is known of any memory now: all that ran is
        computed again. Requests whose steps go on failing are tried one by one, and who fails alone, too, ends."""
        outputs: list[Output] = []
        failed = next(flight for flight in self._in_flight if flight.plan is plan)
        for item, request in zip(failed.plan.items, failed.requests, strict=True):
            if request is not None:
                request.num_failures += 1
                request.failed_end = item.start + len(item.token_ids)
        self._in_flight.clear()
        for request_id in list(self._beams):
            self._restart_search(request_id)
        for request in list(self.running.values()):
            if request.finish_reason is not None:
                outputs += self._retire(request)
            else:
                self.boarding.preempt(request, "a step that failed", lost=True)
        for request in self.live:
            self.kv.release(request)  # what was swapped out, too
        self.kv.forget_all()
        return outputs + self._judge(error)

    def _acquit(self, request: Request) -> None:
        """A sequence has come past where it failed. When all of a request have, it is no suspect any more."""
        request.num_failures = request.failed_end = 0
        if not any(sample.failed_end for sample in self._live[request.id].values()):
            self._suspects.pop(request.id, None)

    def _judge(self, error: str) -> list[Output]:
        """Who is a suspect after a failure, and who has been proved guilty."""
        outputs: list[Output] = []
        failures = {id: max(sample.num_failures for sample in samples.values()) for id, samples in self._live.items()}
        if self._suspects:
            for request_id in [id for id, times in failures.items() if times >= _MOST_FAILURES_ALONE]:
                for sample in list(self._live[request_id].values()):
                    if sample.status is not Status.FINISHED:
                        message = f"its step failed {_MOST_FAILURES_ALONE} times: {error}"
                        outputs += self._end(sample, FinishReason.ERROR, message)
            return outputs
        for request_id in [id for id, times in failures.items() if times >= _MOST_FAILURES_TOGETHER]:
            self._suspects[request_id] = None
            for sample in self._live[request_id].values():
                sample.num_failures = 0
        return outputs

    # -- pinned prefixes, and the end

    def pin(self, token_ids: Sequence[int]) -> None:
        """The KV of these tokens is computed now, and stays for all tenants. Refuses what would take half of the cache
        or more, with `RequestRefused`."""
        blocks = self.kv.held(len(token_ids))
        if blocks + self.kv.held(len(token_ids) + 2, prefilling=True) > self.boarding.room:
            raise RequestRefused(
                f"the pinned prefix needs {blocks} KV blocks, more than half of the {self.capacity.num_blocks} there "
                "are; shorten --pin-prefix or raise --kv-cache-memory"
            )
        needs = max((self._needed(request) for request in self.live), default=0)
        if self.boarding.room - blocks < needs:
            raise RequestRefused("a prefix cannot be pinned while requests live that need the memory; pin it first")
        self.kv.pin(token_ids)
        # What is pinned is not for others.
        while self.kv.num_pinned and self.kv.held(self._longest, prefilling=True) > self.boarding.room:
            self._longest -= 1
        tokens = [*token_ids, token_ids[-1]]  # one more, since a prefix never covers the last token
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self.add(
            Request(id=f"pin-{self._next_ticket}", token_ids=tokens, num_prompt=len(tokens), params=params, seed=0),
            self._now,
        )

    def farewell(self) -> StepPlan | None:
        """The last plan, when no more will be scheduled: it keeps the prefix cache where it outlasts the engine."""
        if not self.capacity.num_disk_blocks:
            return None
        self.kv.save()
        ops = self.kv.take_ops()
        return StepPlan(self._next_step, (), ops) if ops else None

    # -- what others may know

    def _tell(self, request: Request, what: str, detail: str = "") -> None:
        self._events.append(Event(self._next_step, self._now, request.id, request.index, what, detail))

    @property
    def reason_behind_others(self) -> str:
        """Why a request waits that is not of the tenant whose turn it is."""
        return "order" if self._shares is None else "fairness"

    def take_events(self) -> tuple[Event, ...]:
        """What happened to requests since the last call."""
        events, self._events = tuple(self._events), []
        return events

    def stats(self) -> StepStats:
        host, disk = self.capacity.num_host_blocks, self.capacity.num_disk_blocks
        free = {tier.first: tier.pool.num_free for tier in self.kv.tiers}
        totals = self.boarding.totals
        return StepStats(
            step_id=self._next_step - 1,
            num_running=len(self.running),
            num_waiting=len(self.waiting) - self.waiting.num_preempted,
            num_preempted=self.waiting.num_preempted,
            free_blocks=self.kv.pool.num_free,
            reserved_blocks=self.kv.reserved,
            num_blocks=self.capacity.num_blocks,
            step_tokens=self._last_tokens,
            step_seconds=self._last_seconds,
            total_preemptions=totals.preemptions,
            total_cached_tokens=totals.cached_tokens,
            total_lookup_tokens=totals.lookup_tokens,
            num_host_blocks=host,
            free_host_blocks=free[0] if host else 0,
            num_disk_blocks=disk,
            free_disk_blocks=free[host] if disk else 0,
            total_swaps=totals.swaps,
            total_recomputed_tokens=totals.recomputed_tokens,
            budget=self._budget,
            binding=self.boarding.binding,
        )

    def check(self) -> None:
        """Recounts everything, and raises AssertionError on any difference."""
        live = list(self.live)
        self.kv.check(live)
        assert len(live) == len(self.running) + len(self.waiting), "a request is in no queue, or in two"
        slots = sum(r.num_samples for r in self.running.values() if r.id not in self._beams)
        slots += sum(search.width for search in self._beams.values())
        assert self.boarding.slots_used == slots, f"{self.boarding.slots_used} slots counted, {slots} used"
        assert slots <= self.settings.max_num_seqs, "more slots used than there are"
        planned = {request for flight in self._in_flight for request in flight.requests}
        for request in live:
            in_flight = request.num_planned != request.num_computed
            assert not in_flight or request in planned, f"{request.key}: planned, and in no plan"


def _require_budget(budget: int, setting: str, value: int) -> None:
    if budget < value:
        raise ConfigError(
            f"--max-num-batched-tokens ({budget}) is less than --{setting} ({value}); "
            f"raise the first to {value} or lower the second to {budget}"
        )
