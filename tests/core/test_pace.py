"""The model of a step's time, and the target for the time between tokens that is kept by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from chairlift.core.pace import FIRST_CHUNK, MIN_STEPS, Pace, Work
from chairlift.core.plan import StepPlan, StepResult
from chairlift.sim.shadow import ShadowExecutor

MakeRig = Callable[..., Any]
Share = Callable[[StepPlan], dict[str, int]]

CONSTANT, PER_TOKEN, PER_POSITION = 4e-3, 1e-4, 1e-7


def true_seconds(work: Work) -> float:
    return CONSTANT + PER_TOKEN * work.tokens + PER_POSITION * work.positions


def some_work(rng: Random) -> Work:
    work = Work()
    for _ in range(rng.randint(1, 12)):
        work = work.plus(rng.randint(0, 2000), 1)
    return work.plus(rng.randint(0, 2000), rng.choice((0, 0, 16, 64, 200)))


def taught(steps: int = 400, noise: float = 0.0, seed: int = 1, slower: float = 1.0, pace: Pace | None = None) -> Pace:
    rng, pace = Random(seed), pace or Pace()
    for _ in range(steps):
        work = some_work(rng)
        pace.learn(work, slower * true_seconds(work) * rng.lognormvariate(0.0, noise))
    return pace


def test_work_counts_rows_and_what_they_attend_to() -> None:
    """Row at position p attends to p + 1 positions."""
    assert Work().plus(0, 1) == Work(1, 1)
    assert Work().plus(9, 1) == Work(1, 10)
    assert Work(2, 20).plus(4, 3) == Work(5, 20 + 5 + 6 + 7)
    work = Work()
    for position in range(7, 30):
        work = work.plus(position, 1)
    assert work == Work().plus(7, 23)


def test_the_rates_are_learnt() -> None:
    """S2"""
    pace, rng = taught(), Random(2)
    for _ in range(100):
        work = some_work(rng)
        assert pace.seconds(work) == pytest.approx(true_seconds(work), rel=0.01)
    assert pace.seconds(Work()) == pytest.approx(CONSTANT, rel=0.05)


def test_nothing_is_known_at_first() -> None:
    pace = Pace()
    assert pace.seconds(Work(5, 50)) == 0.0 == pace.safe_seconds(Work(5, 50))
    for i in range(MIN_STEPS):
        assert not pace.known
        assert pace.chunk(Work(8, 100), 0, 400, 1.0) == FIRST_CHUNK
        assert pace.chunk(Work(8, 100), 0, 5, 1.0) == 5
        pace.learn(Work(1 + i, 10 * i), 0.01)
    assert pace.known


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_time_that_cannot_be_teaches_nothing(seconds: float) -> None:
    pace = taught()
    before = pace.seconds(Work(10, 1000))
    pace.learn(Work(10, 1000), seconds)
    assert pace.seconds(Work(10, 1000)) == before


def test_a_step_without_a_time_teaches_nothing() -> None:
    """A runner that does not measure, or a clock that jumped back."""
    pace = taught(50)
    before = pace.seconds(Work(9, 900))
    for seconds in (0.0, -1.0):
        for _ in range(100):
            pace.learn(Work(9, 900), seconds)
    assert pace.seconds(Work(9, 900)) == before
    fresh = Pace()
    fresh.learn(Work(1, 1), 0.0)
    assert fresh._steps == 0


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_99_of_100_steps_stay_below_the_safe_time(noise: float) -> None:
    """S2"""
    pace, rng = taught(3000, noise), Random(5)
    above = 0
    for _ in range(4000):
        work = some_work(rng)
        seconds = true_seconds(work) * rng.lognormvariate(0.0, noise)
        above += seconds > pace.safe_seconds(work)
        pace.learn(work, seconds)
    assert 0.001 < above / 4000 < 0.02
    assert pace.safe_seconds(Work(8, 800)) < 2.5 * true_seconds(Work(8, 800)), "and it is not far above them"


def test_it_follows_the_machine() -> None:
    pace = taught(1000, 0.05)
    taught(1000, 0.05, seed=2, slower=3.0, pace=pace)
    work = Work(60, 9000)
    assert pace.seconds(work) == pytest.approx(3 * true_seconds(work), rel=0.1)


def test_steps_that_are_all_alike_do_no_harm() -> None:
    """After an hour of the same step, the next different one is still learnt from, and no number has run away."""
    pace = taught(100)
    for _ in range(20_000):
        pace.learn(Work(8, 4000), true_seconds(Work(8, 4000)))
    assert pace.seconds(Work(8, 4000)) == pytest.approx(true_seconds(Work(8, 4000)), rel=0.01)
    assert pace.seconds(Work(200, 40_000)) == pytest.approx(true_seconds(Work(200, 40_000)), rel=0.3)
    taught(300, seed=3, pace=pace)
    assert pace.seconds(Work(200, 40_000)) == pytest.approx(true_seconds(Work(200, 40_000)), rel=0.02)


def test_it_is_as_good_after_thirty_thousand_steps() -> None:
    """Rounding errors of the estimate do not add up: after an hour the model is that of the first minute."""
    pace, rng = taught(30_000, 0.05), Random(6)
    for _ in range(50):
        work = some_work(rng)
        assert pace.seconds(work) == pytest.approx(true_seconds(work), rel=0.1)
    assert pace.safe_seconds(Work(8, 800)) < 1.4 * true_seconds(Work(8, 800))


def test_more_work_never_takes_less_time() -> None:
    """Whatever was learnt from noise: else the chunk would be chosen at random."""
    for seed in range(20):
        pace = taught(MIN_STEPS + seed, 0.5, seed)
        times = [pace.seconds(Work(8, 800).plus(100, n)) for n in range(0, 400, 7)]
        assert times == sorted(times)


@pytest.mark.parametrize("spread", [0, 1, 20, 100])
def test_contexts_of_about_one_length(spread: int) -> None:
    """S2: of such steps only the time of a row with its positions is known, not how much of it is whose."""
    rng, pace = Random(3), Pace()
    ratios, of_prompts = [], []
    for step in range(3000):
        n = rng.randint(1, 32)
        work = Work(n, sum(512 + rng.randint(-spread, spread) for _ in range(n)))
        if step > 500:
            ratios.append(pace.seconds(work) / true_seconds(work))
            beside = work.plus(0, 64)
            of_prompts.append(pace.seconds(beside) / true_seconds(beside))
        pace.learn(work, true_seconds(work) * rng.uniform(0.8, 1.2))
    assert 0.9 < min(ratios) <= max(ratios) < 1.1
    assert 0.7 < min(of_prompts) <= max(of_prompts) < 1.6


def test_the_chunk_is_the_largest_that_is_safe() -> None:
    pace, rng = taught(500, 0.05), Random(4)
    for _ in range(200):
        work, start, target = some_work(rng), rng.randint(0, 3000), rng.uniform(0.001, 0.06)
        n = pace.chunk(work, start, 400, target)
        assert 0 <= n <= 400
        if pace.safe_seconds(work) > target:  # no chunk is small enough: then it is to hold for most steps
            continue
        assert pace.safe_seconds(work.plus(start, n)) <= target
        assert n == 400 or pace.safe_seconds(work.plus(start, n + 1)) > target


def test_swaps_are_measured_by_the_block() -> None:
    pace = Pace()
    assert pace.swap_seconds(10) == 0.0, "not known yet"
    for blocks in (3, 10, 40):
        pace.learn_swap(blocks, blocks * 1e-3)
    assert pace.swap_seconds(10) == pytest.approx(0.01)
    for _ in range(60):
        pace.learn_swap(10, 0.05)
    assert pace.swap_seconds(10) == pytest.approx(0.05, rel=0.02)


# -- --slo-itl


class TimedExecutor(ShadowExecutor):
    """Each step takes the time of the model above, and a little more or less."""

    noise = 0.03

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rng = Random(7)
        self.seconds: list[float] = []

    def result(self, handle: StepResult | StepPlan) -> StepResult:
        return replace(super().result(handle), seconds=self.seconds[-1])

    def submit(self, plan: StepPlan) -> StepResult | StepPlan:
        work = Work()
        for item in plan.items:
            work = work.plus(item.start, len(item.token_ids))
        self.seconds.append(true_seconds(work) * self._rng.lognormvariate(0.0, self.noise))
        return super().submit(plan)


def beside_decodes(make_rig: MakeRig, slo_itl: float | None) -> tuple[list[float], int]:
    """Eight decode, and 4,096 tokens of a prompt come. Times of the steps until its first token, the shortest chunk."""
    rig = make_rig(
        executor=TimedExecutor, slo_itl=slo_itl, num_blocks=700, block_size=16, max_model_len=6000, budget=512,
        max_num_seqs=16,
    )  # fmt: skip
    for i in range(8):
        rig.add(f"d{i}", 30, max_tokens=5000, ignore_eos=True)
    for _ in range(60):
        rig.step()
    rig.scheduler.settings = replace(rig.scheduler.settings, check=False)
    first = len(rig.plans)
    rig.add("long", 4096, max_tokens=2)
    chunks: list[int] = []
    while not rig.tokens("long"):
        assert len(rig.plans) < first + 1000, "the prompt does not progress"
        chunks += [len(item.token_ids) for item in rig.step().items if item.request_id == "long"]
    assert sum(chunks) == 4096
    return rig.executor.seconds[first:], min(chunks[:-1])


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def test_a_long_prompt_keeps_the_time_between_tokens(make_rig: MakeRig) -> None:
    """S1, S2: P99 of all steps that decode, from the first chunk to the last. Without a target it is far above."""
    target = 0.015
    seconds, shortest = beside_decodes(make_rig, target)
    assert percentile(seconds, 0.99) < target
    assert sum(seconds) / len(seconds) > 0.7 * target, "what the target allows is used"
    assert shortest > 16
    seconds, _ = beside_decodes(make_rig, None)
    assert percentile(seconds, 0.99) > 3 * target


def test_nobody_boards_when_decodes_alone_are_too_slow(make_rig: MakeRig) -> None:
    """S2, S8: and the reason is given; when some have left, the next one boards."""
    rig = make_rig(executor=TimedExecutor, slo_itl=0.0055, max_num_seqs=64, budget=128, num_blocks=600)
    rig.add("first", 4, max_tokens=60)
    for _ in range(20):
        rig.step()
    for i in range(40):
        rig.add(f"r{i}", 4, max_tokens=40 + i)
    for _ in range(30):
        rig.step()
    decoding = len(rig.scheduler.running)
    assert 5 <= decoding <= 14, "4 ms for each step and 0.1 for each row"
    assert rig.scheduler.stats().binding == "slo"
    for _ in range(200):
        if rig.scheduler.has_work:
            rig.step()
    steps = [
        seconds
        for plan, seconds in zip(rig.plans[20:], rig.executor.seconds[20:], strict=True)
        if any(item.start >= item.num_prompt for item in plan.items)
    ]
    assert percentile(steps, 0.99) < 0.0055
    rig.run()


def test_a_target_that_cannot_be_kept_stops_nobody(make_rig: MakeRig) -> None:
    """M2: even if one decode alone is too slow, all end: one after the other."""
    rig = make_rig(executor=TimedExecutor, slo_itl=0.001)
    for i in range(6):
        rig.add(f"r{i}", 30, max_tokens=6)
    rig.run(most_steps=200)
    assert all(len(rig.tokens(f"r{i}")) == 6 for i in range(6))


def test_the_target_binds_only_where_it_cuts(make_rig: MakeRig) -> None:
    """S8: a budget that --max-num-batched-tokens bounds, and not the target, is told as such."""
    rig = make_rig(executor=TimedExecutor, slo_itl=10.0, budget=16, num_blocks=200)
    rig.add("a", 4, max_tokens=40)
    for _ in range(12):
        rig.step()
    rig.add("b", 60, max_tokens=2)
    rig.add("c", 60, max_tokens=2)
    rig.step()
    assert rig.scheduler.stats().binding == "tokens"
    rig.run()


def test_prompts_alone_take_the_whole_budget(make_rig: MakeRig, share: Share) -> None:
    """The target is for steps that decode; while nobody does, nobody waits for a token."""
    rig = make_rig(executor=TimedExecutor, slo_itl=0.005, budget=64)
    rig.add("a", 60, max_tokens=1)
    rig.add("b", 40, max_tokens=1)
    assert share(rig.step()) == {"a": 60, "b": 4}
    rig.run()
