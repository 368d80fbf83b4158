"""The scheduler: add, abort and expire requests, schedule a step, commit its result.

`schedule` turns the running and the waiting into a `StepPlan`; `commit` takes the step's result back into them. What
goes into a step is the policy's decision, who boards and who is preempted `Boarding`'s work, where it lives in memory
the KV manager's. This file is the only writer of tokens and ends. Several plans may be in flight, as long as they are
committed in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from chairlift.core.batch import Batch, Flight
from chairlift.core.boarding import Boarding
from chairlift.core.deadlines import Deadlines, is_late
from chairlift.core.failures import MOST_ALONE, Failures
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
    new_output,
)
from chairlift.core.planner import Planner
from chairlift.core.policy import Policy
from chairlift.core.request import FinishReason, Request, SamplingParams, Status
from chairlift.core.searches import Searches
from chairlift.core.sequences import Sequences
from chairlift.core.settings import Settings
from chairlift.core.shares import Shares
from chairlift.core.speculation import Speculation
from chairlift.errors import ConfigError, RequestRefused

__all__ = ["Scheduler", "Settings"]

_BAD_LOGITS = "the model's logits are not finite numbers"


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
        if settings.num_speculative_tokens:
            _require_even_pace(policy)
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
        self.waiting = self.boarding.waiting
        self.running = self.boarding.running  # in the order of boarding
        self.failures = Failures()
        self.sequences = Sequences(self.kv, self.boarding, self.failures, shares, self._tell)
        self.searches = Searches(self.kv, self.boarding, self.sequences)
        self.speculation = Speculation(settings, self.boarding, self.pace)
        self.planner = Planner(policy, settings, self.boarding, self.searches, self.pace, self.speculation)
        self.wake_at: float | None = None  # the time until which an idle engine waits for more requests
        self._shares = shares
        self._deadlines = Deadlines()
        self._in_flight: deque[Flight] = deque()
        self._longest = capacity.max_model_len  # prompt and output of a request
        self._events: list[Event] = []
        self._next_step = 0
        self._next_ticket = 0
        self._now = 0.0
        self._idle_since = 0.0  # when the first of those who wait came to an idle engine
        self._last_tokens = 0
        self._last_seconds = 0.0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- add, abort, expire

    def add(self, request: Request, now: float = 0.0) -> list[Output]:
        """Queues a request, or raises `RequestRefused` if it could never run here.

        One with more tokens than its prompt goes on where another engine stopped: each of its samples is added for
        itself, as PREEMPTED, and draws what it would have drawn there. Returns its end if it had come to it already, as
        a row that a static batch holds.
        """
        self._refuse(request)
        limit, params = self._longest, request.params
        request.max_len = limit if params.max_tokens is None else min(limit, request.num_prompt + params.max_tokens)
        if request.num_output and (reason := _end_of(request)):
            stop = request.token_ids[-1] if reason is FinishReason.STOP else None
            return [Output(request.id, request.index, finish_reason=reason, stop_token_id=stop)]
        needed = self._needed(request)
        if needed > self.boarding.room:
            raise RequestRefused(
                f"the request needs up to {needed} KV blocks of {self.kv.block_size} tokens, and the cache has "
                f"{self.boarding.room} for it; lower max_tokens or n, or raise --kv-cache-memory"
            )
        self._now = now
        self._next_ticket += 1
        request.ticket, request.queued_at = self._next_ticket, now
        if not self.has_work:
            self._idle_since = now
        self._deadlines.watch(request, self.sequences.by_id)
        known = f", {request.num_output} drawn before" if request.num_output else ""
        self.sequences.begin(request, "queued", f"prompt of {request.num_prompt} tokens{known}")
        return []

    def _needed(self, request: Request) -> int:
        """Blocks without which a request cannot run to its end."""
        needed = max(self.kv.layout.held(request.max_len, prefilling=True), self.policy.gate.total(request, self.kv))
        if request.params.use_beam_search or not self.policy.gate.preempts:
            needed = max(needed, self.kv.layout.full_blocks(request))
        return needed

    def _refuse(self, request: Request) -> None:
        """Raises `RequestRefused` for what can be told without looking at memory."""
        limit, slots = self._longest, self.settings.max_num_seqs
        others = {index for live in self.sequences.of(request.id) for index in live.samples}
        if others and (request.status is Status.WAITING or not others.isdisjoint(request.samples)):
            raise RequestRefused(f"a request with the id {request.id!r} is already here")
        if request.num_prompt < 1:
            raise RequestRefused("the prompt is empty; it must hold at least one token")
        if request.num_prompt >= limit:
            whole = limit == self.capacity.max_model_len
            bound = f"max-model-len is {limit}" if whole else f"{limit} have room beside the pinned prefixes,"
            setting = "--max-model-len" if whole else "--kv-cache-memory"
            raise RequestRefused(
                f"the prompt has {request.num_prompt} tokens, and {bound} with at least one token of output; "
                f"shorten the prompt to {limit - 1} tokens or raise {setting}"
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
        sequences = self.sequences.of(request_id)
        if index is not None and any(request.params.use_beam_search for request in sequences):
            return outputs  # its results are known all together, at its end
        for request in sequences:
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
            for sample in self.sequences.of(request.id):
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
        if self.failures.suspects:
            return self._schedule_alone()
        running = list(self.running.values())
        leaving = None if self.policy.holds else self.boarding.make_way(now)
        if leaving is not None:
            running.remove(leaving)
        for group in self.policy.groups(self.waiting, running, self.settings.max_num_seqs):
            batch = self.planner.fill(group, now)
            if self._in_flight and all(item.discard for item in batch.items):
                continue  # only rows that are held: their batch goes on, or leaves, when the step in flight is done
            if batch.items:
                return self._depart(batch)
        return None

    def _schedule_alone(self) -> StepPlan | None:
        """A step of one suspect alone, so that a request that makes its steps fail takes no other with it."""
        if self._in_flight:
            return None
        batch = self.planner.fill_alone(self.sequences.of(next(iter(self.failures.suspects))))
        return self._depart(batch) if batch.items else None

    def _depart(self, batch: Batch) -> StepPlan:
        finished_ids = self.sequences.take_finished_ids()
        plan = StepPlan(self._next_step, tuple(batch.items), self.kv.take_ops(), finished_ids)
        self._next_step += 1
        self._in_flight.append(Flight(plan, batch.requests, batch.work, batch.num_drafts))
        if self.settings.check:
            self.check()
        return plan

    def _delayed_until(self, now: float) -> float | None:
        """An idle engine may wait a moment for more requests; None if it does not wait."""
        until = self._idle_since + self.settings.max_batch_delay
        if not self.waiting or self.running or now >= until or len(self.waiting) >= self.settings.max_num_seqs:
            return None
        return until

    # -- commit

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Takes a step's result; returns the news of every sequence that gained tokens or ended."""
        flight = self._in_flight.popleft()
        assert flight.plan is plan, "plans are committed in the order in which they were made"
        self._now = now
        if result.damaged:
            self._drop_damaged(flight, result.damaged)
        outputs: list[Output] = []
        requests, suspects = flight.requests, self.failures.suspects
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
            tokens, logprobs, computed = result.tokens[i], result.logprobs[i], len(item.token_ids)
            if item.num_drafts:
                tokens, logprobs = self._accept(request, item, tokens, logprobs)
                computed = len(tokens)
            self.kv.commit(request, computed)
            if (request.num_failures or suspects) and request.num_computed >= request.failed_end:
                self.failures.acquit(request, self.sequences.by_id[request.id])
            if not item.num_samples:
                if prompt_logprobs:
                    outputs.append(Output(request.id, request.index, prompt_logprobs=prompt_logprobs))
                continue
            if not request.plain:
                outputs += self._sampled(request, tokens, logprobs, prompt_logprobs)
                continue
            # What _sampled does for a single sequence, for nearly all of them in nearly every step.
            token = tokens[-1]
            request.num_pending -= 1
            if token == BAD_LOGITS:
                if len(tokens) > 1:
                    outputs.append(Output(request.id, request.index, tokens[:-1], None, logprobs[:-1]))
                outputs += self._end(request, FinishReason.ERROR, _BAD_LOGITS)
                continue
            known = request.token_ids
            known.append(token)
            cached = request.num_cached_tokens
            news = new_output(
                (request.id, request.index, tokens, None, logprobs, prompt_logprobs, cached, None, None, False, None)
            )
            if token in request.stop_ids or len(known) >= request.max_len:
                outputs += self._finish_if_done(request, news)
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
        if flight.work.tokens > len(flight.requests) + flight.num_drafts:
            self.boarding.retry()  # a prompt may be done: the gate may see further now
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

    def _accept(
        self, request: Request, item: StepItem, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """Of a request with drafts, the tokens that it gains: up to one that ends it. All but the last were drafts,
        whose KV the step computed: these are its own now."""
        self.speculation.learn(request, item.num_drafts, len(tokens) - 1)
        n = next((i for i, token in enumerate(tokens, 1) if token in request.stop_ids), len(tokens))
        request.token_ids += tokens[: n - 1]
        request.num_planned += n - 1
        return tokens[:n], logprobs[:n]

    def _sampled(
        self,
        request: Request,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        prompt_logprobs: tuple[TokenLogprob, ...],
    ) -> list[Output]:
        """Appends the drawn token; of an n-way prompt, forks a sequence for each further sample first."""
        if request.params.use_beam_search:
            if tokens[0] == BAD_LOGITS:
                return self._end(request, FinishReason.ERROR, _BAD_LOGITS)
            return self.searches.offer(request, logprobs[0])
        if len(tokens) == 1:
            request.num_pending -= 1
        sequences = [request, *(self.sequences.fork(request, request.index + k) for k in range(1, len(tokens)))]
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
            outputs += self._finish_if_done(sequence, news)
        return outputs

    def _finish_if_done(self, request: Request, news: Output) -> list[Output]:
        request.finish_reason = _end_of(request)
        if request.finish_reason is None:
            return [news]
        if not self.policy.holds or self.failures.suspects:  # while some are tried alone, there is no batch
            return self._retire(request, news)
        request.num_pending, request.num_planned = 0, request.num_computed  # what more is in flight does not count
        return [news]

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
        self.sequences.end(request)
        return [news._replace(finish_reason=reason, stop_token_id=stop)]

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> list[Output]:
        """Ends a request early, with an output for each of its samples, forked or not."""
        outputs = [Output(request.id, index, finish_reason=reason, error=error) for index in request.outputs]
        if request.id in self.searches:
            return self.searches.end(request.id, outputs)
        request.finish_reason = reason
        self.sequences.end(request)
        return outputs

    # -- what goes wrong

    def _drop_damaged(self, flight: Flight, damaged: Sequence[int]) -> None:
        """What was to be swapped in is not there: the requests that got it are computed again."""
        bad = {op.dst for op in flight.plan.block_ops if op.kind is BlockOpKind.SWAP_IN and op.src in damaged}
        self.kv.tiers.forget(damaged)
        for item, request in zip(flight.plan.items, flight.requests, strict=True):
            if request is None or request.status is not Status.RUNNING or bad.isdisjoint(item.block_table):
                continue
            for other in (flight, *self._in_flight):
                other.ignore(request)
            self.boarding.preempt(request, "its blocks, which were damaged", lost=True)

    def fail(self, plan: StepPlan, error: str) -> list[Output]:
        """A step in flight failed, and all in flight are void. Nothing is known of any memory now: all that ran is
        computed again. Requests whose steps go on failing are tried one by one, and who fails alone, too, ends."""
        outputs: list[Output] = []
        self.failures.note(next(flight for flight in self._in_flight if flight.plan is plan))
        self._in_flight.clear()
        for request_id in list(self.searches):
            self.searches.restart(request_id)
        for request in list(self.running.values()):
            if request.finish_reason is not None:
                outputs += self._retire(request)
            else:
                self.boarding.preempt(request, "a step that failed", lost=True)
        for request in self.sequences:
            self.kv.release(request)  # what was swapped out, too
        self.kv.forget_all()
        for request_id in self.failures.judge(self.sequences.by_id):
            for request in self.sequences.of(request_id):
                if request.status is not Status.FINISHED:  # as a beam of a search that just ended
                    outputs += self._end(request, FinishReason.ERROR, f"its step failed {MOST_ALONE} times: {error}")
        return outputs

    # -- pinned prefixes, and the end

    def pin(self, token_ids: Sequence[int]) -> None:
        """The KV of these tokens is computed now, and stays for all tenants. Refuses what would take half of the cache
        or more, with `RequestRefused`."""
        tokens = [*token_ids, *token_ids[-1:]]  # one more, since a prefix never covers the last token
        params, id = SamplingParams(max_tokens=1, temperature=0.0), f"pin-{self._next_ticket}"
        request = Request(id=id, token_ids=tokens, num_prompt=len(tokens), params=params, seed=0)
        self._refuse(request)
        blocks = self.kv.layout.held(len(token_ids))
        if blocks + self.kv.layout.held(len(token_ids) + 2, prefilling=True) > self.boarding.room:
            raise RequestRefused(
                f"the pinned prefix needs {blocks} KV blocks, more than half of the {self.capacity.num_blocks} there "
                "are; shorten --pin-prefix or raise --kv-cache-memory"
            )
        needs = max((self._needed(request) for request in self.sequences), default=0)
        if self.boarding.room - blocks < needs:
            raise RequestRefused("a prefix cannot be pinned while requests live that need the memory; pin it first")
        self.kv.pin(token_ids)
        # What is pinned is not for others.
        while self.kv.num_pinned and self.kv.layout.held(self._longest, prefilling=True) > self.boarding.room:
            self._longest -= 1
        self.add(request, self._now)

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
            total_drafts=self.speculation.num_drafts,
            total_accepted_drafts=self.speculation.num_accepted,
            budget=self.planner.budget,
            binding=self.boarding.binding if self.waiting else "",  # who waited may just have been aborted
        )

    def check(self) -> None:
        """Recounts everything, and raises AssertionError on any difference."""
        live = list(self.sequences)
        self.kv.check(live)
        assert len(live) == len(self.running) + len(self.waiting), "a request is in no queue, or in two"
        slots = sum(r.num_samples for r in self.running.values() if r.id not in self.searches) + self.searches.width
        assert self.boarding.slots_used == slots, f"{self.boarding.slots_used} slots counted, {slots} used"
        assert slots <= self.settings.max_num_seqs, "more slots used than there are"
        planned = {request for flight in self._in_flight for request in flight.requests}
        for request in live:
            in_flight = request.num_planned != request.num_computed
            assert not in_flight or request in planned, f"{request.key}: planned, and in no plan"


def _end_of(request: Request) -> FinishReason | None:
    """The end that the tokens drawn so far have come to."""
    if request.token_ids[-1] in request.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.token_ids) >= request.max_len else None


def _require_even_pace(policy: Policy) -> None:
    """With drafts some sequences gain more tokens a step than others."""
    if policy.holds or not (policy.gate.preempts or policy.gate.promises):
        what = "a policy that holds its batch" if policy.holds else "an admission gate that looks ahead"
        raise ConfigError(f"--num-speculative-tokens does not go with {what}: it counts on one token a step for each")


def _require_budget(budget: int, setting: str, value: int) -> None:
    if budget < value:
        raise ConfigError(
            f"--max-num-batched-tokens ({budget}) is less than --{setting} ({value}); "
            f"raise the first to {value} or lower the second to {budget}"
        )
