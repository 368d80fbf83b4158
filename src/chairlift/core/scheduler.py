"""The scheduler: two queues, and the four verbs add, abort, schedule, commit.

`schedule` turns the queues into a `StepPlan`; `commit` takes the step's result back into them. What goes into a step is
the policy's decision, where it lives in memory the KV manager's; this file moves requests between the queues and is the
only writer of their status, tokens and end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from chairlift.core.kv import KVManager
from chairlift.core.plan import BAD_LOGITS, Capacity, Output, StepItem, StepPlan, StepResult, StepStats, TokenLogprob
from chairlift.core.policy import Group, Policy
from chairlift.core.request import FinishReason, Request, Status
from chairlift.errors import ConfigError, RequestRefused

Key = tuple[str, int]  # Request.key

_BAD_LOGITS = "the model's logits are not finite numbers"


class WaitingQueue:
    """First come, first served; a preempted request goes back to the front. Every operation takes constant time."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Key, Request] = OrderedDict()
        self.num_preempted = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def push(self, request: Request) -> None:
        self._requests[request.key] = request
        if request.status is Status.PREEMPTED:
            self._requests.move_to_end(request.key, last=False)
            self.num_preempted += 1

    def remove(self, request: Request) -> None:
        del self._requests[request.key]
        self.num_preempted -= request.status is Status.PREEMPTED


class Scheduler:
    """See the module. Not thread-safe; one engine owns it."""

    def __init__(
        self,
        capacity: Capacity,
        policy: Policy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        check: bool = False,
    ) -> None:
        """``check`` verifies the KV manager's invariants after each plan and commit (slow)."""
        _require_budget(max_num_batched_tokens, "max-num-seqs", max_num_seqs)
        if policy.whole:
            _require_budget(max_num_batched_tokens, "max-model-len", capacity.max_model_len)
        self.policy = policy
        self.capacity = capacity
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.kv = KVManager(capacity, enable_prefix_caching=enable_prefix_caching)
        self.waiting = WaitingQueue()
        self.running: dict[Key, Request] = {}  # in the order of boarding
        self._live: dict[str, dict[int, Request]] = {}  # request id -> sample index -> sequence
        self._slots_used = 0  # a request of n samples takes n slots from the start
        self._finished_ids: list[str] = []
        self._check = check
        self._next_step = 0
        self._last_tokens = 0
        self._last_seconds = 0.0
        self._total_preemptions = 0
        self._total_cached_tokens = 0
        self._total_lookup_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # -- add and abort

    def add(self, request: Request) -> None:
        """Queues a request, or raises `RequestRefused` if it could never run here."""
        limit, params = self.capacity.max_model_len, request.params
        if request.id in self._live:
            raise RequestRefused(f"a request with the id {request.id!r} is already here")
        if request.num_prompt < 1:
            raise RequestRefused("the prompt is empty; it must hold at least one token")
        if request.num_prompt >= limit:
            raise RequestRefused(
                f"the prompt has {request.num_prompt} tokens, and max-model-len is {limit} with at least one token of "
                f"output; shorten the prompt to {limit - 1} tokens or raise --max-model-len"
            )
        if request.num_samples > self.max_num_seqs:
            raise RequestRefused(
                f"n is {request.num_samples}, and at most {self.max_num_seqs} sequences run at once; "
                f"lower n to {self.max_num_seqs} or raise --max-num-seqs"
            )
        request.max_len = limit
        if params.max_tokens is not None:
            request.max_len = min(limit, request.num_prompt + params.max_tokens)
        needed = max(self.kv.blocks_for(request.max_len), self.policy.gate.total(request, self.kv))
        if needed > self.capacity.num_blocks:
            raise RequestRefused(
                f"the request needs up to {needed} KV blocks of {self.kv.block_size} tokens, and the cache has "
                f"{self.capacity.num_blocks}; lower max_tokens or n, or raise --kv-cache-memory"
            )
        self._live[request.id] = {request.index: request}
        self.waiting.push(request)

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        """Ends a request, or one sample of it, now. An unknown one is ignored: it may have just finished."""
        outputs: list[Output] = []
        for request in list(self._live.get(request_id, {}).values()):
            if index is None:
                outputs += self._end(request, FinishReason.ABORT)
            elif index in request.samples:
                request.aborted.add(index)  # not forked from its prompt yet, it ends when it is
                if len(request.aborted) == request.num_samples:
                    outputs += self._end(request, FinishReason.ABORT)
        return outputs

    # -- schedule

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run."""
        for group in self.policy.groups(self.waiting, list(self.running.values()), self.max_num_seqs):
            items = self._fill(group)
            if items:
                plan = StepPlan(self._next_step, tuple(items), self.kv.take_ops(), tuple(self._finished_ids))
                self._next_step += 1
                self._finished_ids.clear()
                self._run_check()
                return plan
        return None

    def _fill(self, group: Group) -> list[StepItem]:
        """Takes candidates in the group's order while the token budget lasts."""
        items: list[StepItem] = []
        left = self.max_num_batched_tokens
        scheduled: set[Key] = set()
        for request in group.running:
            if request.status is not Status.RUNNING:  # preempted a moment ago by one before it in the group
                continue
            n = self.policy.quota(request.num_remaining, left)
            if n and self._make_room(request, n, scheduled):
                scheduled.add(request.key)
                items.append(self._item(request, n))
                left -= n
        while group.boards and left and self.waiting:
            boarded = self._board(self.waiting.peek(), left)
            if not boarded:
                break
            items += boarded
            left -= sum(len(item.token_ids) for item in boarded)
        return items

    def _make_room(self, request: Request, n: int, scheduled: set[Key]) -> bool:
        """Grows a running request, preempting whoever boarded last and is not in this step yet; maybe itself."""
        while not self.kv.grow(request, n):
            victim = next(other for key, other in reversed(self.running.items()) if key not in scheduled)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue; its KV is dropped and will be recomputed."""
        self.kv.release(request)
        self._leave_running(request)
        request.status = Status.PREEMPTED
        request.num_preemptions += 1
        self._total_preemptions += 1
        self.waiting.push(request)

    def _board(self, request: Request, left: int) -> list[StepItem]:
        """Admits the head of the queue if slots, tokens and memory allow; returns its items, or nothing."""
        if self._slots_used + request.num_samples > self.max_num_seqs:
            return []
        gate, hit = self.policy.gate, self.kv.lookup(request)
        need = len(request.token_ids) - len(hit) * self.kv.block_size
        total = gate.total(request, self.kv)
        padding = self._padding(request, total)
        n = self.policy.quota(need + padding, left) - padding
        # Padding beyond the greatest length takes blocks that the samples cannot use.
        total += max(0, self.kv.blocks_for(request.num_prompt + padding) - self.kv.blocks_for(request.max_len))
        headroom = gate.headroom(self.kv) if self.running else 0
        if n <= 0 or not self.kv.admit(
            request, hit, n + padding, total=total, promise=gate.promises, headroom=headroom
        ):
            return []
        self._count_lookup(request)
        self.waiting.remove(request)
        request.status = Status.RUNNING
        self.running[request.key] = request
        self._slots_used += request.num_samples
        items = [self._item(request, n)]
        if padding:
            items.append(self._padding_item(request, padding))
        return items

    def _count_lookup(self, request: Request) -> None:
        if request.status is Status.WAITING:
            request.num_cached_tokens = request.num_computed
            self._total_cached_tokens += request.num_computed
            self._total_lookup_tokens += request.num_prompt

    def _item(self, request: Request, n: int) -> StepItem:
        """The next ``n`` tokens of a request. A row held by a static batch repeats its last token, for nothing."""
        start, end, params = request.num_computed, request.num_computed + n, request.params
        targets = request.token_ids[start + 1 : min(end + 1, request.num_prompt)]
        return StepItem(
            request_id=request.id,
            index=request.index,
            start=start,
            token_ids=tuple(request.token_ids[start:end]),
            block_table=tuple(request.block_table),
            num_samples=request.num_samples if end == len(request.token_ids) else 0,
            params=params,
            seed=request.seed,
            num_prompt=request.num_prompt,
            stop_ids=request.stop_ids,
            history=tuple(request.token_ids[:end]) if params.uses_history else (),
            prompt_targets=tuple(targets) if params.prompt_logprobs is not None else (),
            discard=request.finish_reason is not None,
        )

    def _padding(self, request: Request, total: int) -> int:
        """Padding that the policy wants, as far as the request would still fit an empty cache."""
        spare = self.capacity.num_blocks - total + self.kv.blocks_for(request.max_len)
        room = min(spare * self.kv.block_size, self.capacity.max_model_len) - request.num_prompt
        return min(self.policy.padding(request), max(0, room))

    def _padding_item(self, request: Request, padding: int) -> StepItem:
        """Rows after the prompt, at positions that real tokens will overwrite before anybody reads them."""
        return StepItem(
            request_id=request.id,
            index=request.index,
            start=request.num_prompt,
            token_ids=(request.token_ids[-1],) * padding,
            block_table=tuple(request.block_table),
            num_samples=0,
            params=request.params,
            seed=request.seed,
            num_prompt=request.num_prompt,
            discard=True,
        )

    # -- commit

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Takes a step's result; returns the news of every sequence that gained tokens or ended."""
        outputs: list[Output] = []
        for i, item in enumerate(plan.items):
            request = self.running.get((item.request_id, item.index))
            if item.discard or request is None:  # padding, or ended while the step ran
                continue
            prompt_logprobs = self._new_prompt_logprobs(request, item, result, i)
            if any(entry.token_id == BAD_LOGITS for entry in prompt_logprobs):
                outputs += self._end(request, FinishReason.ERROR, _BAD_LOGITS)
                continue
            self.kv.commit(request, len(item.token_ids))
            if item.num_samples:
                outputs += self._sampled(request, result.tokens[i], result.logprobs[i], prompt_logprobs)
            elif prompt_logprobs:
                outputs.append(Output(request.id, request.index, prompt_logprobs=prompt_logprobs))
        if self.policy.holds and all(request.finish_reason for request in self.running.values()):
            outputs += [output for request in list(self.running.values()) for output in self._retire(request)]
        self._last_tokens, self._last_seconds = plan.num_tokens, result.seconds
        self._run_check()
        return outputs

    def _new_prompt_logprobs(
        self, request: Request, item: StepItem, result: StepResult, i: int
    ) -> tuple[TokenLogprob, ...]:
        """Those not given out before: a preempted request computes its prompt again."""
        if not item.prompt_targets:
            return ()
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
        sequences = [request, *(self._fork(request, k) for k in range(1, len(tokens)))]
        request.num_samples = 1
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

    def _fork(self, parent: Request, k: int) -> Request:
        child = Request(
            id=parent.id,
            index=parent.index + k,
            token_ids=list(parent.token_ids),
            num_prompt=parent.num_prompt,
            params=parent.params,
            seed=parent.seed,
            stop_ids=parent.stop_ids,
            max_len=parent.max_len,
            tenant=parent.tenant,
            priority=parent.priority,
            arrival=parent.arrival,
            status=Status.RUNNING,
            num_cached_tokens=parent.num_cached_tokens,
            num_prompt_logprobs=parent.num_prompt_logprobs,
        )
        self.kv.fork(parent, child)
        self._live[child.id][child.index] = child
        self.running[child.key] = child
        return child

    def _finish_if_done(self, request: Request, token: int, news: Output) -> list[Output]:
        if token in request.stop_ids:
            request.finish_reason = FinishReason.STOP
        elif len(request.token_ids) >= request.max_len:
            request.finish_reason = FinishReason.LENGTH
        if request.finish_reason is None or self.policy.holds:
            return [news]
        return self._retire(request, news)

    # -- ends

    def _retire(self, request: Request, news: Output | None = None) -> list[Output]:
        """A request that came to its own end leaves; its last news, if given, carries the reason."""
        reason = request.finish_reason
        assert reason is not None
        news = news or Output(request.id, request.index, num_cached_tokens=request.num_cached_tokens)
        stop = request.token_ids[-1] if reason is FinishReason.STOP else None
        self._forget(request)
        return [replace(news, finish_reason=reason, stop_token_id=stop)]

    def _end(self, request: Request, reason: FinishReason, error: str | None = None) -> list[Output]:
        """Ends a request early, with an output for each of its samples, forked or not."""
        request.finish_reason = reason
        self._forget(request)
        return [Output(request.id, index, finish_reason=reason, error=error) for index in request.samples]

    def _forget(self, request: Request) -> None:
        """Frees all that a request holds, whatever its state."""
        if request.status is Status.RUNNING:
            self.kv.release(request)
            self._leave_running(request)
        else:
            self.waiting.remove(request)
        request.status = Status.FINISHED
        samples = self._live[request.id]
        del samples[request.index]
        if not samples:
            del self._live[request.id]
            self._finished_ids.append(request.id)

    def _leave_running(self, request: Request) -> None:
        del self.running[request.key]
        self._slots_used -= request.num_samples

    # -- what others may know

    def stats(self) -> StepStats:
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
            total_preemptions=self._total_preemptions,
            total_cached_tokens=self._total_cached_tokens,
            total_lookup_tokens=self._total_lookup_tokens,
        )

    def _run_check(self) -> None:
        if not self._check:
            return
        live = [request for samples in self._live.values() for request in samples.values()]
        self.kv.check(live)
        assert len(live) == len(self.running) + len(self.waiting), "a request is in no queue, or in two"
        assert self._slots_used == sum(request.num_samples for request in self.running.values()), "slots miscounted"
        assert self._slots_used <= self.max_num_seqs, "more slots used than there are"


def _require_budget(budget: int, setting: str, value: int) -> None:
    if budget < value:
        raise ConfigError(
            f"--max-num-batched-tokens ({budget}) is less than --{setting} ({value}); "
            f"raise the first to {value} or lower the second to {budget}"
        )
