"""A toy executor on a virtual clock: a step takes 1 ms for each row and 10 ms for itself, so every time is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from chairlift.bench.case import Case
from chairlift.bench.cases.delay import Delay
from chairlift.bench.cases.fairness import Fairness
from chairlift.bench.cases.long_prompt import LongPrompt
from chairlift.bench.cases.prefix import Prefix
from chairlift.bench.cases.slo import Slo
from chairlift.bench.cases.thrash import Thrash
from chairlift.bench.cases.waste import Waste
from chairlift.bench.compare import Bench, Comparison, engine_config, make_bench
from chairlift.bench.lab import Lab, make_lab
from chairlift.bench.measure import Measured, measure
from chairlift.bench.results import Setting
from chairlift.config import EngineConfig
from chairlift.core.clock import VirtualClock
from chairlift.core.plan import Capacity, StepPlan, StepResult
from chairlift.core.scheduler import Scheduler
from chairlift.engine_main import make_scheduler
from chairlift.sim.workloads import Workload, four_requests

ROW_SECONDS, STEP_SECONDS = 0.001, 0.010


class ToyExecutor:
    """Draws a token that depends on the request and the position alone."""

    threads, isa = 1, "toy"

    def __init__(self, clock: VirtualClock, capacity: Capacity) -> None:
        self.plans: list[StepPlan] = []
        self._clock = clock
        self._capacity = capacity

    def start(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> StepPlan:
        self.plans.append(plan)
        self._clock.advance(STEP_SECONDS + ROW_SECONDS * plan.num_tokens)
        return plan

    def result(self, handle: Any) -> StepResult:
        tokens = tuple(
            ((item.start + len(item.token_ids) + sum(map(ord, item.request_id))) % 1000,) * item.num_samples
            for item in handle.items
        )
        seconds = STEP_SECONDS + ROW_SECONDS * handle.num_tokens
        return StepResult(handle.step_id, tokens, ((),) * len(tokens), seconds=seconds)

    def close(self) -> None:
        pass


def checked_scheduler(config: EngineConfig, capacity: Capacity) -> Scheduler:
    return make_scheduler(replace(config, debug=True), capacity)


def toy_lab(config: EngineConfig, *, num_blocks: int, num_host_blocks: int = 0) -> Lab:
    """A lab on the toy executor, as large as the configuration and the arguments say."""
    assert config.max_model_len is not None
    clock = VirtualClock()
    capacity = Capacity(num_blocks, config.block_size, config.max_model_len, num_host_blocks)
    executor = ToyExecutor(clock, capacity)
    return make_lab(
        executor,
        executor.start(),
        checked_scheduler,
        vocab_size=1000,
        seed=0,
        clock=clock,
        sleep=clock.advance,
    )


def toy_bench(workload: Workload, *, chunk_tokens: int = 512, num_blocks: int | None = None) -> Bench:
    config = engine_config(workload, EngineConfig(), chunk_tokens=chunk_tokens)
    assert config.max_model_len is not None
    blocks = num_blocks or workload.max_num_seqs * config.max_model_len // config.block_size
    return make_bench(toy_lab(config, num_blocks=blocks), workload, config, chunk_tokens=chunk_tokens)


@pytest.fixture(scope="session")
def bench_of() -> Any:
    """Makes a `Bench` on the toy executor for a load."""
    return toy_bench


@pytest.fixture(scope="session")
def four() -> Comparison:
    """The four-requests case under every policy."""
    return toy_bench(four_requests()).compare()


@pytest.fixture
def setting() -> Setting:
    return Setting(model="toy", seed=0, scale=1.0, version="0.0", machine={"cpu": "toy processor", "threads": 1})


@pytest.fixture(scope="session")
def measured() -> Any:
    """Measures a case on the toy executor."""

    def run(case: Case, **settings: Any) -> Measured:
        config = case.config(EngineConfig())
        blocks = config.max_num_seqs * (config.max_model_len or 0) // config.block_size
        lab = toy_lab(config, num_blocks=blocks, num_host_blocks=blocks)
        return measure(case, lab, config, seed=0, **settings)

    return run


@pytest.fixture(scope="session")
def small() -> dict[str, Case]:
    """Each case by its name, so small that it takes a moment."""
    cases: tuple[Case, ...] = (
        Waste(scale=0.04),
        Thrash(requests=2),
        Prefix(requests=3, shared=40, own=8),
        LongPrompt(prompt=64, output=48, slo_itl=500.0),
        Slo(requests=4, clients=2),
        Fairness(flood=4, singles=2, max_num_seqs=2),
        Delay(bursts=2, burst=3, prompt=8, output=4),
    )
    return {case.name: case for case in cases}
