"""A toy executor on a virtual clock: a step takes 1 ms for each row and 10 ms for itself, so every time is known."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.bench.compare import Bench, Comparison, engine_config, make_bench
from chairlift.bench.results import Setting
from chairlift.config import EngineConfig
from chairlift.core.clock import VirtualClock
from chairlift.core.plan import Capacity, StepPlan, StepResult
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
        return StepResult(handle.step_id, tokens, ((),) * len(tokens))

    def close(self) -> None:
        pass


def toy_bench(workload: Workload, *, chunk_tokens: int = 512, num_blocks: int | None = None) -> Bench:
    config = engine_config(workload, EngineConfig(), chunk_tokens=chunk_tokens)
    assert config.max_model_len is not None and config.max_num_batched_tokens is not None
    blocks = num_blocks or workload.max_num_seqs * config.max_model_len // config.block_size
    clock = VirtualClock()
    executor = ToyExecutor(clock, Capacity(blocks, config.block_size, config.max_model_len))
    return make_bench(
        executor,
        executor.start(),
        workload,
        vocab_size=1000,
        seed=0,
        whole_tokens=config.max_num_batched_tokens,
        chunk_tokens=chunk_tokens,
        clock=clock,
        sleep=clock.advance,
    )


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
