"""Deadlines: in the queue, on the way, and those that can only be missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from chairlift.core.clock import VirtualClock
from chairlift.core.engine import Engine
from chairlift.core.pace import MIN_STEPS, Work
from chairlift.core.plan import Output, StepPlan, StepResult, StepStats
from chairlift.core.ports import Add, Message, Report
from chairlift.core.request import FinishReason, Request

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]


class World:
    """An engine whose steps take a second each, and what it says. Messages are given by hand."""

    def __init__(self, rig: Any, depth: int = 1) -> None:
        self.rig, self.clock = rig, VirtualClock()
        self.inbox: list[Message] = []
        self.outputs: list[Output] = []
        submit = rig.executor.submit

        def slow(plan: StepPlan) -> StepResult:
            self.clock.advance(1.0)
            return submit(plan)

        rig.executor.submit = slow
        self.engine = Engine(rig.scheduler, rig.executor, self, self, self.clock, depth=depth)

    def add(self, request: Request) -> Request:
        request.arrival = self.clock.now()
        self.rig.executor.expect(request)
        self.inbox.append(Add(request))
        return request

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        messages, self.inbox = self.inbox, []
        return messages

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        self.outputs += outputs

    def answer(self, report: Report) -> None: ...

    def run(self) -> None:
        for _ in range(500):
            if not self.engine.step():
                self.rig.check_empty()
                return
        raise AssertionError("no end")

    def reason(self, request_id: str) -> FinishReason | None:
        reasons = [output.finish_reason for output in self.outputs if output.request_id == request_id]
        return next((reason for reason in reasons if reason), None)

    def tokens(self, request_id: str) -> int:
        return sum(len(output.new_token_ids) for output in self.outputs if output.request_id == request_id)


@pytest.mark.parametrize("policy", ["static", "continuous", "chunked"])
@pytest.mark.parametrize("limit", ["ttft_ms", "deadline_ms"])
def test_a_deadline_that_passes_in_the_queue_ends_the_request_in_the_next_step(
    make_rig: MakeRig, make_request: MakeRequest, policy: str, limit: str
) -> None:
    """S9, S10"""
    world = World(make_rig(policy, max_num_seqs=1))
    world.add(make_request("a", 4, max_tokens=20))
    world.add(make_request("late", 4, max_tokens=2, **{limit: 5500}))
    while world.reason("late") is None:
        assert world.clock.now() < 7.0
        world.engine.step()
    assert world.clock.now() == 7.0, "5.5 seconds are over at 6, and one step is made of that"
    assert world.reason("late") is FinishReason.DEADLINE and world.tokens("late") == 0
    world.run()
    assert world.reason("a") is FinishReason.LENGTH


@pytest.mark.parametrize("policy", ["static", "continuous", "chunked"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_deadline_that_passes_on_the_way_ends_the_request(
    make_rig: MakeRig, make_request: MakeRequest, policy: str, depth: int
) -> None:
    """S10: with the tokens it has, and neither `length` nor `stop`; its neighbour does not notice."""
    world = World(make_rig(policy), depth)
    world.add(make_request("late", 4, max_tokens=20, n=2, deadline_ms=5500))
    world.add(make_request("b", 4, max_tokens=20))
    world.run()
    ends = [output for output in world.outputs if output.finish_reason and output.request_id == "late"]
    assert [(end.index, end.finish_reason) for end in ends] == [(k, FinishReason.DEADLINE) for k in (0, 1)]
    assert all(end.error is None and not end.new_token_ids for end in ends)
    assert 8 <= world.tokens("late") <= 12
    assert world.reason("b") is FinishReason.LENGTH and world.tokens("b") == 20


def test_the_first_token_in_time_is_all_that_ttft_asks_for(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig())
    world.add(make_request("a", 4, max_tokens=20, ttft_ms=2000))
    world.run()
    assert world.reason("a") is FinishReason.LENGTH and world.tokens("a") == 20


def test_a_prompt_that_takes_too_long_ends_between_its_chunks(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig(budget=8))
    world.add(make_request("a", 60, max_tokens=20, n=3, ttft_ms=3500))
    world.run()
    assert world.reason("a") is FinishReason.DEADLINE and world.clock.now() == 4.0
    assert len(world.outputs) == 3, "one for each sample"


def test_both_limits_are_kept(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """The first is met, and the second still stands."""
    world = World(make_rig())
    world.add(make_request("a", 4, max_tokens=50, ttft_ms=1500, deadline_ms=9500))
    world.run()
    assert world.reason("a") is FinishReason.DEADLINE and 8 <= world.tokens("a") <= 10


def test_a_row_held_by_a_static_batch_has_ended_in_time(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """Its last token came long before its deadline; what it waits for is others."""
    world = World(make_rig("static"))
    world.add(make_request("held", 4, max_tokens=2, deadline_ms=6000))
    world.add(make_request("a", 4, max_tokens=20))
    world.run()
    assert world.reason("held") is FinishReason.LENGTH and world.tokens("held") == 2


def test_a_preempted_request_has_its_deadline(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=8, caching=False)
    rig.add("first", 12, max_tokens=18)
    rig.add("a", 12, max_tokens=18, n=2, deadline_ms=50_000)
    while not rig.scheduler.waiting.num_preempted:
        rig.step()
    assert rig.scheduler.expire(49.0) == []
    outputs = rig.scheduler.expire(50.0)
    assert [(end.index, end.finish_reason) for end in outputs] == [(k, FinishReason.DEADLINE) for k in (0, 1)]
    assert rig.scheduler.stats().num_preempted == 0
    rig.run()


def test_a_beam_search_ends_at_its_deadline(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 12, max_tokens=18, n=2, best_of=3, use_beam_search=True, deadline_ms=1000)
    rig.step()
    rig.step()
    assert [end.finish_reason for end in rig.scheduler.expire(1.0)] == [FinishReason.DEADLINE] * 2
    rig.check_empty()


def test_the_deadline_of_one_that_has_ended_is_not_that_of_its_successor(make_rig: MakeRig) -> None:
    """C10: the same id again, while the old deadline is still noted."""
    rig = make_rig()
    rig.add("a", 4, max_tokens=1, deadline_ms=1000)
    rig.run()
    rig.add("a", 4, max_tokens=9)
    assert rig.scheduler.expire(5.0) == []
    rig.run()
    assert len(rig.tokens("a")) == 10


def test_deadlines_that_were_met_are_forgotten(make_rig: MakeRig) -> None:
    """M5: one note each, and not for ever."""
    rig = make_rig()
    for i in range(1000):
        rig.add(f"r{i}", 4, max_tokens=1, deadline_ms=1e9, ttft_ms=1e6)
        rig.step()
        rig.scheduler.expire(0.0)
        assert len(rig.scheduler._deadlines._entries) <= 2 * len(rig.scheduler.sequences.by_id) + 66
    rig.check_empty()


def test_a_sample_has_its_deadline_when_the_first_has_ended(make_rig: MakeRig) -> None:
    """S9: also when the notes of those that have ended are thrown away meanwhile."""
    rig = make_rig(num_blocks=400)
    rig.add("two", 4, max_tokens=40, n=2, deadline_ms=50_000)
    rig.step()
    rig.abort("two", 0)
    for i in range(100):
        rig.add(f"r{i}", 4, max_tokens=1, deadline_ms=1e6)
        rig.abort(f"r{i}")
    assert [(end.request_id, end.index) for end in rig.scheduler.expire(50.0)] == [("two", 1)]
    rig.check_empty()


def test_without_deadlines_nothing_is_looked_at(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 14: nobody pays for what nobody uses."""
    rig = make_rig(max_num_seqs=1)
    for i in range(3):
        rig.add(f"r{i}", 4)
    monkeypatch.setattr(rig.scheduler.waiting, "first", lambda *_: pytest.fail("looks at the queue"))
    assert rig.scheduler.expire(1e6) == []


# -- hopeless


def with_known_pace(rig: Any) -> Any:
    """Steps take 10 ms and one for each token."""
    for tokens in range(1, 4 * MIN_STEPS):
        rig.scheduler.pace.learn(Work().plus(0, tokens), 0.01 + 0.001 * tokens)
    return rig


def test_what_can_only_be_late_ends_at_once(make_rig: MakeRig) -> None:
    """S9: its prompt alone takes 60 ms, and 30 are left: nothing is computed for it."""
    rig = with_known_pace(make_rig())
    rig.add("hopeless", 50, max_tokens=2, ttft_ms=30)
    rig.add("tight", 50, max_tokens=2, ttft_ms=90)
    outputs = rig.scheduler.expire(0.0)
    assert [(output.request_id, output.finish_reason) for output in outputs] == [("hopeless", FinishReason.DEADLINE)]
    rig.run()
    assert rig.ends("tight") == [FinishReason.LENGTH]


def test_hope_is_left_until_the_pace_is_known(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.add("a", 50, max_tokens=2, ttft_ms=0.001)
    assert rig.scheduler.expire(0.0) == []
    rig.run()
    assert rig.ends("a") == [FinishReason.LENGTH]


def test_a_cached_prompt_is_not_hopeless(make_rig: MakeRig) -> None:
    """Only what must be computed takes time."""
    rig = with_known_pace(make_rig())
    rig.add("before", range(49), max_tokens=1)
    rig.run()
    rig.add("a", range(49), max_tokens=2, ttft_ms=30)
    assert rig.scheduler.expire(0.0) == []
    rig.run()
    assert rig.ends("a") == [FinishReason.LENGTH]


def test_each_request_ends_once_whatever_its_deadline(make_rig: MakeRig) -> None:
    """Random worlds: deadlines against ends, aborts, preemption and forks; nothing is left behind (M5)."""
    for seed in range(15):
        rng = Random(seed)
        rig = make_rig(rng.choice(("static", "continuous", "chunked")), num_blocks=20, budget=64, max_num_seqs=4)
        added = dict[str, int]()
        for i in range(30):
            n = rng.choice((1, 1, 2))
            limits = {name: rng.uniform(500, 30_000) for name in ("ttft_ms", "deadline_ms") if rng.random() < 0.4}
            rig.add(f"r{i}", rng.randint(1, 20), max_tokens=rng.randint(1, 20), n=n, arrival=rig.now, **limits)
            added[f"r{i}"] = n
            for _ in range(rng.randint(0, 3)):
                rig.now += 1.0
                rig.outputs += rig.scheduler.expire(rig.now)
                if rig.scheduler.has_work:
                    rig.step()
            if rng.random() < 0.1:
                rig.abort(f"r{rng.randint(0, i)}")
        while rig.scheduler.has_work:
            rig.now += 1.0
            rig.outputs += rig.scheduler.expire(rig.now)
            if rig.scheduler.has_work:
                rig.step()
        rig.check_empty()
        assert all(len(rig.ends(id, k)) == 1 for id, n in added.items() for k in range(n))
        reasons = {output.finish_reason for output in rig.outputs if output.finish_reason}
        assert FinishReason.DEADLINE in reasons
        for output in rig.outputs:
            if output.finish_reason is FinishReason.DEADLINE:
                assert is_bare(output)


def is_bare(output: Output) -> bool:
    """An end by deadline carries nothing but that."""
    return not output.new_token_ids and output.error is None and not output.refused and output.stop_token_id is None
