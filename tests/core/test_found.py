"""Faults that were found by reading and by attack, each as a small scenario of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from chairlift.core.clock import VirtualClock
from chairlift.core.engine import Engine
from chairlift.core.layout import most_held
from chairlift.core.plan import Capacity, StepPlan
from chairlift.core.policy import make_policy
from chairlift.core.ports import Abort, Add, Message, Pin, Report
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.core.scheduler import Scheduler, Settings
from chairlift.errors import ParameterError, RequestRefused, StepFailed
from chairlift.sim.shadow import ShadowExecutor

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]


class Inbox:
    """Messages for an engine, and what it says."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.outputs: list[Any] = []

    def take(self, idle: bool, until: float | None = None) -> list[Message]:
        taken, self.messages = self.messages, []
        return taken

    def put(self, outputs: Any, stats: Any) -> None:
        self.outputs += outputs

    def answer(self, report: Report) -> None:
        raise AssertionError("nobody asked")


class FailsLate(ShadowExecutor):
    """Fails each step that computes a position of one request past a limit."""

    failures = 0

    def fails(self, plan: StepPlan) -> bool:
        bad = any(item.request_id == "bad" and item.start + len(item.token_ids) > 20 for item in plan.items)
        self.failures += bad
        return bad


@pytest.mark.parametrize("depth", [1, 2])
def test_who_fails_late_in_its_prompt_ends_too(make_rig: MakeRig, make_request: MakeRequest, depth: int) -> None:
    """Good steps before the bad one must not clear it each time: nobody would ever get on."""
    rig = make_rig(executor=FailsLate, budget=8)
    inbox = Inbox()
    engine = Engine(rig.scheduler, rig.executor, inbox, inbox, VirtualClock(), depth=depth)
    for request in (make_request("good", 6, max_tokens=20), make_request("bad", 30, max_tokens=4)):
        rig.executor.expect(request)
        inbox.messages.append(Add(request))
    for _ in range(400):
        engine.step()
    ends = {output.request_id: output.finish_reason for output in inbox.outputs if output.finish_reason}
    assert ends == {"good": FinishReason.LENGTH, "bad": FinishReason.ERROR}
    rig.check_empty()


class FailsTwice(ShadowExecutor):
    """Fails some steps by their number."""

    bad_steps: tuple[int, ...] = ()

    def fails(self, plan: StepPlan) -> bool:
        return plan.step_id in self.bad_steps


def test_a_suspect_that_needs_all_memory_does_not_break_a_beam_search(
    make_rig: MakeRig, make_request: MakeRequest
) -> None:
    rig = make_rig(executor=FailsTwice, num_blocks=16, max_model_len=40, max_preemptions=0, max_num_seqs=6)
    rig.executor.bad_steps = (4, 5)
    inbox = Inbox()
    engine = Engine(rig.scheduler, rig.executor, inbox, inbox, VirtualClock())
    search: dict[str, Any] = {"n": 3, "use_beam_search": True, "temperature": 0.0, "max_tokens": 9}
    for request in (make_request("beams", 6, **search), make_request("x", 20, max_tokens=12)):
        rig.executor.expect(request)
        inbox.messages.append(Add(request))
    for _ in range(200):
        engine.step()
    ends = [output.finish_reason for output in inbox.outputs if output.finish_reason]
    assert ends == [FinishReason.LENGTH] * 4
    rig.check_empty()


def test_nobody_makes_way_for_memory_that_a_prompt_was_promised(make_rig: MakeRig) -> None:
    """With --admission reserve the next pieces of a prompt are its own already."""
    rig = make_rig(admission="reserve", order="priority", num_blocks=24, budget=8, max_model_len=64)
    rig.add("low", 4, max_tokens=30, priority=5)
    rig.step()
    rig.add("high", 48, max_tokens=4, priority=0)
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_a_place_that_was_made_in_vain_is_not_kept(make_rig: MakeRig) -> None:
    """Who could not board after others made way does not keep a higher class from boarding."""
    rig = make_rig(order="priority", num_blocks=20, block_size=2, max_num_seqs=8, budget=64, max_model_len=40)
    for i in range(4):
        rig.add(f"low{i}", 7, max_tokens=30, priority=3)
    for _ in range(3):
        rig.step()
    rig.add("middle", 12, max_tokens=4, priority=1)
    rig.step()
    rig.add("high", 1, max_tokens=2, priority=0)
    rig.step()
    assert rig.tokens("high"), "it needs one block, and nobody comes before it"
    rig.run()


def test_peak_does_not_preempt_in_vain(make_rig: MakeRig) -> None:
    """If the gate would not let it board even then, nobody leaves for it."""
    rig = make_rig(admission="peak", order="priority", num_blocks=20, max_model_len=64, budget=64)
    rig.add("equal", 8, max_tokens=50, priority=0)
    rig.add("low", 4, max_tokens=4, priority=3)
    rig.step()
    rig.add("high", 8, max_tokens=50, priority=0)
    rig.step()
    assert rig.scheduler.stats().total_preemptions == 0
    rig.run()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_decode_of_a_higher_class_does_not_wait_for_a_lower_one(make_rig: MakeRig, depth: int) -> None:
    """S3: when memory runs out, the lower class makes room, whoever boarded first."""
    rig = make_rig(order="priority", num_blocks=8, block_size=4, max_num_seqs=4, max_model_len=32, caching=False)
    rig.add("low", 6, max_tokens=20, priority=5)
    rig.add("high", 6, max_tokens=20, priority=0)
    waits = 0
    while rig.scheduler.has_work and not rig.ends("high"):
        before = len(rig.tokens("high"))
        rig.step()
        waits += len(rig.tokens("high")) == before
    assert waits <= 1
    rig.run()


def test_a_pinned_beginning_leaves_unbounded_requests_a_place(make_rig: MakeRig, make_request: MakeRequest) -> None:
    """A cache of just the context's length, some of it pinned: the longest context shrinks, nobody is refused."""
    rig = make_rig(num_blocks=16, max_model_len=64)
    executor = rig.executor
    prefix = tuple(range(500, 512))
    request = make_request("chat", [*prefix, 1, 2, 3], max_tokens=None)
    executor.expect(make_request("pin-0", [*prefix, prefix[-1]], max_tokens=1, temperature=0.0))
    executor.expect(request)
    inbox = Inbox(Pin(prefix), Add(request))
    engine = Engine(rig.scheduler, executor, inbox, inbox, VirtualClock())
    while engine.step():
        pass
    ends = {output.request_id: output.finish_reason for output in inbox.outputs if output.finish_reason}
    assert ends == {"pin-0": FinishReason.LENGTH, "chat": FinishReason.LENGTH}
    assert request.max_len == 64 - 12


def test_many_deadlines_cost_no_more_than_some(make_rig: MakeRig) -> None:
    """Rule 14: what has ended is forgotten by one pass, not by one for each."""
    rig = make_rig(num_blocks=400)
    for i in range(300):
        rig.add(f"r{i}", 3, max_tokens=2, deadline_ms=1e6)
    rig.run()
    for i in range(300):
        rig.add(f"s{i}", 3, max_tokens=2, deadline_ms=1e6)
    assert len(rig.scheduler._deadlines._entries) <= 4 * 300 + 100
    rig.run()


@pytest.mark.parametrize(("windows", "chunk"), [((0,), 64), ((0, 512, 512), 512), ((7,), 3)])
def test_what_a_runner_plans_for_is_what_a_request_may_hold(windows: tuple[int, ...], chunk: int) -> None:
    """One formula: a request of the full length is never refused for want of a few blocks of a window."""
    blocks = most_held(windows, 1000, 16, chunk)
    capacity = Capacity(blocks, 16, 1000, windows=windows)
    scheduler = Scheduler(
        capacity, make_policy("chunked"), Settings(max_num_seqs=1, max_num_batched_tokens=chunk, check=True)
    )
    params = SamplingParams(max_tokens=10, temperature=0.0)
    scheduler.add(Request(id="a", token_ids=list(range(990)), num_prompt=990, params=params, seed=0))


def test_views_of_waiting_tenants_come_in_turns(make_rig: MakeRig) -> None:
    """B3: positions with fairness are those in which they will board, not tenant after tenant."""
    rig = make_rig(fair=True, max_num_seqs=1)
    rig.add("first", 4, max_tokens=30, tenant="z")
    rig.step()
    for i in range(4):
        rig.add(f"a{i}", 8, tenant="a")
    rig.add("b0", 8, tenant="b")
    assert [request.id for request in rig.scheduler.waiting][:3] in (["a0", "b0", "a1"], ["b0", "a0", "a1"])
    rig.run()


def test_most_stop_ids_and_beams_go_together(make_rig: MakeRig) -> None:
    """A runner lists no more than 1024 tokens, however many might end a beam."""
    rig = make_rig(max_num_seqs=8)
    ids = list(range(2000, 3024))
    request = rig.add("a", 4, stop_ids=ids, n=8, use_beam_search=True, temperature=0.0, max_tokens=2)
    plan = rig.step()
    assert plan.items[0].num_logprobs == 1024
    rig.abort(request.id)


def test_aborting_all_leaves_nothing(make_rig: MakeRig, make_request: MakeRequest) -> None:
    rig = make_rig(order="priority", fair=True, num_blocks=12, max_model_len=32)
    inbox = Inbox()
    engine = Engine(rig.scheduler, rig.executor, inbox, inbox, VirtualClock(), depth=2)
    for i in range(8):
        request = make_request(f"r{i}", 6, max_tokens=9, n=1 + i % 3, tenant="ab"[i % 2], priority=i % 3)
        rig.executor.expect(request)
        inbox.messages.append(Add(request))
    for _ in range(5):
        engine.step()
    inbox.messages += [Abort(f"r{i}") for i in range(8)]
    while engine.step():
        pass
    rig.check_empty()


def test_a_search_has_no_first_token_to_be_in_time() -> None:
    """S9: nothing of it is heard before its end, so only ``deadline_ms`` has a meaning."""
    with pytest.raises(ParameterError, match="ttft_ms has no effect with use_beam_search"):
        SamplingParams(n=2, use_beam_search=True, temperature=0.0, ttft_ms=100)


@pytest.mark.parametrize("length", [0, 80])
def test_a_pin_that_is_refused_changes_nothing(make_rig: MakeRig, length: int) -> None:
    rig = make_rig(num_blocks=100, max_model_len=64)
    with pytest.raises(RequestRefused, match=r"empty|80|81"):
        rig.scheduler.pin(range(length))
    assert rig.kv.num_pinned == 0 and not rig.scheduler.has_work and rig.scheduler._longest == 64
    rig.add("a", 60, max_tokens=4)
    rig.run()


def test_what_has_no_room_beside_a_pinned_prefix_is_told_so(make_rig: MakeRig) -> None:
    """M1: --max-model-len would not help."""
    rig = make_rig(num_blocks=30, max_model_len=96)
    rig.scheduler.pin(range(40))
    rig.executor.expect(next(iter(rig.scheduler.waiting)))
    rig.step()
    with pytest.raises(RequestRefused, match=r"beside the pinned prefixes.*--kv-cache-memory"):
        rig.add("a", 90)


@pytest.mark.parametrize("error", [StepFailed("gone"), RuntimeError("broken")])
def test_closing_closes_the_executor_whatever_fails(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """D5: else the disk stays locked."""
    rig, closed = make_rig(), []
    inbox = Inbox()
    engine = Engine(rig.scheduler, rig.executor, inbox, inbox, VirtualClock(), depth=2)
    rig.add("a", 4, max_tokens=9)
    engine.step()

    def fail(handle: Any) -> Any:
        raise error

    monkeypatch.setattr(rig.executor, "result", fail)
    monkeypatch.setattr(rig.executor, "close", lambda: closed.append(True))
    with suppress(RuntimeError):
        engine.close()
    assert closed == [True]
