"""What scheduling costs: `schedule` and `commit` of a step in which everybody decodes, without any model.

    python benchmarks/scheduler.py

Requests of 1,000 tokens decode together; every 16th token of each takes a new block and gives one a hash. The limit:
each running sequence costs a few operations of the interpreter, about 50 ns each, and whoever waits must cost none.

Then all that an engine does for a step of 32, from messages to outputs, but for the runner: as it is, and with 256 MB
read before each step. A model step reads its weights, and leaves no cache with the interpreter and its objects in it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import count

import numpy as np

from chairlift.core.clock import WallClock
from chairlift.core.engine import Engine
from chairlift.core.order import make_order
from chairlift.core.plan import Capacity, StepPlan, StepResult
from chairlift.core.policy import make_policy
from chairlift.core.request import Request, SamplingParams
from chairlift.core.scheduler import Scheduler, Settings
from chairlift.core.shares import Shares
from chairlift.llm import _Mailbox

PROMPT = 1000
STEPS = 320  # timed; twenty blocks of each sequence
CASES = (  # running, waiting, order, fair
    (32, 0, "fcfs", False),
    (256, 0, "fcfs", False),
    (256, 10_000, "fcfs", False),
    (256, 10_000, "priority", False),
    (256, 10_000, "fcfs", True),
    (1024, 0, "fcfs", False),
)


def main() -> None:
    print("microseconds a step, medians; prompts of 1,000 tokens, blocks of 16")
    print("running  waiting  order     fair   schedule    commit  together  a sequence")
    for running, waiting, order, fair in CASES:
        schedule, commit, both = _measure(running, waiting, order, fair)
        print(
            f"{running:7} {waiting:8}  {order:9} {'yes' if fair else 'no':4} "
            f"{schedule:10.0f} {commit:9.0f} {both:9.0f} {both / running:11.2f}"
        )

    clock = WallClock()
    mailbox = _Mailbox(clock)
    engine = Engine(_scheduler(32), _NoModel(), mailbox, mailbox, clock)
    for i in range(32):
        engine.scheduler.add(_request(i))
    while engine.scheduler.waiting or any(r.num_remaining > 1 for r in engine.scheduler.running.values()):
        engine.step()
    memory = np.ones(256 << 20, np.uint8)
    warm, cold = _engine_step(engine, lambda: None), _engine_step(engine, memory.sum)
    print(f"\nall of an engine's step of 32 but the runner: {warm:.0f}; with 256 MB read before each: {cold:.0f}")


def _measure(running: int, waiting: int, order: str, fair: bool) -> tuple[float, float, float]:
    scheduler = _scheduler(running, order, fair)
    for i in range(running + waiting):
        scheduler.add(_request(i))
    for _ in count():
        _step(scheduler)
        if len(scheduler.running) == running and all(r.num_remaining == 1 for r in scheduler.running.values()):
            break
    times = [_step(scheduler) for _ in range(STEPS)]
    schedules, commits = zip(*times, strict=True)
    return (
        1e6 * statistics.median(schedules),
        1e6 * statistics.median(commits),
        1e6 * statistics.median(a + b for a, b in times),
    )


def _scheduler(running: int, order: str = "fcfs", fair: bool = False) -> Scheduler:
    return Scheduler(
        Capacity(num_blocks=running * 110, block_size=16, max_model_len=8192),
        make_policy("chunked", order=make_order(order)),
        Settings(max_num_seqs=running, max_num_batched_tokens=8192),
        shares=Shares() if fair else None,
    )


class _NoModel:
    """An executor whose steps take no time."""

    def start(self) -> Capacity:
        raise NotImplementedError

    def submit(self, plan: StepPlan) -> StepResult:
        return _result(plan)

    def result(self, handle: StepResult) -> StepResult:
        return handle

    def close(self) -> None:
        pass


def _engine_step(engine: Engine, before: Callable[[], object]) -> float:
    """Microseconds, the median."""
    times = []
    for _ in range(STEPS):
        before()
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


def _request(i: int) -> Request:
    tokens = [(7919 * i + j) % 50_000 for j in range(PROMPT)]
    params = SamplingParams(max_tokens=4000, temperature=0.0, ignore_eos=True)
    return Request(
        id=f"r{i}", token_ids=tokens, num_prompt=PROMPT, params=params, seed=0, tenant=f"t{i % 8}", priority=0
    )


def _step(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds in schedule and in commit."""
    begin = time.perf_counter()
    plan = scheduler.schedule(0.0)
    planned = time.perf_counter()
    assert plan is not None
    result = _result(plan)
    computed = time.perf_counter()
    scheduler.commit(plan, result, 0.0)
    end = time.perf_counter()
    scheduler.take_events()
    return planned - begin, end - computed


def _result(plan: StepPlan) -> StepResult:
    tokens = tuple((5,) * item.num_samples for item in plan.items)
    return StepResult(plan.step_id, tokens, ((),) * len(tokens), seconds=0.01)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
