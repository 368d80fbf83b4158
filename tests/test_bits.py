"""Promise 1 on a real model: scheduling never changes an answer, to the last bit (C1, C2, C3, C10).

The references are each request alone, and for a beam search one that knows no blocks: every beam of every round is a
prompt of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from chairlift.config import EngineConfig
from chairlift.core.clock import WallClock
from chairlift.core.engine import Engine
from chairlift.core.order import make_order
from chairlift.core.pace import MIN_STEPS, Pace, Work
from chairlift.core.plan import Capacity, Output, StepStats
from chairlift.core.policy import make_policy
from chairlift.core.ports import Add, Message, Report
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.core.scheduler import Scheduler, Settings
from chairlift.core.shares import Shares
from chairlift.core.speculation import Speculation
from chairlift.models import load_checkpoint
from chairlift.models.spec import Checkpoint
from chairlift.runners.native import NativeRunner

MAX_LEN = 512
Answer = tuple[tuple[int, ...], tuple[tuple[float, int, tuple[tuple[int, float], ...]], ...]]
Answers = dict[tuple[str, int], Answer]


@dataclass(frozen=True)
class Setting:
    """One way to schedule the same requests."""

    policy: str = "chunked"
    budget: int = 512
    seqs: int = 64
    num_blocks: int | None = None  # None: as many as the runner has
    cache: bool = True
    runner: str = "two threads"
    admission: str = "optimistic"
    order: str = "fcfs"
    fair: bool = False
    mode: str = "recompute"
    depth: int = 1
    drafts: int = 0  # most of a sequence in a step, tried whenever there are any
    at_once: int = 1000  # requests that come at a time


class Mailbox:
    """Gives the engine some requests each time it asks, and keeps what comes back."""

    def __init__(self, requests: Sequence[Request], at_once: int) -> None:
        self.requests = list(requests)
        self.at_once = at_once
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[tuple[float, int, tuple[tuple[int, float], ...]]]] = {}
        self.outputs: list[Output] = []

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        taken, self.requests = self.requests[: self.at_once], self.requests[self.at_once :]
        return [Add(request) for request in taken]

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        for output in outputs:
            assert output.error is None, output.error
            key = (output.request_id, output.index)
            self.tokens.setdefault(key, []).extend(output.new_token_ids)
            entries = [(entry.logprob, entry.rank, entry.top) for entry in output.logprobs]
            self.logprobs.setdefault(key, []).extend(entries)
            self.outputs.append(output)

    def answer(self, report: Report) -> None:
        raise AssertionError("nobody asked")

    def answers(self) -> Answers:
        return {key: (tuple(self.tokens[key]), tuple(self.logprobs[key])) for key in self.tokens}


class Bold(Speculation):
    """Takes every draft for one that pays."""

    def __init__(self, scheduler: Scheduler) -> None:
        pace = Pace()
        for _ in range(MIN_STEPS):
            pace.learn(Work(1, 1), 1.0)
        super().__init__(scheduler.settings, scheduler.boarding, pace)
        pace.seconds = lambda work: 1.0  # type: ignore[method-assign]


RUNNERS = {
    "one thread": {"threads": 1},
    "two threads": {"swap_space": 0.05},
    "disk": {"kv_cache_memory": "32MiB", "disk_swap": "swap,0.05"},
    "asynchronous": {"async_scheduling": True, "swap_space": 0.05},
    "int8": {"kv_cache_dtype": "int8", "swap_space": 0.05},
}
"""What the runners differ in."""


@dataclass
class Bench:
    """Started runners, and the answers to the requests alone, by type of KV cache."""

    checkpoint: Checkpoint
    folder: Path
    runners: dict[str, tuple[NativeRunner, Capacity]] = field(default_factory=dict)
    alone: dict[str, Answers] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.checkpoint.spec.vocab_size

    def runner(self, name: str) -> tuple[NativeRunner, Capacity]:
        if name not in self.runners:
            settings = {"threads": 2, "kv_cache_memory": "400MiB"} | RUNNERS[name]
            if "disk_swap" in settings:
                settings["disk_swap"] = f"{self.folder}/{settings['disk_swap']}"
            config = EngineConfig(max_model_len=MAX_LEN, max_num_seqs=64, max_num_batched_tokens=MAX_LEN, **settings)
            runner = NativeRunner(self.checkpoint, config)
            self.runners[name] = (runner, runner.start())
        return self.runners[name]

    def run(self, requests: list[Request], setting: Setting) -> tuple[Mailbox, StepStats]:
        runner, capacity = self.runner(setting.runner)
        if setting.num_blocks is not None:
            capacity = replace(capacity, num_blocks=setting.num_blocks)
        scheduler = Scheduler(
            capacity,
            make_policy(setting.policy, admission=setting.admission, order=make_order(setting.order)),
            Settings(
                max_num_seqs=setting.seqs,
                max_num_batched_tokens=setting.budget,
                enable_prefix_caching=setting.cache,
                preemption_mode=setting.mode,
                num_speculative_tokens=setting.drafts,
                check=True,
            ),
            shares=Shares() if setting.fair else None,
        )
        if setting.drafts:
            scheduler.speculation = scheduler.planner._speculation = Bold(scheduler)
        mailbox = Mailbox(requests, setting.at_once)
        engine = Engine(scheduler, runner, mailbox, mailbox, WallClock(), depth=setting.depth)
        while engine.step():
            pass
        assert scheduler.kv.pool.num_free == capacity.num_blocks, "blocks leaked"
        return mailbox, scheduler.stats()

    def answers_alone(self, runner: str) -> Answers:
        if runner not in self.alone:
            answers: Answers = {}
            for request in requests_of(self.vocab_size):
                answers |= self.run([request], Setting(cache=False, runner=runner))[0].answers()
            self.alone[runner] = answers
        return self.alone[runner]


def requests_of(vocab_size: int) -> list[Request]:
    """64 requests: greedy and sampled, with every kind of parameter, n of 1 and 3, short, long, shared beginnings, some
    of which say the same over and over."""
    rng = random.Random(2024)
    shared = [rng.randrange(vocab_size) for _ in range(90)]
    requests = []
    for i in range(64):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice((1, 3, 15, 16, 17, 40, 70)))]
        if i % 4 == 0:
            prompt = shared[: rng.choice((32, 64, 90))] + prompt
        if i % 4 == 1:
            prompt = 4 * prompt[:15]
        params = SamplingParams(
            n=3 if i % 8 == 3 else 1,
            max_tokens=rng.randint(1, 14),
            temperature=0.0 if i % 2 == 0 else rng.choice((0.5, 0.8, 1.0, 1.5)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            min_p=rng.choice((0.0, 0.02)),
            seed=i,
            logprobs=rng.choice((0, 5)),
            repetition_penalty=1.0 if i % 4 == 1 else rng.choice((1.0, 1.2)),
            frequency_penalty=0.0 if i % 4 == 1 else rng.choice((0.0, 0.5)),
            ignore_eos=True,
        )
        request = Request(
            id=f"r{i}", token_ids=prompt, num_prompt=len(prompt), params=params, seed=i, num_samples=params.n
        )
        request.priority, request.tenant = (5, "a") if i < 40 else (i % 3, "b")
        requests.append(request)
    return requests


@pytest.fixture(scope="module")
def bench(smollm2_path: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(load_checkpoint(str(smollm2_path)), tmp_path_factory.mktemp("disk"))
    yield made
    for runner, _ in made.runners.values():
        runner.close()


SETTINGS = {
    "static": Setting(policy="static"),
    "continuous": Setting(policy="continuous"),
    "chunked, 512": Setting(),
    "chunked, 64": Setting(budget=64),
    "chunked, 16": Setting(budget=16, seqs=16),
    "no prefix cache": Setting(cache=False),
    "reserve": Setting(admission="reserve", num_blocks=60),
    "peak": Setting(admission="peak", num_blocks=40),
    "one thread": Setting(runner="one thread"),
    "one thread, chunked, 16": Setting(runner="one thread", budget=16, seqs=16, cache=False),
    "preempted": Setting(num_blocks=24),
    "preempted, continuous": Setting(policy="continuous", num_blocks=24),
    "preempted, no prefix cache": Setting(num_blocks=24, budget=64, cache=False),
    "preempted, one thread": Setting(runner="one thread", num_blocks=24, budget=64),
    "swapped": Setting(num_blocks=24, mode="swap"),
    "swapped, no prefix cache": Setting(num_blocks=24, budget=64, mode="swap", cache=False),
    "swapped to disk": Setting(runner="disk", num_blocks=24, mode="swap"),
    "swapped to disk, no prefix cache": Setting(runner="disk", num_blocks=24, mode="swap", cache=False),
    "asynchronous": Setting(runner="asynchronous", depth=2),
    "asynchronous, static": Setting(runner="asynchronous", depth=2, policy="static"),
    "asynchronous, preempted": Setting(runner="asynchronous", depth=2, num_blocks=24, budget=64),
    "asynchronous, swapped": Setting(runner="asynchronous", depth=2, num_blocks=24, mode="swap"),
    "int8": Setting(runner="int8", budget=64),
    "int8, preempted": Setting(runner="int8", num_blocks=24),
    "int8, swapped": Setting(runner="int8", num_blocks=24, budget=64, mode="swap"),
    "drafts": Setting(drafts=5),
    "drafts, one thread, no prefix cache": Setting(runner="one thread", drafts=2, cache=False),
    "drafts, preempted": Setting(num_blocks=24, budget=64, drafts=5),
    "drafts, swapped": Setting(num_blocks=24, mode="swap", drafts=7),
    "drafts, continuous, reserve": Setting(policy="continuous", admission="reserve", num_blocks=60, drafts=3),
    "drafts, int8": Setting(runner="int8", budget=64, drafts=5),
    "priorities, preempted": Setting(order="priority", seqs=8, at_once=2),
    "fair, preempted": Setting(fair=True, seqs=8, at_once=8),
    "all together, preempted": Setting(
        runner="asynchronous", depth=2, order="priority", fair=True, seqs=8, at_once=4, num_blocks=24, budget=64
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_same_bits_as_alone(bench: Bench, name: str) -> None:
    setting = SETTINGS[name]
    mailbox, stats = bench.run(requests_of(bench.vocab_size), setting)
    answers, alone = mailbox.answers(), bench.answers_alone("int8" if setting.runner == "int8" else "two threads")
    assert answers.keys() == alone.keys()
    for key, answer in answers.items():
        assert answer == alone[key], f"{key} differs from what it is alone"
    if "preempted" in name:
        assert stats.total_preemptions > 0, "this setting is meant to preempt"
    if "swapped" in name:
        assert stats.total_swaps > 0, "this setting is meant to swap"
    if setting.drafts:
        assert 10 <= stats.total_accepted_drafts < stats.total_drafts, "drafts are to be right, and wrong"
    if setting.cache and setting.policy != "static":
        assert stats.total_cached_tokens > 0, "the shared beginnings were never found in the cache"


def test_alone_answers_are_worth_comparing(bench: Bench) -> None:
    """The references themselves: every sample has its tokens and logprobs, and samples of one request differ."""
    alone, int8 = bench.answers_alone("two threads"), bench.answers_alone("int8")
    assert len(alone) == 64 + 2 * 8
    for request in requests_of(bench.vocab_size):
        samples = [alone[request.id, k] for k in range(request.num_samples)]
        assert all(len(tokens) == request.params.max_tokens == len(logprobs) for tokens, logprobs in samples)
    sampled = [alone["r3", k][0] for k in range(3)]
    assert len(set(sampled)) > 1
    assert alone != int8, "the type of the KV cache changes nothing"


# -- the prefix cache over a restart


def test_the_disk_keeps_the_prefix_cache_over_a_restart(bench: Bench, tmp_path: Path) -> None:
    """A new runner on the same file finds what the one before computed, and answers with the same bits."""
    prompt = [7 * i % 4000 for i in range(200)]
    params = SamplingParams(max_tokens=5, temperature=0.0, logprobs=3)
    config = EngineConfig(max_model_len=MAX_LEN, threads=2, kv_cache_memory="20MiB", disk_swap=f"{tmp_path}/kv,0.05")

    def run() -> tuple[Answers, StepStats]:
        runner = NativeRunner(bench.checkpoint, config)
        capacity = runner.start()
        assert runner.disk is not None
        scheduler = Scheduler(
            capacity,
            make_policy("chunked"),
            Settings(max_num_seqs=4, max_num_batched_tokens=512, check=True),
            secret=runner.disk.secret,
            disk_contents=runner.disk.contents(),
        )
        mailbox = Mailbox([Request(id="a", token_ids=list(prompt), num_prompt=200, params=params, seed=0)], 1)
        engine = Engine(scheduler, runner, mailbox, mailbox, WallClock())
        while engine.step():
            pass
        engine.close()
        return mailbox.answers(), scheduler.stats()

    cold, stats = run()
    assert stats.total_cached_tokens == 0
    warm, stats = run()
    assert stats.total_cached_tokens == 192 and warm == cold
    data = bytearray((tmp_path / "kv").read_bytes())
    for at in range(100_000, len(data), 1000):  # past the table of what is where
        data[at] ^= 0x40
    (tmp_path / "kv").write_bytes(data)
    damaged, stats = run()
    assert damaged == cold and stats.total_recomputed_tokens == 192, "it trusted what was damaged, or never read it"


# -- beam search


def search_by_brute_force(bench: Bench, request: Request, stop_ids: frozenset[int]) -> list[tuple[float, list[int]]]:
    """The best texts with their logprobs; every beam of every round is computed from its first token on."""
    params = request.params
    most = params.max_tokens or 0
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        grown = []
        for total, tokens in beams:
            prompt = request.token_ids[: request.num_prompt] + tokens
            step = SamplingParams(max_tokens=1, temperature=0.0, logprobs=2 * params.width, ignore_eos=True)
            alone = Request(id="alone", token_ids=prompt, num_prompt=len(prompt), params=step, seed=0)
            (_, ((_, _, best),)) = bench.run([alone], Setting(cache=False))[0].answers()["alone", 0]
            for token, logprob in best:
                (ended if token in stop_ids or length == most else grown).append((total + logprob, [*tokens, token]))
        beams = sorted(grown, key=lambda beam: -beam[0])[: params.width]
    ended.sort(key=lambda end: -(end[0] / len(end[1]) ** params.length_penalty))
    return ended[: params.n]


BEAMS = {
    "alone": Setting(),
    "preempting others": Setting(num_blocks=24, budget=64),
    "asynchronous": Setting(runner="asynchronous", depth=2),
    "swapping others": Setting(num_blocks=24, mode="swap"),
}


@pytest.mark.parametrize("name", BEAMS)
def test_beam_search_finds_what_brute_force_finds(bench: Bench, name: str) -> None:
    stop_ids = frozenset((198, 30))
    params = SamplingParams(
        n=3, best_of=4, use_beam_search=True, temperature=0.0, max_tokens=8, length_penalty=0.7, logprobs=None
    )
    prompt = [504, 3575, 282, 4649, 314]
    request = Request(
        id="beams",
        token_ids=prompt,
        num_prompt=len(prompt),
        params=params,
        seed=0,
        stop_ids=stop_ids,
        num_samples=params.width,
    )
    wanted = search_by_brute_force(bench, request, stop_ids)
    others = [] if name == "alone" else requests_of(bench.vocab_size)[:20]
    mailbox, _ = bench.run([*others[:10], request, *others[10:]], BEAMS[name])
    found = [output for output in mailbox.outputs if output.request_id == "beams"]
    assert [output.index for output in found] == [0, 1, 2]
    assert [(output.cumulative_logprob, list(output.new_token_ids)) for output in found] == wanted
    reasons = {FinishReason.STOP if tokens[-1] in stop_ids else FinishReason.LENGTH for _, tokens in wanted}
    assert {output.finish_reason for output in found} == reasons
