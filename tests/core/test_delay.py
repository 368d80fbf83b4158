"""Batch formation delay: an idle engine may wait a moment for others to board with the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift.core.clock import VirtualClock
from chairlift.core.engine import Engine
from chairlift.core.plan import Output, StepPlan, StepResult, StepStats
from chairlift.core.ports import Abort, Add, Message, Report
from chairlift.core.request import FinishReason, Request

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]
Share = Callable[[StepPlan], dict[str, int]]

STEP = 0.25


class World:
    """An engine in virtual time, whose steps take a quarter of a second, and messages that arrive when they are due."""

    def __init__(self, rig: Any, *arrivals: tuple[float, Message]) -> None:
        self.rig, self.clock, self.arrivals = rig, VirtualClock(), list(arrivals)
        self.waits: list[tuple[bool, float | None]] = []
        self.outputs: list[Output] = []
        self.steps: list[tuple[float, dict[str, int]]] = []  # when each began, and what it computed of whom
        submit = rig.executor.submit

        def slow(plan: StepPlan) -> StepResult:
            shares = {item.request_id: len(item.token_ids) for item in plan.items}
            self.steps.append((self.clock.now(), shares))
            self.clock.advance(STEP)
            return submit(plan)

        rig.executor.submit = slow
        for _, message in arrivals:
            if isinstance(message, Add):
                rig.executor.expect(message.request)
        self.engine = Engine(rig.scheduler, rig.executor, self, self, self.clock)

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        self.waits.append((idle, until))
        if idle:
            times = [time for time, _ in self.arrivals[:1]] + ([until] if until is not None else [])
            if times:
                self.clock.advance(max(0.0, min(times) - self.clock.now()))
        due = [message for time, message in self.arrivals if time <= self.clock.now()]
        del self.arrivals[: len(due)]
        return due

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        self.outputs += outputs

    def answer(self, report: Report) -> None: ...

    def run(self) -> None:
        for _ in range(300):
            if not self.engine.step() and not self.arrivals:
                self.rig.check_empty()
                return
        raise AssertionError("no end")

    @property
    def first_steps(self) -> dict[str, float]:
        """When each request was first computed."""
        starts: dict[str, float] = {}
        for time, shares in self.steps:
            for id in shares:
                starts.setdefault(id, time)
        return starts


@pytest.mark.parametrize("policy", ["static", "continuous", "chunked"])
def test_who_comes_within_the_delay_boards_together(make_rig: MakeRig, make_request: MakeRequest, policy: str) -> None:
    requests = [(t, Add(make_request(id, 4, max_tokens=3))) for id, t in (("a", 5.0), ("b", 5.25), ("c", 5.5))]
    world = World(make_rig(policy, max_batch_delay=1.0), *requests)
    world.run()
    assert world.steps[0] == (6.0, {"a": 4, "b": 4, "c": 4})
    assert (True, 6.0) in world.waits, "an idle source may wait, but only so long"


def test_the_delay_is_that_of_the_first(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """Bounded: others that keep coming do not put it off."""
    requests = [(5.0 + i / 4, Add(make_request(f"r{i}", 4, max_tokens=1))) for i in range(12)]
    world = World(make_rig(max_batch_delay=1.0), *requests)
    world.run()
    assert world.steps[0] == (6.0, {f"r{i}": 4 for i in range(5)})


def test_a_full_batch_waits_for_nobody(make_rig: MakeRig, make_request: MakeRequest) -> None:
    requests = [(5.0 + i / 8, Add(make_request(f"r{i}", 4, max_tokens=1))) for i in range(5)]
    world = World(make_rig(max_batch_delay=10.0, max_num_seqs=3), *requests)
    world.run()
    assert world.steps[0] == (5.25, {"r0": 4, "r1": 4, "r2": 4})


def test_a_busy_engine_does_not_wait(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """Whoever comes while others run boards in the next step."""
    requests = [(0.0, Add(make_request("a", 4, max_tokens=20))), (2.1, Add(make_request("b", 4, max_tokens=3)))]
    world = World(make_rig(max_batch_delay=1.0), *requests)
    world.run()
    assert world.first_steps == {"a": 1.0, "b": 2.25}
    gaps = {later - before for (before, _), (later, _) in zip(world.steps, world.steps[1:], strict=False)}
    assert gaps == {STEP}


def test_each_idle_time_has_its_own_delay(make_rig: MakeRig, make_request: MakeRequest) -> None:
    requests = [(t, Add(make_request(id, 4, max_tokens=2))) for id, t in (("a", 0.0), ("b", 9.0), ("c", 9.75))]
    world = World(make_rig(max_batch_delay=1.0), *requests)
    world.run()
    assert world.first_steps == {"a": 1.0, "b": 10.0, "c": 10.0}


def test_without_a_delay_nothing_waits(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """Off by default: the first step begins when the first request comes."""
    world = World(make_rig(), *((t, Add(make_request(f"r{t}", 4, max_tokens=2))) for t in (5.0, 5.1)))
    world.run()
    assert world.steps[0] == (5.0, {"r5.0": 4})
    assert all(until is None for _, until in world.waits)


def test_why_it_waits_is_told(make_rig: MakeRig, share: Share) -> None:
    """S8"""
    rig = make_rig(max_batch_delay=1.0)
    rig.add("a", 4, max_tokens=1)
    assert rig.scheduler.schedule(0.5) is None
    assert rig.scheduler.wake_at == 1.0
    assert rig.scheduler.stats().binding == "delay"
    rig.now = 1.0
    assert share(rig.step()) == {"a": 4}
    assert rig.scheduler.wake_at is None and rig.scheduler.stats().binding == ""


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_who_ends_while_it_is_waited_for_leaves_an_idle_engine(
    make_rig: MakeRig, make_request: MakeRequest, how: str
) -> None:
    """The source may wait for ever again; it must not be asked to come back at a time that is over, again and again."""
    limit = {"deadline_ms": 500} if how == "deadline" else {}
    arrivals: list[tuple[float, Message]] = [(0.0, Add(make_request("a", 4, max_tokens=1, **limit)))]
    if how == "abort":
        arrivals.append((0.5, Abort("a")))
    world = World(make_rig(max_batch_delay=1.0), *arrivals)
    for _ in range(6):
        world.engine.step()
    assert world.outputs[-1].finish_reason is (FinishReason.ABORT if how == "abort" else FinishReason.DEADLINE)
    assert world.steps == []
    assert world.waits[-2:] == [(True, None), (True, None)]


def test_all_are_aborted_while_a_step_is_in_flight(make_rig: MakeRig) -> None:
    """M12: at depth 2 a plan is asked for although nobody is left, in the middle of somebody's delay."""
    rig = make_rig(max_batch_delay=1.0)
    rig.add("a", 4, max_tokens=9)
    plan = rig.scheduler.schedule(1.0)
    result = rig.executor.submit(plan)
    rig.abort("a")
    rig.now = 1.0
    rig.add("b", 4, max_tokens=9)
    rig.abort("b")
    assert rig.scheduler.schedule(1.1) is None
    assert rig.scheduler.wake_at is None
    rig.scheduler.commit(plan, result, 1.2)
    rig.check_empty()


def test_a_delay_longer_than_a_deadline(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """S9: what is late ends with its reason, whatever the engine waits for, and before the delay is over."""
    world = World(
        make_rig(max_batch_delay=10.0),
        (0.0, Add(make_request("a", 4, max_tokens=1, deadline_ms=2000))),
        (4.0, Add(make_request("b", 4, max_tokens=1))),
    )
    world.run()
    assert [(o.request_id, o.finish_reason) for o in world.outputs] == [
        ("a", FinishReason.DEADLINE),
        ("b", FinishReason.LENGTH),
    ]
