"""Steps that fail: all is computed again, and whoever makes them fail again and again ends alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from chairlift.core.clock import VirtualClock
from chairlift.core.engine import Engine
from chairlift.core.plan import BlockOp, BlockOpKind, Output, StepPlan, StepResult, StepStats
from chairlift.core.ports import Abort, Add, Message, Report
from chairlift.core.request import FinishReason, Request
from chairlift.errors import StepFailed
from chairlift.sim.shadow import ShadowExecutor

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]


class FailingExecutor(ShadowExecutor):
    """Fails the steps with these numbers, and all that hold a request called so; some at once, some when asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bad_steps: set[int] = set()
        self.bad_request = ""
        self.at_once = False
        self.failures = 0
        self.asked = -1  # the last step whose result was given out
        self.plans: list[StepPlan] = []

    def fails(self, plan: StepPlan) -> bool:
        return plan.step_id in self.bad_steps or any(item.request_id == self.bad_request for item in plan.items)

    def submit(self, plan: StepPlan) -> StepResult | StepPlan:
        self.plans.append(plan)
        handle = super().submit(plan)
        if self.at_once and not isinstance(handle, StepResult):
            self._forget_from(self.asked + 1)  # the engine throws away what is in flight
            self.result(handle)
        return handle

    def result(self, handle: StepResult | StepPlan) -> StepResult:
        self.failures += not isinstance(handle, StepResult)
        self.asked = handle.step_id
        return super().result(handle)


class World:
    """An engine, and what it says."""

    def __init__(self, rig: Any, depth: int = 1) -> None:
        self.rig = rig
        self.inbox: list[Message] = []
        self.outputs: list[Output] = []
        self.engine = Engine(rig.scheduler, rig.executor, self, self, VirtualClock(), depth=depth)

    def add(self, request: Request) -> Request:
        self.rig.executor.expect(request)
        self.inbox.append(Add(request))
        return request

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        messages, self.inbox = self.inbox, []
        return messages

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        self.outputs += outputs

    def answer(self, report: Report) -> None: ...

    def run(self, most_steps: int = 3000) -> None:
        for _ in range(most_steps):
            if not self.engine.step():
                self.rig.check_empty()
                return
        raise AssertionError("no end")

    def news(self) -> dict[tuple[str, int], list[Any]]:
        """All that a client hears of each sequence, put together."""
        heard: dict[tuple[str, int], list[Any]] = {}
        for output in self.outputs:
            parts = heard.setdefault((output.request_id, output.index), [(), (), [], output.cumulative_logprob])
            parts[0] += output.new_token_ids
            parts[1] += output.prompt_logprobs
            if output.finish_reason:
                parts[2].append(output.finish_reason)
        return heard


def add_all(world: World, make_request: MakeRequest, *, beams: bool) -> None:
    rng = Random(3)
    for i in range(10):
        prompt = rng.randint(1, 18)
        search: dict[str, Any] = {"use_beam_search": True, "best_of": 3} if beams and i % 4 == 0 else {"seed": i}
        more = {} if search.get("use_beam_search") else {"prompt_logprobs": rng.choice((None, 1))}
        world.add(make_request(f"r{i}", prompt, max_tokens=rng.randint(1, 14), n=1 + i % 3, **search, **more))


@pytest.mark.parametrize("policy", ["static", "continuous", "chunked"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at_once", [False, True], ids=["when asked", "at once"])
@pytest.mark.parametrize("host", [0, 30], ids=["recompute", "swap"])
def test_all_is_computed_again_and_nobody_can_tell(
    make_rig: MakeRig, make_request: MakeRequest, policy: str, depth: int, at_once: bool, host: int
) -> None:
    """Promise 2: any step may fail, also with samples forked, requests swapped out, and rows held by a static batch."""
    heard = []
    for bad_steps in (set(), {0}, {1}, {2, 3}, {4, 9, 15}, set(range(5, 70, 7))):
        rig = make_rig(policy, executor=FailingExecutor, num_blocks=30 if policy == "static" else 9, budget=64,
                       host_blocks=host, preemption_mode="swap", max_num_seqs=5)  # fmt: skip
        rig.executor.bad_steps, rig.executor.at_once = bad_steps, at_once
        world = World(rig, depth)
        add_all(world, make_request, beams=False)
        world.run()
        assert (rig.executor.failures > 0) == bool(bad_steps)
        heard.append(world.news())
        if not bad_steps:
            assert (rig.scheduler.stats().total_swaps > 0) == (host > 0 and policy != "static")
    assert all(news == heard[0] for news in heard[1:])
    assert {tuple(reasons) for _, _, reasons, _ in heard[0].values()} == {(FinishReason.LENGTH,)}


@pytest.mark.parametrize("depth", [1, 2])
def test_beam_searches_begin_again(make_rig: MakeRig, make_request: MakeRequest, depth: int) -> None:
    heard = []
    for bad_steps in (set(), {0}, {3}, {2, 7, 12}):
        rig = make_rig(executor=FailingExecutor, num_blocks=60, budget=64)
        rig.executor.bad_steps = bad_steps
        world = World(rig, depth)
        add_all(world, make_request, beams=True)
        world.run()
        heard.append(world.news())
    assert all(news == heard[0] for news in heard[1:])


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_makes_each_step_fail_ends_with_an_error(
    make_rig: MakeRig, make_request: MakeRequest, depth: int, at_once: bool, n: int
) -> None:
    """D2's kin: alone, after three steps in a row; who shares its steps must not end with it."""
    rig = make_rig(executor=FailingExecutor)
    rig.executor.bad_request, rig.executor.at_once = "bad", at_once
    world = World(rig, depth)
    world.add(make_request("before", 4, max_tokens=20))
    for _ in range(5):
        world.engine.step()
    world.add(make_request("bad", 4, max_tokens=5, n=n))
    world.add(make_request("after", 4, max_tokens=5))
    world.run()
    news = world.news()
    for k in range(n):
        assert news["bad", k] == [(), (), [FinishReason.ERROR], None]
    (error, *_) = [output.error for output in world.outputs if output.request_id == "bad"]
    assert error and "failed 3 times" in error and "step" in error
    assert len(news["before", 0][0]) == 20 and news["before", 0][2] == [FinishReason.LENGTH]
    assert len(news["after", 0][0]) == 5 and news["after", 0][2] == [FinishReason.LENGTH]
    assert rig.executor.failures <= 3 + 2 * depth  # what is in flight behind a failed step fails, too


def test_failures_that_are_not_in_a_row_end_nobody(make_rig: MakeRig, make_request: MakeRequest) -> None:
    rig = make_rig(executor=FailingExecutor)
    rig.executor.bad_steps = set(range(1, 100, 2))
    world = World(rig)
    world.add(make_request("a", 4, max_tokens=30))
    world.run()
    assert [len(tokens) for tokens, *_ in world.news().values()] == [30]
    assert rig.executor.failures >= 29


def test_two_failures_in_a_row_end_nobody(make_rig: MakeRig, make_request: MakeRequest) -> None:
    rig = make_rig(executor=FailingExecutor)
    rig.executor.bad_steps = {1, 2, 4, 5, 7, 8}
    world = World(rig)
    world.add(make_request("a", 4, max_tokens=6, n=3))
    world.run()
    assert [reasons for _, _, reasons, _ in world.news().values()] == [[FinishReason.LENGTH]] * 3


def test_nothing_found_before_a_failure_is_found_after_it(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """C3: what the cache held is gone with the memory."""
    rig = make_rig(executor=FailingExecutor, host_blocks=20)
    world = World(rig)
    world.add(make_request("a", range(33), max_tokens=2))
    world.run()
    rig.executor.bad_steps = {rig.executor.plans[-1].step_id + 1}
    world.add(make_request("fails", 4, max_tokens=2))
    world.run()
    again = world.add(make_request("b", range(33), max_tokens=2))
    world.run()
    assert again.num_cached_tokens == 0
    assert all(o.num_cached_tokens == 0 for o in world.outputs)


def test_aborts_and_failures_leave_nothing(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """M5, M12: random worlds, depth 2, everything going wrong at once; each sequence ends once."""
    for seed in range(25):
        rng = Random(seed)
        rig = make_rig(executor=FailingExecutor, num_blocks=16, host_blocks=rng.choice((0, 12)), stop_rate=0.05,
                       preemption_mode="swap", max_num_seqs=5)  # fmt: skip
        rig.executor.bad_steps = set(rng.sample(range(200), 40))
        world = World(rig, rng.choice((1, 2)))
        expected = {}
        for i in range(20):
            n = rng.choice((1, 1, 3))
            expected |= dict.fromkeys(((f"r{i}", k) for k in range(n)), 1)
            world.add(make_request(f"r{i}", rng.randint(1, 20), max_tokens=rng.randint(1, 20), n=n, stop_ids=[7]))
            for _ in range(rng.randint(0, 4)):
                world.engine.step()
            if rng.random() < 0.2:
                world.inbox.append(Abort(f"r{rng.randint(0, i)}", rng.choice((None, None, 0))))
        world.run()
        assert {key: len(news[2]) for key, news in world.news().items()} == expected


def test_what_failed_together_does_not_count_against_one_alone(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """D4: a suspect gets its three tries, whatever made the steps before fail."""
    rig = make_rig(executor=FailingExecutor)
    rig.executor.bad_steps = {1, 2, 3, 4}
    world = World(rig)
    world.add(make_request("a", 4, max_tokens=9))
    world.run()
    assert [output.finish_reason for output in world.outputs if output.finish_reason] == [FinishReason.LENGTH]


def test_failures_that_are_far_apart_make_no_suspect(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """D4: a sequence that has come past where it failed begins anew."""
    rig = make_rig(executor=FailingExecutor)
    rig.executor.bad_steps = {2, 8, 14}
    world = World(rig)
    for id in "ab":
        world.add(make_request(id, 4, max_tokens=20))
    while world.engine.step():
        assert not rig.scheduler.failures.suspects
    assert rig.scheduler.stats().step_id > 14, "all three failed"


class DamagingExecutor(ShadowExecutor):
    """Of the blocks that are swapped in every third is found damaged."""

    count = 0

    def damages(self, op: BlockOp) -> bool:
        self.count += 1
        return self.count % 3 == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [False, True])
def test_damaged_blocks_are_computed_again(
    make_rig: MakeRig, make_request: MakeRequest, depth: int, caching: bool
) -> None:
    """A swapped block that is not what it should be costs time, and no answer."""
    heard, damaged = [], 0
    for executor in (ShadowExecutor, DamagingExecutor):
        rig = make_rig(executor=executor, num_blocks=9, host_blocks=6, disk_blocks=30, preemption_mode="swap",
                       caching=caching, max_preemptions=20, max_num_seqs=5)  # fmt: skip
        world = World(rig, depth)
        add_all(world, make_request, beams=False)
        world.run()
        heard.append(world.news())
        damaged += getattr(rig.executor, "count", 0)
    assert damaged > 5
    assert heard[0] == heard[1]


class AllDamaged(ShadowExecutor):
    def damages(self, op: BlockOp) -> bool:
        return True


def test_damage_of_a_block_that_is_somebody_elses_by_now(make_rig: MakeRig) -> None:
    """With two steps in flight its first owner may have gone; whoever writes there now has lost nothing."""
    rig = make_rig(executor=AllDamaged, num_blocks=14, host_blocks=9, block_size=1, preemption_mode="swap",
                   caching=False)  # fmt: skip
    stays = rig.add("stays", 4, max_tokens=6)
    gone = rig.add("gone", 8, max_tokens=5)
    rig.step()
    rig.scheduler.boarding.preempt(gone, "the test")
    scheduler, executor, flights = rig.scheduler, rig.executor, []
    while not any(op.kind is BlockOpKind.SWAP_IN for plan, _ in flights for op in plan.block_ops):
        assert len(flights) < 2
        flights.append((plan := scheduler.schedule(0.0), executor.submit(plan)))
    rig.abort("gone")
    freed = {op.dst for op in flights[-1][0].block_ops if op.kind is BlockOpKind.SWAP_IN}
    plan = scheduler.schedule(0.0)
    flights.append((plan, executor.submit(plan)))
    assert freed & set(stays.block_table), "it grew into what the other left"
    for plan, handle in flights:
        rig.outputs += scheduler.commit(plan, executor.result(handle), 0.0)
    assert scheduler.stats().total_recomputed_tokens == 0
    rig.run()


def test_other_errors_are_not_swallowed(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """D1: what nobody foresaw must end the engine, so that it is replaced."""
    rig = make_rig()

    def broken(plan: StepPlan) -> StepResult:
        raise OSError("the device is gone")

    rig.executor.submit = broken
    world = World(rig)
    world.add(make_request("a", 4))
    with pytest.raises(OSError, match="the device is gone"):
        world.engine.step()


def test_closing_survives_a_step_that_fails(make_rig: MakeRig, make_request: MakeRequest) -> None:
    rig = make_rig(executor=FailingExecutor)
    rig.executor.bad_steps = {0}
    world = World(rig, 2)
    world.add(make_request("a", 4, max_tokens=9))
    world.engine.step()
    world.engine.close()
    with pytest.raises(StepFailed):
        rig.executor.result(rig.executor.plans[0])
