"""The loop: messages in, one step, outputs out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from chairlift.core.clock import VirtualClock, WallClock
from chairlift.core.engine import Engine
from chairlift.core.plan import Output, StepPlan, StepRecord, StepResult, StepStats
from chairlift.core.ports import Abort, Add, Message, Report
from chairlift.core.request import FinishReason, Request

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]


class Script:
    """A source that gives one batch of messages a step, and a sink that keeps everything."""

    def __init__(self, *batches: Sequence[Message]) -> None:
        self.batches = list(batches)
        self.idle: list[bool] = []
        self.until: list[float | None] = []
        self.answers: list[Report] = []
        self.puts: list[tuple[list[Output], StepStats]] = []

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        self.idle.append(idle)
        self.until.append(until)
        return self.batches.pop(0) if self.batches else ()

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        self.puts.append((list(outputs), stats))

    def answer(self, report: Report) -> None:
        self.answers.append(report)

    @property
    def outputs(self) -> list[Output]:
        return [output for outputs, _ in self.puts for output in outputs]


def make_engine(rig: Any, script: Script, **kwargs: Any) -> Engine:
    for batch in script.batches:
        for message in batch:
            if isinstance(message, Add):
                rig.executor.expect(message.request)
    return Engine(rig.scheduler, rig.executor, script, script, kwargs.pop("clock", VirtualClock()), **kwargs)


def test_an_idle_engine_does_nothing_and_says_so(make_rig: MakeRig) -> None:
    script = Script()
    engine = make_engine(make_rig(), script)
    assert not engine.step() and not engine.step()
    assert script.idle == [True, True], "the source may wait"
    assert script.puts == []


def test_a_request_runs_to_its_end(make_rig: MakeRig, make_request: MakeRequest) -> None:
    script = Script([Add(make_request("a", 4, max_tokens=3))])
    engine = make_engine(make_rig(), script)
    assert [engine.step() for _ in range(4)] == [True, True, True, False]
    assert script.idle == [True, False, False, True], "the source must not wait while there is work"
    assert [len(output.new_token_ids) for output in script.outputs] == [1, 1, 1]
    assert script.outputs[-1].finish_reason is FinishReason.LENGTH
    assert script.puts[-1][1].num_running == 0


def test_a_refusal_is_an_output_for_each_sample(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """M1, M8: what cannot run ends with an error that says why, at once, and the engine lives."""
    script = Script([Add(make_request("big", 100, n=2))], [Add(make_request("small", 4, max_tokens=1))])
    engine = make_engine(make_rig(), script)
    assert not engine.step(), "nothing to compute"
    assert [(output.request_id, output.index, output.finish_reason) for output in script.outputs] == [
        ("big", 0, FinishReason.ERROR),
        ("big", 1, FinishReason.ERROR),
    ]
    assert all(output.refused and output.error and "max-model-len is 64" in output.error for output in script.outputs)
    assert engine.step()
    assert script.outputs[-1].finish_reason is FinishReason.LENGTH and not script.outputs[-1].refused


def test_a_refusal_among_others_harms_nobody(make_rig: MakeRig, make_request: MakeRequest) -> None:
    requests = [make_request("a", 4, max_tokens=1), make_request("big", 100), make_request("b", 4, max_tokens=1)]
    script = Script([Add(request) for request in requests])
    engine = make_engine(make_rig(), script)
    assert engine.step()
    assert [(output.request_id, output.finish_reason) for output in script.outputs] == [
        ("big", FinishReason.ERROR),
        ("a", FinishReason.LENGTH),
        ("b", FinishReason.LENGTH),
    ]


def test_an_abort_frees_before_the_next_step(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """D7: blocks are free within two steps, and the answer says that it was aborted (S10)."""
    rig = make_rig()
    script = Script([Add(make_request("a", 4, max_tokens=9))], [], [Abort("a"), Abort("unknown")])
    engine = make_engine(rig, script)
    assert [engine.step() for _ in range(3)] == [True, True, False]
    assert script.outputs[-1] == Output("a", 0, finish_reason=FinishReason.ABORT)
    assert script.puts[-1][1].free_blocks == rig.capacity.num_blocks
    rig.check_empty()


def test_add_and_abort_in_one_batch(make_rig: MakeRig, make_request: MakeRequest) -> None:
    script = Script([Add(make_request("a", 4, n=3)), Abort("a", 1), Abort("a")])
    engine = make_engine(make_rig(), script)
    assert not engine.step()
    assert [output.index for output in script.outputs] == [0, 1, 2]


def test_rule_10_work_without_a_plan_is_a_bug_and_raises(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """M2: no state may be without a next step, so the engine does not wait in one."""
    rig = make_rig()
    engine = make_engine(rig, Script([Add(make_request("a", 4))]))
    rig.scheduler.settings = replace(rig.scheduler.settings, check=False)
    rig.kv.reserved = rig.capacity.num_blocks  # as if somebody had leaked all blocks
    with pytest.raises(RuntimeError, match="made no plan"):
        engine.step()


def test_each_step_is_recorded_with_the_clocks_times(make_rig: MakeRig, make_request: MakeRequest) -> None:
    rig, clock, records = make_rig(), VirtualClock(10.0), list[StepRecord]()
    submit = rig.executor.submit

    def slow(plan: StepPlan) -> StepResult:
        clock.advance(0.5)
        return submit(plan)

    rig.executor.submit = slow
    script = Script([Add(make_request("a", 4, max_tokens=2))])
    engine = make_engine(rig, script, clock=clock, recorder=records.append)
    while engine.step():
        pass
    assert [(record.started, record.ended) for record in records] == [(10.0, 10.5), (10.5, 11.0)]
    assert [record.plan.step_id for record in records] == [record.result.step_id for record in records] == [0, 1]
    assert [list(record.outputs) for record in records] == [outputs for outputs, _ in script.puts]
    assert [record.stats for record in records] == [stats for _, stats in script.puts]


def test_clocks() -> None:
    clock = VirtualClock()
    clock.advance(0.0)
    clock.advance(1.5)
    assert clock.now() == 1.5
    with pytest.raises(ValueError, match="time cannot go back"):
        clock.advance(-0.1)
    before = time.monotonic()
    assert before <= WallClock().now() <= time.monotonic()
