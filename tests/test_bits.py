"""Promise 1 on a real model: scheduling never changes an answer, to the last bit (C1, C2, C3, C10)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from chairlift.config import EngineConfig
from chairlift.core.clock import WallClock
from chairlift.core.engine import Engine
from chairlift.core.plan import Capacity, Output, StepStats
from chairlift.core.policy import make_policy
from chairlift.core.ports import Add, Message
from chairlift.core.request import Request, SamplingParams
from chairlift.core.scheduler import Scheduler
from chairlift.models import load_checkpoint
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
    threads: int = 2
    admission: str = "optimistic"


class Mailbox:
    """Gives the engine all requests at once and keeps what comes back."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.messages: list[Message] = [Add(request) for request in requests]
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[tuple[float, int, tuple[tuple[int, float], ...]]]] = {}

    def take(self, idle: bool) -> Sequence[Message]:
        taken, self.messages = self.messages, []
        return taken

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        for output in outputs:
            assert output.error is None, output.error
            key = (output.request_id, output.index)
            self.tokens.setdefault(key, []).extend(output.new_token_ids)
            entries = [(entry.logprob, entry.rank, entry.top) for entry in output.logprobs]
            self.logprobs.setdefault(key, []).extend(entries)

    def answers(self) -> Answers:
        return {key: (tuple(self.tokens[key]), tuple(self.logprobs[key])) for key in self.tokens}


class Bench:
    """Started runners, one a thread count, and the requests to put through them."""

    def __init__(self, model: str) -> None:
        checkpoint = load_checkpoint(model)
        self.runners: dict[int, tuple[NativeRunner, Capacity]] = {}
        for threads in (1, 2):
            config = EngineConfig(
                model=model,
                threads=threads,
                max_model_len=MAX_LEN,
                max_num_seqs=64,
                max_num_batched_tokens=MAX_LEN,
                kv_cache_memory="400MiB",
            )
            runner = NativeRunner(checkpoint, config)
            self.runners[threads] = (runner, runner.start())
        self.vocab_size = checkpoint.spec.vocab_size
        self.alone = self._run_alone()

    def run(self, requests: list[Request], setting: Setting) -> tuple[Answers, StepStats]:
        runner, capacity = self.runners[setting.threads]
        if setting.num_blocks is not None:
            capacity = replace(capacity, num_blocks=setting.num_blocks)
        scheduler = Scheduler(
            capacity,
            make_policy(setting.policy, admission=setting.admission),
            max_num_seqs=setting.seqs,
            max_num_batched_tokens=setting.budget,
            enable_prefix_caching=setting.cache,
            check=True,
        )
        mailbox = Mailbox(requests)
        engine = Engine(scheduler, runner, mailbox, mailbox, WallClock())
        while engine.step():
            pass
        assert scheduler.kv.pool.num_free == capacity.num_blocks, "blocks leaked"
        return mailbox.answers(), scheduler.stats()

    def _run_alone(self) -> Answers:
        answers: Answers = {}
        for request in requests_of(self.vocab_size):
            answers |= self.run([request], Setting(cache=False))[0]
        return answers


def requests_of(vocab_size: int) -> list[Request]:
    """64 requests: greedy and sampled, with every kind of parameter, n of 1 and 3, short, long, shared beginnings."""
    rng = random.Random(2024)
    shared = [rng.randrange(vocab_size) for _ in range(90)]
    requests = []
    for i in range(64):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice((1, 3, 15, 16, 17, 40, 70)))]
        if i % 4 == 0:
            prompt = shared[: rng.choice((32, 64, 90))] + prompt
        params = SamplingParams(
            n=3 if i % 8 == 3 else 1,
            max_tokens=rng.randint(1, 14),
            temperature=0.0 if i % 2 == 0 else rng.choice((0.5, 0.8, 1.0, 1.5)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 20)),
            min_p=rng.choice((0.0, 0.02)),
            seed=i,
            logprobs=rng.choice((0, 5)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            frequency_penalty=rng.choice((0.0, 0.5)),
            ignore_eos=True,
        )
        requests.append(
            Request(id=f"r{i}", token_ids=prompt, num_prompt=len(prompt), params=params, seed=i, num_samples=params.n)
        )
    return requests


@pytest.fixture(scope="module")
def bench(smollm2_path: object) -> Iterator[Bench]:
    made = Bench(str(smollm2_path))
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
    "one thread": Setting(threads=1),
    "one thread, chunked, 16": Setting(threads=1, budget=16, seqs=16, cache=False),
    "preempted": Setting(num_blocks=24),
    "preempted, continuous": Setting(policy="continuous", num_blocks=24),
    "preempted, no prefix cache": Setting(num_blocks=24, budget=64, cache=False),
    "preempted, one thread": Setting(num_blocks=24, threads=1, budget=64),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_same_bits_as_alone(bench: Bench, name: str) -> None:
    setting = SETTINGS[name]
    answers, stats = bench.run(requests_of(bench.vocab_size), setting)
    assert answers.keys() == bench.alone.keys()
    for key, answer in answers.items():
        assert answer == bench.alone[key], f"{key} differs from what it is alone"
    if name.startswith("preempted"):
        assert stats.total_preemptions > 0, "this setting is meant to preempt"
    if setting.cache and setting.policy != "static":
        assert stats.total_cached_tokens > 0, "the shared beginnings were never found in the cache"


def test_alone_answers_are_worth_comparing(bench: Bench) -> None:
    """The reference itself: every sample has its tokens and logprobs, and samples of one request differ."""
    assert len(bench.alone) == 64 + 2 * 8
    for request in requests_of(bench.vocab_size):
        samples = [bench.alone[request.id, k] for k in range(request.num_samples)]
        assert all(len(tokens) == request.params.max_tokens == len(logprobs) for tokens, logprobs in samples)
    sampled = [bench.alone["r3", k][0] for k in range(3)]
    assert len(set(sampled)) > 1
