"""Scheduling never changes an answer: thousands of random workloads, each under several random configurations.

The reference is each request run alone in a large pool. All that a client can see must be equal to it, whatever the
policy, order, chunk budget, prefix cache, admission gate, pool size, places to swap to, windows, steps in flight and
company, and whatever fails meanwhile; see `chairlift.sim.shadow` for what is checked within each step. After a failure,
replay its seed with ``python tests/core/test_invariance.py SEED``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from chairlift.core.clock import VirtualClock
from chairlift.core.engine import Engine
from chairlift.core.order import make_order
from chairlift.core.plan import (
    BlockOp,
    BlockOpKind,
    Capacity,
    Output,
    StepPlan,
    StepRecord,
    StepResult,
    StepStats,
    TokenLogprob,
)
from chairlift.core.policy import make_policy
from chairlift.core.ports import Abort, Add, Message, Report
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.core.scheduler import Scheduler, Settings
from chairlift.core.shares import Shares
from chairlift.server.journal import Entry
from chairlift.sim.shadow import ShadowExecutor

NUM_WORKLOADS = 2000
CONFIGS_EACH = 3
MOST_ENDS = 6  # of engines in a run: a beam search begins anew after each
ORDERS = ("fcfs", "priority", "shortest-prefill", "longest-prefix", "deadline")
WINDOWS = ((0,), (5,), (0, 3, 3), (0, 8, 1))
Key = tuple[str, int]


# -- what is drawn


@dataclass(frozen=True)
class Job:
    """A request, as data: `Request` objects change while they run."""

    id: str
    step: int  # arrives before this step of the engine
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    tenant: str
    priority: int

    def request(self) -> Request:
        return Request(
            id=self.id,
            token_ids=list(self.prompt),
            num_prompt=len(self.prompt),
            params=self.params,
            seed=self.seed,
            stop_ids=self.stop_ids,
            num_samples=self.params.width,
            tenant=self.tenant,
            priority=self.priority,
        )

    @property
    def sequences(self) -> list[Key]:
        return [(self.id, index) for index in range(self.params.n)]


@dataclass(frozen=True)
class Cancel:
    """An abort before a step of the engine, or while that step is in flight."""

    step: int
    id: str
    index: int | None
    in_flight: bool


@dataclass(frozen=True)
class Workload:
    block_size: int
    max_model_len: int
    vocab_size: int
    stop_rate: float
    jobs: tuple[Job, ...]
    cancels: tuple[Cancel, ...]
    windows: tuple[int, ...] = (0,)

    def max_len(self, job: Job) -> int:
        return min(self.max_model_len, len(job.prompt) + (job.params.max_tokens or self.max_model_len))

    def blocks(self, job: Job, reserve: bool) -> int:
        """The smallest pool in which a job can run, counted from first principles (without windows: more is held)."""
        whole = -(-self.max_len(job) // self.block_size)
        samples = job.params.width
        if not reserve and not job.params.use_beam_search:
            return whole * len(self.windows)
        shared, rest = divmod(len(job.prompt), self.block_size)
        return (shared + samples * (whole - shared) + (samples > 1 and rest > 0)) * len(self.windows)


@dataclass(frozen=True)
class Config:
    policy: str
    admission: str
    caching: bool
    max_num_seqs: int
    budget: int
    num_blocks: int
    order: str = "fcfs"
    fair: bool = False
    host_blocks: int = 0
    disk_blocks: int = 0
    mode: str = "auto"
    depth: int = 1
    max_preemptions: int = 3
    drafts: int = 0  # most of a sequence in a step
    failing: float = 0.0  # of the steps
    damaged: float = 0.0  # of the blocks swapped in
    ending: float = 0.0  # how often an engine ends, and another one goes on

    @property
    def reserves(self) -> bool:
        return self.policy == "static" or self.admission in ("reserve", "peak")

    @property
    def is_plain(self) -> bool:
        """Nobody makes room for another, and nothing goes wrong."""
        troubled = self.failing or self.damaged or self.ending
        return self.order != "priority" and not self.fair and not troubled


def draw_workload(rng: Random) -> Workload:
    block_size = rng.choice((1, 2, 3, 4, 4, 8))
    max_model_len = rng.choice((16, 32, 48))
    vocab_size = rng.choice((4, 50))
    base = [rng.randrange(vocab_size) for _ in range(max_model_len)]
    jobs = tuple(draw_job(rng, i, base, max_model_len, vocab_size) for i in range(rng.randint(2, 6)))
    cancels = tuple(
        Cancel(
            step=job.step + rng.randint(0, 12),
            id=job.id,
            index=rng.choice((None, rng.randrange(job.params.n))),
            in_flight=rng.random() < 0.3,
        )
        for job in (*jobs, *jobs)
        if rng.random() < 0.15
    )
    windows = (0,) if rng.random() < 0.5 else rng.choice(WINDOWS)
    return Workload(block_size, max_model_len, vocab_size, rng.choice((0.0, 0.1)), jobs, cancels, windows)


def draw_job(rng: Random, i: int, base: Sequence[int], max_model_len: int, vocab_size: int) -> Job:
    """Most prompts begin like ``base``, for a random length."""
    length = rng.randint(1, max_model_len - 1) if rng.random() < 0.8 else rng.randint(1, 4)
    shared = rng.choice((0, length, rng.randint(0, length)))
    prompt = (*base[:shared], *(rng.randrange(vocab_size) for _ in range(length - shared)))
    max_tokens = rng.choice((None, 1, *(rng.randint(1, 12) for _ in range(6))))
    params = draw_beams(rng, max_tokens) if rng.random() < 0.1 else draw_sampling(rng, max_tokens)
    stop_ids = frozenset(rng.choice(((), (0,), (0, 2))))
    return Job(
        id=f"r{i}",
        step=rng.choice((0, rng.randint(0, 5), rng.randint(0, 20))),
        prompt=prompt,
        params=params,
        seed=rng.randrange(2**32),
        stop_ids=stop_ids,
        tenant=rng.choice(("", "", "", "b")),
        priority=rng.choice((0, 0, 1, -1)),
    )


def draw_beams(rng: Random, max_tokens: int | None) -> SamplingParams:
    best_of = rng.choice((2, 3))
    return SamplingParams(
        n=rng.randint(1, best_of),
        best_of=best_of,
        use_beam_search=True,
        max_tokens=max_tokens,
        temperature=0.0,
        length_penalty=rng.choice((0.0, 1.0)),
    )


def draw_sampling(rng: Random, max_tokens: int | None) -> SamplingParams:
    return SamplingParams(
        n=rng.choice((1, 1, 3)),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, min(3, max_tokens or 3)),
        temperature=rng.choice((0.0, 1.0, 1.0)),
        logprobs=rng.choice((None, None, 0, 2)),
        prompt_logprobs=1 if rng.random() < 0.15 else None,
        presence_penalty=1.0 if rng.random() < 0.2 else 0.0,
    )


def draw_config(rng: Random, workload: Workload) -> Config:
    """Small budgets and pools are the interesting ones. Now and then one in which a request cannot fit."""
    policy = rng.choice(("static", "continuous", "chunked", "chunked"))
    admission = rng.choice(("optimistic", "optimistic", "optimistic", "reserve", "peak"))
    max_num_seqs = rng.choice((3, 4, 8))
    if policy == "chunked":
        budget = max(max_num_seqs, rng.choice((1, 5, 8, 16, 64)))
    else:
        budget = workload.max_model_len + rng.choice((0, 5, 200))
    reserve = policy == "static" or admission in ("reserve", "peak")
    tight = max(workload.blocks(job, reserve) for job in workload.jobs)
    spare = rng.choice((0, 0, 1, 2, tight // 2, tight, 3 * tight))
    num_blocks = tight + spare if rng.random() < 0.95 else max(1, tight - 1)
    caching = rng.random() < 0.6
    swaps = rng.random() < 0.5
    config = Config(
        policy,
        admission,
        caching,
        max_num_seqs,
        budget,
        num_blocks,
        order=rng.choice(ORDERS) if policy != "static" else "fcfs",
        fair=policy != "static" and rng.random() < 0.3,
        host_blocks=rng.choice((0, 1, 3, tight, 3 * tight)) if swaps else 0,
        disk_blocks=rng.choice((0, 0, 1, tight)) if swaps else 0,
        mode=rng.choice(("auto", "swap", "swap", "recompute")),
        depth=rng.choice((1, 2)),
        max_preemptions=rng.choice((0, 1, 3, 3, 100)),
        failing=rng.choice((0.0, 0.0, 0.0, 0.05)),
        damaged=rng.choice((0.0, 0.3)),
    )
    drafts = rng.choice((0, 0, 2, 5))
    if policy != "static" and admission != "peak" and config.depth == 1:
        config = replace(config, drafts=drafts)
    return replace(config, ending=rng.choice((0.0, 0.0, 0.0, 0.1)))


# -- one run


@dataclass
class News:
    """All that a client hears of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached: int = 0
    cumulative_logprob: float | None = None
    is_search: bool = False


class Client:
    """Source and sink of the engine. Time is the number of times the source was asked."""

    scheduler: Scheduler
    executor: ShadowExecutor

    def __init__(self, jobs: Sequence[Job], cancels: Sequence[Cancel]) -> None:
        events: list[tuple[int, Message]] = [(job.step, Add(job.request())) for job in jobs]
        events += [(cancel.step, Abort(cancel.id, cancel.index)) for cancel in cancels if not cancel.in_flight]
        self.events = sorted(events, key=lambda event: event[0])
        self.cancels = [cancel for cancel in cancels if cancel.in_flight]
        self.news: dict[Key, News] = {
            key: News(is_search=job.params.use_beam_search) for job in jobs for key in job.sequences
        }
        self.doomed: set[Key] = set()  # aborted while they lived
        self.journal: dict[str, Entry] = {}
        self._jobs = {job.id: job for job in jobs}
        self.coverage: Counter[str] = Counter()
        self.now = 0

    def take(self, idle: bool, until: float | None = None) -> list[Message]:
        if idle and self.events:
            self.now = max(self.now, self.events[0][0])
        due = [message for step, message in self.events if step <= self.now]
        self.events = self.events[len(due) :]
        self.now += 1
        for message in due:
            if isinstance(message, Add):
                self.journal[message.request.id] = Entry(self._jobs[message.request.id].request())
                self.executor.expect(message.request)
            else:
                self.note_abort(message)
        return due

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        for output in outputs:
            news = self.news[output.request_id, output.index]
            self.journal[output.request_id].feed(output)
            assert news.reason is None, f"{output} after the end"
            assert output.new_token_ids or output.prompt_logprobs or output.finish_reason, "an output without news"
            news.tokens += output.new_token_ids
            news.logprobs += output.logprobs
            news.prompt_logprobs += output.prompt_logprobs
            news.reason = output.finish_reason
            news.stop_token_id = output.stop_token_id
            news.error = output.error
            news.cumulative_logprob = output.cumulative_logprob
            news.num_cached = max(news.num_cached, output.num_cached_tokens)

    def answer(self, report: Report) -> None:
        raise AssertionError("nobody asked")

    def note_abort(self, abort: Abort) -> None:
        beams = {key[0] for key, news in self.news.items() if news.is_search}
        if abort.request_id in beams and abort.index is not None:
            return  # of a search nothing ends alone
        arrived = not any(isinstance(event, Add) and event.request.id == abort.request_id for _, event in self.events)
        for key, news in self.news.items():
            if arrived and key[0] == abort.request_id and abort.index in (None, key[1]) and news.reason is None:
                self.doomed.add(key)
        for request in [*self.scheduler.waiting, *self.scheduler.running.values()]:
            samples = range(request.index, request.index + request.num_samples)
            if request.id == abort.request_id and (abort.index is None or abort.index in samples):
                self.coverage[f"abort {request.status.name}"] += 1
                self.coverage["abort between chunks"] += 0 < request.num_computed < request.num_prompt
                self.coverage["abort of one sample before the fork"] += abort.index is not None and len(samples) > 1
                self.coverage["abort of a held row"] += request.finish_reason is not None


class Interrupted(ShadowExecutor):
    """Aborts requests while a step is in flight, and lets steps fail and swapped blocks be damaged."""

    client: Client
    scheduler: Scheduler
    config: Config
    rng: Random

    def fails(self, plan: StepPlan) -> bool:
        return self.rng.random() < self.config.failing

    def damages(self, op: BlockOp) -> bool:
        return self.rng.random() < self.config.damaged

    def result(self, handle: StepResult | StepPlan) -> StepResult:
        for cancel in [cancel for cancel in self.client.cancels if cancel.step < self.client.now]:
            self.client.cancels.remove(cancel)
            self.client.note_abort(Abort(cancel.id, cancel.index))
            outputs = self.scheduler.abort(cancel.id, cancel.index)
            self.client.coverage["abort in flight"] += bool(outputs)
            self.client.put(outputs, self.scheduler.stats())
        result = super().result(handle)
        return replace(result, seconds=1.0) if self.config.drafts else result  # so a row costs nothing, and drafts pay


def run(
    workload: Workload, config: Config, jobs: Sequence[Job], cancels: Sequence[Cancel] = ()
) -> tuple[dict[Key, News], Counter[str]]:
    """Runs jobs to their ends; returns what their clients heard, and what happened on the way."""
    capacity = Capacity(
        config.num_blocks,
        workload.block_size,
        workload.max_model_len,
        config.host_blocks,
        config.disk_blocks,
        workload.windows,
    )
    client = Client(jobs, cancels)
    coverage, clock, rng = client.coverage, VirtualClock(), Random(len(jobs))
    finished_ids: list[str] = []

    def record(step: StepRecord) -> None:
        assert step.plan.num_tokens <= config.budget
        finished_ids.extend(step.plan.finished_ids)
        for op in step.plan.block_ops:
            coverage[{BlockOpKind.COPY: "copies"}.get(op.kind, op.kind.name)] += 1
        coverage["damaged blocks"] += len(step.result.damaged)
        for item in step.plan.items:
            coverage["forks"] += item.num_samples > 1
            coverage["chunks"] += item.num_samples == 0 and not item.discard
            coverage["padding"] += item.discard and item.num_samples == 0
            coverage["held rows"] += item.discard and item.num_samples > 0

    def begin() -> Engine:
        """An engine that goes on with what is open."""
        executor = Interrupted(capacity, vocab_size=workload.vocab_size, stop_rate=workload.stop_rate)
        scheduler = Scheduler(
            capacity,
            make_policy(config.policy, admission=config.admission, order=make_order(config.order)),
            Settings(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.budget,
                enable_prefix_caching=config.caching,
                preemption_mode=config.mode,
                max_preemptions=config.max_preemptions,
                num_speculative_tokens=config.drafts,
                check=True,
            ),
            shares=Shares() if config.fair else None,
        )
        executor.config, executor.rng, executor.client, executor.scheduler = config, rng, client, scheduler
        client.executor, client.scheduler = executor, scheduler
        finished_ids.clear()
        for id, index in client.doomed:  # an end of one sample may have waited for the fork
            if client.news[id, index].reason is None:
                client.put([Output(id, index, finish_reason=FinishReason.ABORT)], scheduler.stats())
        for entry in client.journal.values():
            for request in entry.requests():
                executor.expect(request)
                client.put(scheduler.add(request), scheduler.stats())
                coverage["resumed sequences"] += request.num_output > 0
        return Engine(scheduler, executor, client, client, clock, record, depth=config.depth)

    def end() -> None:
        stats = client.scheduler.stats()
        coverage["preemptions"] += stats.total_preemptions
        coverage["swaps"] += stats.total_swaps
        coverage["drafts"] += stats.total_drafts
        coverage["accepted drafts"] += stats.total_accepted_drafts

    engine = begin()
    steps = ends = 0
    while engine.step() or client.events:
        steps += 1
        assert steps <= most_steps(workload, config, jobs, cancels), "no progress"
        assert len(set(finished_ids)) == len(finished_ids), "an end told twice to the runner"
        if rng.random() < config.ending and ends < MOST_ENDS:
            end()
            engine = begin()
            ends += 1
    end()
    scheduler = client.scheduler
    assert not scheduler.sequences.by_id and scheduler.boarding.slots_used == 0 and scheduler.waiting.num_preempted == 0
    assert scheduler.kv.reserved == 0 and scheduler.kv.pool.num_free == config.num_blocks, "leaked"
    assert all(tier.pool.num_free == tier.pool.num_blocks for tier in scheduler.kv.tiers), "leaked where it swaps to"
    scheduler.kv.check([])
    for key in client.doomed:
        assert client.news[key].reason in (FinishReason.ABORT, FinishReason.ERROR), f"{key} was aborted and went on"
    return client.news, coverage


def most_steps(workload: Workload, config: Config, jobs: Sequence[Job], cancels: Sequence[Cancel]) -> int:
    """A bound that no schedule may pass, since each step either gives somebody a token, or is a chunk of a prompt that
    runs alone, which is never preempted. Between two tokens there are at most as many such chunks as make the longest
    sequence; an abort may waste as many again, and a step in flight. With two steps in flight every other one may find
    nobody who can run; whoever makes room for another, and whatever fails, is computed again."""
    tokens = sum(job.params.width * (workload.max_len(job) - len(job.prompt)) for job in jobs)
    chunks = -(-workload.max_model_len // config.budget)
    bound = ((tokens + 2 * len(cancels)) * chunks + len(cancels)) * config.depth
    return bound if config.is_plain else (10 if config.failing or config.ending else 3) * bound + 100


def check_workload(seed: int) -> Counter[str]:
    """Draws the workload of a seed, runs it under its configurations, and compares. Returns what happened, counted."""
    rng = Random(seed)
    workload = draw_workload(rng)
    expected: dict[Key, News] = {}
    for job in workload.jobs:
        large = Config("chunked", "optimistic", False, job.params.width, 1000, workload.blocks(job, True))
        expected |= run(workload, large, [job])[0]
        for key in job.sequences:
            check_end(workload, job, expected[key])
    total: Counter[str] = Counter()
    for _ in range(CONFIGS_EACH):
        config = draw_config(rng, workload)
        news, coverage = run(workload, config, workload.jobs, workload.cancels)
        compare(workload, config, news, expected)
        if config.reserves and config.is_plain:
            assert coverage["preemptions"] == 0, f"whoever has its memory for sure is never preempted: {config}"
        coverage |= describe(workload, config, news)
        total.update(coverage)
        for event in ("preemptions", "copies", "hits", "forks"):
            name = config.policy if config.policy == "static" else f"{config.policy} {config.admission}"
            total[f"{name} {event}"] += coverage[event]
    return total


def check_end(workload: Workload, job: Job, got: News) -> None:
    """A request alone comes to the end that its parameters say."""
    if got.is_search and got.reason is FinishReason.ERROR:
        assert got.error and "fewer" in got.error  # than n texts, in a small vocabulary
        return
    stops = [token in job.stop_ids for token in got.tokens]
    assert not any(stops[:-1]) and not any(stops[: job.params.min_tokens])
    if got.reason is FinishReason.STOP:
        assert stops[-1] and got.stop_token_id == got.tokens[-1]
    else:
        assert got.reason is FinishReason.LENGTH and got.stop_token_id is None and not stops[-1]
        assert len(got.tokens) == workload.max_len(job) - len(job.prompt)
    assert (got.cumulative_logprob is not None) == got.is_search
    assert len(got.logprobs) == (0 if job.params.logprobs is None else len(got.tokens))


def compare(workload: Workload, config: Config, news: dict[Key, News], expected: dict[Key, News]) -> None:
    aborted = {(cancel.id, cancel.index) for cancel in workload.cancels}
    for job in workload.jobs:
        fits = job.params.width <= config.max_num_seqs and workload.blocks(job, config.reserves) <= config.num_blocks
        fits = fits and not (job.params.use_beam_search and config.policy == "static")
        for key in job.sequences:
            got, want, context = news[key], expected[key], f"{key} under {config}"
            assert got.num_cached < len(job.prompt)
            if not fits and (got.reason is FinishReason.ERROR or workload.windows == (0,)):
                assert got.reason is FinishReason.ERROR and got.error and not got.tokens, context
            elif config.failing and got.reason is FinishReason.ERROR and "failed" in (got.error or ""):
                assert got.tokens == want.tokens[: len(got.tokens)], context
            elif got.reason is FinishReason.ABORT:
                assert key in aborted or (job.id, None) in aborted, context
                for name in ("tokens", "logprobs", "prompt_logprobs"):
                    part, whole = getattr(got, name), getattr(want, name)
                    assert part == whole[: len(part)], f"{name} of aborted {context}"
            else:
                assert replace(got, num_cached=0) == replace(want, num_cached=0), context


def describe(workload: Workload, config: Config, news: dict[Key, News]) -> Counter[str]:
    """What a run was, for the proof that the campaign reached everything."""
    name = config.policy if config.policy == "static" else f"{config.policy} {config.admission}"
    kinds = Counter({"runs": 1, f"{name}, cache {'on' if config.caching else 'off'}": 1})
    kinds += Counter(
        (f"depth {config.depth}", f"order {config.order}", f"windows {workload.windows}", f"mode {config.mode}")
    )
    kinds["fair"] += config.fair
    kinds["failing"] += config.failing > 0
    for job in workload.jobs:
        kinds[f"{config.policy} n={job.params.width}"] += 1
        kinds["beam searches"] += job.params.use_beam_search
        cached = news[job.id, 0].num_cached
        kinds["hits"] += cached > 0
        if config.policy == "chunked":
            kinds[f"chunk budget {config.budget}"] += 1
            kinds["hit and prompt longer than the chunk budget"] += min(cached, len(job.prompt)) > config.budget
    for got in news.values():
        kinds[f"ended by {got.reason}"] += 1
    return kinds


EVENTS = {
    "hit and prompt longer than the chunk budget": 100,
    "chunks": 1000,
    "padding": 1000,
    "held rows": 1000,
    "copies": 1000,
    "forks": 1000,
    "SWAP_OUT": 2000,
    "SWAP_IN": 300,
    "swaps": 100,
    "damaged blocks": 50,
    "resumed sequences": 500,
    "drafts": 1000,
    "accepted drafts": 300,
    "beam searches": 500,
    "fair": 500,
    "failing": 500,
    **{f"depth {depth}": 1000 for depth in (1, 2)},
    **{f"order {order}": 300 for order in ORDERS},
    **{f"windows {windows}": 300 for windows in WINDOWS},
    **{f"mode {mode}": 1000 for mode in ("auto", "swap", "recompute")},
    "abort WAITING": 50,
    "abort RUNNING": 100,
    "abort PREEMPTED": 10,
    "abort between chunks": 20,
    "abort of one sample before the fork": 20,
    "abort of a held row": 20,
    "abort in flight": 100,
    **{f"ended by {reason}": 50 for reason in FinishReason if reason is not FinishReason.DEADLINE},  # no time passes
    **{f"{policy} n={n}": 500 for policy in ("static", "continuous", "chunked") for n in (1, 3)},
    **{f"chunk budget {budget}": 100 for budget in (3, 4, 5, 8, 16, 64)},
    **{f"{policy} optimistic preemptions": 500 for policy in ("continuous", "chunked")},
    **{
        f"{name}{event}": 50
        for name in ("static", "continuous optimistic", "continuous reserve", "chunked optimistic", "chunked reserve")
        for event in (", cache on", ", cache off", " hits", " copies", " forks")
    },
}
"""What must have happened in the campaign, and how often at least."""


def test_random_workloads() -> None:
    """DESIGN 10.2; C1, C2, C3, C6, C10, M2, M5, M12: equal answers, nobody stuck, nothing leaked."""
    total: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        try:
            total.update(check_workload(seed))
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}\nreplay: python tests/core/test_invariance.py {seed}")
    missing = {event: total[event] for event, least in EVENTS.items() if total[event] < least}
    assert not missing, f"the campaign did not reach enough of: {missing}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(argument, dict(check_workload(int(argument))))
