"""Why is it waiting, where does it stand, and what happened to it?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from chairlift.core.clock import VirtualClock
from chairlift.core.engine import Engine
from chairlift.core.plan import Output, StepPlan, StepResult, StepStats
from chairlift.core.ports import Abort, Add, Inspect, LifeLine, Message, Report
from chairlift.core.recorder import EXPLANATIONS, FlightRecorder
from chairlift.core.request import Request

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]


class World:
    """An engine whose steps take a tenth of a second, and what it says."""

    def __init__(self, rig: Any, depth: int = 1) -> None:
        self.rig, self.clock = rig, VirtualClock()
        self.inbox: list[Message] = []
        self.outputs: list[Output] = []
        self.answers: list[Report] = []
        submit = rig.executor.submit

        def slow(plan: StepPlan) -> StepResult:
            self.clock.advance(0.1)
            return replace(submit(plan), seconds=0.1)

        rig.executor.submit = slow
        self.engine = Engine(rig.scheduler, rig.executor, self, self, self.clock, depth=depth)

    def add(self, request: Request) -> Request:
        self.rig.executor.expect(request)
        self.inbox.append(Add(request))
        return request

    def steps(self, n: int) -> None:
        for _ in range(n):
            assert self.engine.step()

    def run(self) -> None:
        while self.engine.step():
            pass
        self.rig.check_empty()

    def ask(self, request_id: str | None = None) -> Report:
        recorder = self.engine.flight_recorder
        return recorder.report(1, request_id, self.rig.scheduler, self.clock.now())

    def life(self, request_id: str) -> list[tuple[str, int, int]]:
        return [(line.what, line.step, line.last_step) for line in self.ask(request_id).life]

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        messages, self.inbox = self.inbox, []
        if idle and until is not None:
            self.clock.advance(max(0.0, until - self.clock.now()))
        return messages

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        self.outputs += outputs

    def answer(self, report: Report) -> None:
        self.answers.append(report)


# -- why the head of the queue waits


def binding(world: World) -> str:
    (first, *_) = [view for view in world.ask().requests if view.position == 1]
    assert first.reason == world.rig.scheduler.stats().binding
    return str(first.reason)


def test_slots(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """S8, as all of these: the resource that binds is named while it binds, and not longer."""
    world = World(make_rig(max_num_seqs=2))
    for id in "abc":
        world.add(make_request(id, 4, max_tokens=5))
    world.steps(3)
    assert binding(world) == "slots"
    world.steps(3)
    assert world.rig.scheduler.stats().binding == ""


def test_nothing_binds_when_who_waited_has_gone(make_rig: MakeRig) -> None:
    """S8: an abort is not followed by a step."""
    rig = make_rig(max_num_seqs=1)
    for id in "ab":
        rig.add(id, 4, max_tokens=5)
    rig.step()
    assert rig.scheduler.stats().binding == "slots"
    rig.abort("b")
    assert rig.scheduler.stats().binding == ""


def test_tokens(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig(budget=8))
    world.add(make_request("a", 30, max_tokens=2))
    world.add(make_request("b", 4, max_tokens=2))
    world.steps(1)
    assert binding(world) == "tokens"
    world.run()


def test_tokens_of_a_whole_prompt(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig("continuous", budget=64))
    for id in "ab":
        world.add(make_request(id, 40, max_tokens=2))
    world.steps(1)
    assert binding(world) == "tokens"
    world.run()


@pytest.mark.parametrize(("admission", "reason"), [("optimistic", "blocks"), ("reserve", "blocks"), ("peak", "gate")])
def test_memory(make_rig: MakeRig, make_request: MakeRequest, admission: str, reason: str) -> None:
    world = World(make_rig(num_blocks=10, admission=admission))
    world.add(make_request("a", 25, max_tokens=10))
    world.add(make_request("b", 20, max_tokens=10))
    world.steps(4)
    assert binding(world) == reason
    world.run()


def test_slo(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig(slo_itl=0.05))
    world.add(make_request("a", 4, max_tokens=40))
    world.steps(20)
    world.add(make_request("b", 20, max_tokens=2))
    world.steps(2)
    assert binding(world) == "slo", "each step takes 0.1 s"
    world.run()


def test_delay(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig(max_batch_delay=1.0))
    world.add(make_request("a", 4, max_tokens=2))
    world.engine.step()
    assert binding(world) == "delay"
    world.run()


def test_batch(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig("static"))
    world.add(make_request("a", 4, max_tokens=5))
    world.steps(2)
    world.add(make_request("b", 4, max_tokens=5))
    world.steps(1)
    assert binding(world) == "batch"
    world.run()


def test_the_reason_stays_when_another_passes(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """B3: a request of a higher class boards meanwhile; the first in the queue still waits for the same."""
    world = World(make_rig(order="priority", num_blocks=20, max_model_len=72, caching=False))
    world.add(make_request("a", 24, max_tokens=30))
    world.steps(1)
    world.add(make_request("big", 60, max_tokens=4, priority=5))
    world.steps(1)
    world.add(make_request("quick", 1, max_tokens=8))
    for _ in range(5):
        world.steps(1)
        assert [view.reason for view in world.ask().requests if view.position] == ["blocks"]
        assert binding(world) == "blocks"
    world.run()


def test_the_reason_is_that_of_who_was_tried(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """B3: by longest-prefix the next to board need not be the first in the line."""
    world = World(make_rig(order="longest-prefix", num_blocks=20, max_num_seqs=4, budget=64))
    world.add(make_request("seed", range(5000, 5032), max_tokens=1))
    world.run()
    world.add(make_request("a", 40, max_tokens=10))
    world.steps(1)
    world.add(make_request("small", 8, max_tokens=2))
    world.add(make_request("big", [*range(5000, 5032), *range(7000, 7030)], max_tokens=2))
    world.steps(1)
    reasons = {view.id: view.reason for view in world.ask().requests if view.position}
    assert reasons == {"small": "order", "big": "blocks"}
    world.run()


def test_those_behind_wait_for_their_turn(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """B3, S5: the order's or the other tenant's."""
    for fair, reason in ((False, "order"), (True, "fairness")):
        world = World(make_rig(max_num_seqs=1, fair=fair))
        for id, tenant in (("a", "A"), ("b", "A"), ("c", "A"), ("d", "D")):
            world.add(make_request(id, 4, max_tokens=9, tenant=tenant))
        world.steps(2)
        waiting = [view for view in world.ask().requests if view.position]
        assert [view.position for view in waiting] == [1, 2, 3]
        reasons = {view.id: view.reason for view in waiting}
        assert next(iter(reasons.values())) == "slots"
        if fair:
            assert list(reasons) == ["d", "b", "c"] and set(list(reasons.values())[1:]) == {reason}
        else:
            assert list(reasons) == ["b", "c", "d"] and set(list(reasons.values())[1:]) == {reason}
        world.run()


def test_every_word_is_explained(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """All that events and reasons of a wild run say."""
    rig = make_rig(num_blocks=9, host_blocks=6, caching=False, budget=8, max_num_seqs=4)
    world, words = World(rig), set[str]()
    for i in range(12):
        world.add(make_request(f"r{i}", 3 + 2 * (i % 5), max_tokens=13))
    while world.engine.step():
        words |= {view.reason for view in world.ask().requests if view.reason}
    for i in range(12):
        words |= {line.what for line in world.ask(f"r{i}").life}
    assert {"queued", "boarded", "chunk", "decode", "waits", "ended", "swapped out", "swapped in"} <= words
    assert words <= set(EXPLANATIONS)


# -- a report


def test_a_report_of_all(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """B3: the running in the order of boarding, then the waiting in the queue's."""
    world = World(make_rig(max_num_seqs=2, num_blocks=40))
    for id, n, priority in (("a", 2, 0), ("b", 1, 3), ("c", 2, 0)):
        world.add(make_request(id, 6, max_tokens=9, n=n, priority=priority, tenant="T"))
    world.steps(3)
    report = world.ask()
    assert [(v.id, v.index, v.state, v.position) for v in report.requests] == [
        ("a", 0, "running", None),
        ("a", 1, "running", None),
        ("b", 0, "waiting", 1),
        ("c", 0, "waiting", 2),
    ]
    a, _, b, _ = report.requests
    assert (a.num_prompt, a.num_output, a.num_computed, a.num_blocks, a.reason) == (6, 3, 8, 2, None)
    assert (b.num_output, b.num_blocks, b.priority, b.tenant) == (0, 0, 3, "T")
    assert a.waited == b.waited == pytest.approx(0.3)
    assert (report.question, report.life) == (1, ())
    world.run()
    assert world.ask().requests == ()


def test_a_report_of_one(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig())
    for id in "ab":
        world.add(make_request(id, 6, max_tokens=3, n=2))
    world.steps(2)
    assert [(v.id, v.index) for v in world.ask("b").requests] == [("b", 0), ("b", 1)]
    assert world.ask("b").life and world.ask("nobody") == Report(1)
    world.run()
    assert world.ask("b").requests == () and world.ask("b").life, "its life can be read when it is over"


def test_a_swapped_request_shows_where_it_is(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig(num_blocks=9, caching=False, host_blocks=20, preemption_mode="swap"))
    for id in "abc":
        world.add(make_request(id, 11, max_tokens=13))
    while not world.rig.scheduler.waiting.num_preempted:
        world.steps(1)
    (view,) = [view for view in world.ask().requests if view.position]
    assert (view.state, view.num_blocks, view.num_preemptions, view.num_computed) == ("preempted", 0, 1, 0)
    assert view.num_host_blocks == 3
    world.run()


def test_the_engine_answers_questions(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """Each with its number; also when it has nothing else to do, and of what came in the same breath."""
    world = World(make_rig())
    world.inbox.append(Inspect(7))
    assert not world.engine.step()
    world.add(make_request("a", 4, max_tokens=3))
    world.inbox += [Inspect(8), Inspect(9, "a"), Inspect(10, "b"), Abort("a"), Inspect(11)]
    world.engine.step()
    assert [report.question for report in world.answers] == [7, 8, 9, 10, 11]
    assert [len(report.requests) for report in world.answers] == [0, 1, 1, 0, 0]


def test_the_start_is_estimated_by_how_fast_the_queue_moves(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """B3: one boards every half second. Before two have boarded nobody knows."""
    world = World(make_rig(max_num_seqs=1))
    for i in range(30):
        world.add(make_request(f"r{i}", 4, max_tokens=5))
    world.steps(2)
    assert {view.estimated_start for view in world.ask().requests} == {None}
    world.steps(60)
    estimates = {view.position: view.estimated_start for view in world.ask().requests if view.position}
    assert all(estimates[k] == pytest.approx(0.5 * k) for k in estimates) and len(estimates) > 10
    assert [view.estimated_start for view in world.ask().requests if not view.position] == [None]


# -- a life


@pytest.mark.parametrize("depth", [1, 2])
def test_a_life_step_by_step(make_rig: MakeRig, make_request: MakeRequest, depth: int) -> None:
    """Decodes in a row are one line, whatever the depth; what was computed for nothing after the end is none."""
    world = World(make_rig(budget=16, stop_rate=1.0), depth)
    world.add(make_request("a", 40, max_tokens=20, min_tokens=6, stop_ids=[7]))
    world.run()
    assert world.life("a") == [
        ("queued", 0, 0),
        ("boarded", 0, 0),
        ("chunk", 0, 0),
        ("chunk", 1, 1),
        ("chunk", 2, 2),
        ("decode", 3, 8),
        ("ended", 8 + depth, 8 + depth),
    ]
    details = {line.what: line.detail for line in world.ask("a").life}
    assert details["queued"] == "prompt of 40 tokens" and details["ended"] == "stop after 7 tokens"
    assert details["chunk"] == "8 tokens from 32" and details["decode"] == "beside 0 others"
    assert details["boarded"] == "0 of 40 tokens known"


def test_a_new_line_begins_when_the_company_changes(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig())
    world.add(make_request("a", 4, max_tokens=8))
    world.steps(3)
    world.add(make_request("b", 4, max_tokens=2))
    world.run()
    lines = [(line.step, line.last_step, line.detail) for line in world.ask("a").life if line.what == "decode"]
    assert lines == [(1, 2, "beside 0 others"), (3, 4, "beside 1 other"), (5, 7, "beside 0 others")]


def test_a_life_with_waits_and_preemption(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """M11: for want of what, and what it cost; each wait once."""
    world = World(make_rig(num_blocks=9, caching=False, max_num_seqs=3))
    for id in "abcd":
        world.add(make_request(id, 11, max_tokens=13))
    world.run()
    whats = [what for what, _, _ in world.life("c")]
    assert whats[:2] == ["queued", "boarded"] and whats[-1] == "ended"
    preempted = whats.index("preempted")
    assert "decode" in whats[:preempted] and "boarded" in whats[preempted:]
    (line,) = [line for line in world.ask("c").life if line.what == "preempted"][:1]
    assert line.detail == "for want of blocks: 3 blocks, 12 tokens"
    waits = [line.detail for line in world.ask("d").life if line.what == "waits"]
    assert waits[0] == "slots" and len(waits) <= 4, "not each step anew"


def test_samples_have_lives_of_their_own(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig())
    world.add(make_request("a", 4, max_tokens=6, n=2))
    world.steps(3)
    world.inbox.append(Abort("a", 1))
    world.run()
    lines = [(line.index, line.what, line.step, line.last_step) for line in world.ask("a").life]
    assert (1, "decode", 1, 2) in lines and (0, "decode", 1, 2) in lines
    assert (0, "decode", 3, 5) in lines
    assert [line for line in lines if line[1] == "ended"] == [(1, "ended", 3, 3), (0, "ended", 6, 6)]


def test_seconds_count_from_its_arrival(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig())
    world.clock.advance(100.0)
    world.add(make_request("a", 4, max_tokens=4))
    world.run()
    assert [(line.what, round(line.seconds, 3)) for line in world.ask("a").life] == [
        ("queued", 0.0),
        ("boarded", 0.0),
        ("chunk", 0.0),
        ("decode", 0.1),
        ("ended", 0.4),
    ]


def test_an_id_used_again_has_a_life_of_its_own(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = World(make_rig())
    for max_tokens in (9, 2):
        world.add(make_request("a", 4, max_tokens=max_tokens))
        world.run()
    life = world.ask("a").life
    assert [line.what for line in life].count("queued") == 1
    assert life[0] == LifeLine(0.0, 9, 9, 0, "queued", "prompt of 4 tokens")


def failing(rig: Any, step_id: int) -> World:
    """A world in which this step fails."""
    rig.executor.fails = lambda plan: plan.step_id == step_id
    world = World(rig)
    rig.executor.submit = type(rig.executor).submit.__get__(rig.executor)
    return world


def test_a_step_that_failed_is_no_decode(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = failing(make_rig(), 2)
    world.add(make_request("a", 4, max_tokens=5))
    world.run()
    assert [what for what in world.life("a") if what[0] != "waits"] == [
        ("queued", 0, 0),
        ("boarded", 0, 0),
        ("chunk", 0, 0),
        ("decode", 1, 1),
        ("preempted", 3, 3),
        ("boarded", 3, 3),
        ("chunk", 3, 3),
        ("decode", 4, 5),
        ("ended", 6, 6),
    ]


def test_what_a_failed_step_did_is_known_at_once(make_rig: MakeRig, make_request: MakeRequest) -> None:
    world = failing(make_rig(), 1)
    world.add(make_request("a", 4, max_tokens=5))
    world.steps(2)
    assert world.life("a")[-1][0] == "preempted"
    world.run()


def test_only_the_last_steps_are_kept(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """M5: a ring. Of a longer life the end can be read, and what is asked of it is small."""
    world = World(make_rig(max_model_len=64))
    world.engine.flight_recorder = FlightRecorder(most_steps=10)
    world.add(make_request("a", 4, max_tokens=40))
    world.run()
    assert len(world.engine.flight_recorder._steps) == 10
    assert world.life("a") == [("decode", 30, 39), ("ended", 40, 40)]
    assert world.ask("a").life[0].seconds == 0.0


def test_no_token_is_kept(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """The recorder holds ids and counts: what users wrote does not outlive their requests there."""
    world = World(make_rig())
    world.add(make_request("a", [901, 902, 903, 904], max_tokens=3))
    world.run()
    assert not any(str(token) in repr(world.engine.flight_recorder._steps) for token in (901, 902, 903, 904))
