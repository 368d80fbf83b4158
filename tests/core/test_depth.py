"""Depth 2: the next step is planned while one runs, and nobody can tell from the answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from chairlift.core.clock import VirtualClock
from chairlift.core.engine import Engine
from chairlift.core.plan import Output, StepPlan, StepResult, StepStats
from chairlift.core.ports import Abort, Add, Message, Report
from chairlift.core.request import FinishReason, Request
from chairlift.sim.shadow import ShadowExecutor

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]


class World:
    """An engine, and what it says. Messages are given by hand, and taken at the next step."""

    def __init__(self, rig: Any, depth: int) -> None:
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

    def run(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.engine.step():
                self.rig.check_empty()
                return
        raise AssertionError("no end")

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [t for o in self.outputs if (o.request_id, o.index) == (request_id, index) for t in o.new_token_ids]

    def news(self) -> dict[tuple[str, int], list[Any]]:
        """All that a client hears of each sequence, put together."""
        heard: dict[tuple[str, int], list[Any]] = {}
        for output in self.outputs:
            parts = heard.setdefault((output.request_id, output.index), [(), (), (), None, None])
            parts[0] += output.new_token_ids
            parts[1] += output.logprobs
            parts[2] += output.prompt_logprobs
            parts[3] = parts[3] or output.finish_reason
            parts[4] = parts[4] or output.stop_token_id
        return heard


class LoggedExecutor(ShadowExecutor):
    """Notes when plans come and when their results are asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log: list[tuple[str, int]] = []
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> StepResult | StepPlan:
        self.log.append(("plan", plan.step_id))
        self.plans.append(plan)
        return super().submit(plan)

    def result(self, handle: StepResult | StepPlan) -> StepResult:
        self.log.append(("result", handle.step_id))
        return super().result(handle)


def test_the_next_step_is_planned_before_the_result_is_asked_for(make_rig: MakeRig, make_request: MakeRequest) -> None:
    logs = []
    for depth in (1, 2):
        rig = make_rig(executor=LoggedExecutor)
        world = World(rig, depth)
        world.add(make_request("a", 4, max_tokens=4))
        world.run()
        logs.append(rig.executor.log)
    assert logs[0] == [(what, step) for step in range(4) for what in ("plan", "result")]
    assert logs[1] == [
        ("plan", 0),
        ("plan", 1),
        ("result", 0),
        ("plan", 2),
        ("result", 1),
        ("plan", 3),
        ("result", 2),
        ("result", 3),
    ]


def test_a_token_that_is_being_drawn_is_named_by_its_draw(make_rig: MakeRig, make_request: MakeRequest) -> None:
    rig = make_rig(executor=LoggedExecutor)
    world = World(rig, 2)
    for id, n in (("a", 1), ("three", 3), ("b", 1)):
        world.add(make_request(id, 4, max_tokens=3, n=n))
    world.engine.step()
    world.engine.step()
    items = {item.request_id: item.token_ids for item in rig.executor.plans[1].items}
    assert items == {"a": (-1,), "b": (-5,)}, "draws 0, 1 to 3 and 4; samples are forked when they are drawn"
    world.run()
    assert [len(world.tokens("three", k)) for k in range(3)] == [3, 3, 3]


@pytest.mark.parametrize("depth", [0, 3, -1])
def test_other_depths_are_refused(make_rig: MakeRig, depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth must be from 1 to 2, got {depth}"):
        World(make_rig(), depth)


@pytest.mark.parametrize("policy", ["static", "continuous", "chunked"])
@pytest.mark.parametrize("swap", [0, 30])
def test_the_answers_are_those_of_depth_1(make_rig: MakeRig, make_request: MakeRequest, policy: str, swap: int) -> None:
    """C10, promise 1: random worlds with stop tokens, penalties, samples, prompt logprobs, preemption and aborts."""
    preemptions, blocks = 0, 26 if policy == "static" else 12
    for seed in range(7):
        heard = []
        for depth in (1, 2):
            rng = Random(seed)
            rig = make_rig(policy, num_blocks=blocks, budget=64, stop_rate=0.05, host_blocks=swap, max_num_seqs=5)
            world = World(rig, depth)
            aborted = set()
            for i in range(16):
                prompt = rng.randint(1, 20)
                world.add(
                    make_request(
                        f"r{i}",
                        range(prompt) if rng.random() < 0.3 else prompt,
                        max_tokens=rng.randint(1, 20),
                        n=rng.choice((1, 1, 3)),
                        stop_ids=[7] if rng.random() < 0.5 else [],
                        seed=i,
                        frequency_penalty=rng.choice((0.0, 0.0, 1.0)),
                        prompt_logprobs=rng.choice((None, None, 1)),
                        logprobs=rng.choice((None, 2)),
                    )
                )
                for _ in range(rng.randint(0, 3)):
                    world.engine.step()
                if rng.random() < 0.1:
                    aborted.add(f"r{rng.randint(0, i)}")
                    world.inbox.append(Abort(max(aborted)))
            world.run()
            preemptions += rig.scheduler.stats().total_preemptions
            heard.append({key: news for key, news in world.news().items() if key[0] not in aborted})
        assert heard[0] == heard[1]
    assert preemptions > 20 or policy == "static"


def test_a_request_in_flight_is_never_preempted(
    make_rig: MakeRig, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule 11: its blocks are being written. Those who need room wait a step, and go on."""
    for seed in range(10):
        rng = Random(seed)
        rig = make_rig(num_blocks=14, order="priority", caching=False)
        world = World(rig, 2)
        preempt = rig.scheduler.boarding.preempt

        def checked(request: Request, *args: Any, rig: Any = rig, preempt: Any = preempt, **kwargs: Any) -> None:
            flying = {r for flight in rig.scheduler._in_flight for r in flight.requests}
            assert request not in flying
            preempt(request, *args, **kwargs)

        monkeypatch.setattr(rig.scheduler.boarding, "preempt", checked)
        for i in range(14):
            world.add(
                make_request(f"r{i}", rng.randint(1, 16), max_tokens=rng.randint(1, 20), priority=rng.randint(0, 2))
            )
            world.engine.step()
        world.run()
        assert rig.scheduler.stats().total_preemptions > 0


@pytest.mark.parametrize("bottleneck", [{"max_num_seqs": 4}, {"num_blocks": 12}], ids=["slots", "blocks"])
@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_a_high_class_boards_as_soon_as_a_place_lands(
    make_rig: MakeRig, make_request: MakeRequest, policy: str, bottleneck: dict[str, int]
) -> None:
    """S3: who is to make way is not planned again, and leaves when its step has landed; the queue does not matter."""
    for waiting in (0, 50):
        rig = make_rig(policy, order="priority", caching=False, budget=64, executor=LoggedExecutor, **bottleneck)
        world = World(rig, 2)
        for i in range(4 + waiting):
            world.add(make_request(f"low{i}", 8, max_tokens=24, priority=1))
        for _ in range(5):
            world.engine.step()
        world.add(make_request("high", 12, max_tokens=3, priority=0))
        for _ in range(5):
            world.engine.step()
        assert "high" in {item.request_id for plan in rig.executor.plans[-4:] for item in plan.items}
        world.run()


@pytest.mark.parametrize("again", [{"prompt": 4}, {"prompt": 9}, {"prompt": 4, "n": 3}])
@pytest.mark.parametrize("steps", [2, 3, 5])
def test_an_id_used_again_while_its_step_is_in_flight(
    make_rig: MakeRig, make_request: MakeRequest, again: dict[str, int], steps: int
) -> None:
    """C10, rule 11: the new request gets its own tokens, all of them, and none of the old one's."""
    alone = World(make_rig(), 1)
    alone.add(make_request("a", **again, max_tokens=6, seed=5))
    alone.run()
    rig = make_rig(executor=LoggedExecutor)
    world = World(rig, 2)
    world.add(make_request("a", 4, max_tokens=20, seed=1))
    world.add(make_request("b", 4, max_tokens=20))
    for _ in range(steps):
        world.engine.step()
    old = world.outputs[:]
    assert rig.scheduler._in_flight
    world.inbox.append(Abort("a"))
    world.add(make_request("a", **again, max_tokens=6, seed=5))
    rig.executor.expect = None  # one that is told too early would take the old one's draws for its own
    world.run()
    new = [output for output in world.outputs[len(old) :] if output.request_id == "a"]
    assert new.pop(0) == Output("a", 0, finish_reason=FinishReason.ABORT)
    for index in range(again.get("n", 1)):
        tokens = [t for output in new if output.index == index for t in output.new_token_ids]
        assert tokens == alone.tokens("a", index)


def test_a_stop_costs_at_most_one_discarded_row(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """The step after it is under way; its row is thrown away, and no further one is made. A known end costs none."""
    for stop_ids, wasted in (([7], 1), ([], 0)):
        rig = make_rig(executor=LoggedExecutor, stop_rate=0.2)
        world = World(rig, 2)
        for i in range(10):
            world.add(make_request(f"r{i}", 5, max_tokens=40, stop_ids=stop_ids, seed=i))
        world.run()
        rows = [item for plan in rig.executor.plans for item in plan.items if item.num_samples]
        for i in range(10):
            drawn = sum(item.request_id == f"r{i}" for item in rows)
            assert drawn - len(world.tokens(f"r{i}")) == wasted


def test_held_rows_get_no_step_of_their_own(
    make_rig: MakeRig, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the last tokens of a static batch are being drawn, there is nothing to compute."""
    world, plans = World(make_rig("static"), depth=2), []
    submit = world.rig.executor.submit
    monkeypatch.setattr(world.rig.executor, "submit", lambda plan: plans.append(plan) or submit(plan))
    for id, max_tokens in (("short", 2), ("long", 6)):
        world.add(make_request(id, 4, max_tokens=max_tokens))
    world.run()
    assert [[item.discard for item in plan.items] for plan in plans[-3:]] == [[True, False]] * 3
    assert len(world.tokens("long")) == len(plans)


def test_closing_waits_for_what_is_in_flight(make_rig: MakeRig, make_request: MakeRequest) -> None:
    rig = make_rig(executor=LoggedExecutor)
    world = World(rig, 2)
    world.add(make_request("a", 4, max_tokens=20))
    world.engine.step()
    world.engine.step()
    world.engine.close()
    asked = deque(rig.executor.log)
    assert sorted(step for what, step in asked if what == "plan") == sorted(
        step for what, step in asked if what == "result"
    )
