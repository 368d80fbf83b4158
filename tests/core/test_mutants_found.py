"""What no other test noticed when it was broken on purpose (see ``tests/mutation``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import inf
from typing import Any

import pytest

from chairlift.core.deadlines import Deadlines
from chairlift.core.order import PATIENCE, make_order
from chairlift.core.pace import Pace, Work
from chairlift.core.plan import BlockOpKind, Event, StepPlan, StepRecord, StepResult, StepStats
from chairlift.core.queue import WaitingQueue
from chairlift.core.recorder import FlightRecorder
from chairlift.core.request import Request, SamplingParams
from chairlift.core.shares import Shares
from chairlift.errors import RequestRefused

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]
MakeStore = Callable[..., Any]


# -- requests


def test_a_copy_is_a_request_of_the_same_client() -> None:
    """A sample or a beam has all that its request came with, and none of its KV."""
    params = SamplingParams(n=2, max_tokens=3, deadline_ms=5.0)
    request = Request(
        id="a", token_ids=[1, 2, 3, 4], num_prompt=3, params=params, seed=7, stop_ids=frozenset([9]), tenant="t",
        priority=2, arrival=1.5, max_len=6, ticket=5, queued_at=2.5, num_cached_tokens=1, num_preemptions=2,
        num_charged=3, num_prompt_logprobs=2, num_computed=4, num_planned=4, block_table=[1, 2],
    )  # fmt: skip
    copy = request.copy(1, 3)
    inherited = ("id", "num_prompt", "params", "seed", "stop_ids", "tenant", "priority", "arrival", "max_len", "ticket",
                 "queued_at", "num_cached_tokens", "num_preemptions", "num_charged", "num_prompt_logprobs")  # fmt: skip
    own = {"index": 1, "token_ids": [1, 2, 3]}
    for field in dataclasses.fields(Request):
        value = getattr(copy, field.name)
        if field.name in inherited:
            assert value == getattr(request, field.name), field.name
        elif field.name in own:
            assert value == own[field.name]
        elif field.default_factory is not dataclasses.MISSING:
            assert value == field.default_factory(), field.name
        else:
            assert value == field.default, field.name


# -- deadlines, orders


def test_the_newest_deadline_is_kept_when_others_are_forgotten(make_request: MakeRequest) -> None:
    """S9: a request is watched before it is among the live ones."""
    deadlines = Deadlines()
    for ticket in range(500):
        request = make_request(f"r{ticket}", 4, ttft_ms=10.0, deadline_ms=20.0)
        request.ticket = ticket
        deadlines.watch(request, {})
        assert {entry[1] for entry in deadlines._entries} >= {ticket}
    assert len([request for request in deadlines.due(inf) if request.ticket == 499]) == 2


def test_the_time_of_a_first_token_counts_until_it_has_come(make_request: MakeRequest) -> None:
    """S9: who was preempted after it goes by its deadline, or waits like those without one."""
    order = make_order("deadline")
    request = make_request("a", 4, ttft_ms=1000.0, arrival=3.0)
    request.queued_at = 3.0
    assert order.key(request) == 4.0
    request.token_ids.append(1)
    assert order.key(request) == 3.0 + PATIENCE


def test_of_two_lower_classes_the_lowest_makes_way(make_rig: MakeRig) -> None:
    """S3: whoever boarded last, and though either would do."""
    rig = make_rig(max_num_seqs=2, order="priority")
    rig.add("lowest", 4, max_tokens=20, priority=9)
    rig.add("low", 4, max_tokens=20, priority=5)
    rig.step()
    rig.add("high", 4, max_tokens=2, priority=0)
    rig.step()
    assert [request.id for request in rig.scheduler.running.values()] == ["low", "high"]
    rig.run()


# -- tenants


def test_who_is_here_is_not_lifted_by_its_next_request(make_request: MakeRequest) -> None:
    """S5: only who comes back after a pause begins where the served are, and it is away when its last request is."""
    shares = Shares()
    shares.join("B")
    shares.join("B")
    shares.join("A")
    shares.charge(make_request("a", 50, tenant="A"), 0, 50)
    shares.serve("A")
    shares.join("B")
    assert shares.counter("B") == 0
    shares.leave("B")
    shares.join("B")
    assert shares.counter("B") == 0
    for _ in range(3):
        shares.leave("B")
    shares.join("B")
    assert shares.counter("B") == 50


def test_a_weight_is_that_of_the_tenant_or_of_its_user() -> None:
    """A tenant is an API key, a slash, and the user that the request names."""
    shares = Shares({"bob": 2.0, "key/eve": 3.0, "eve": 5.0})
    assert [shares.weight(tenant) for tenant in ("bob", "key/bob", "key/eve", "other/eve", "key/joe")] == [
        2,
        2,
        3,
        5,
        1,
    ]


def test_a_slot_passes_to_who_was_served_less_and_would_hold_no_more(make_request: MakeRequest) -> None:
    """S5: all samples of the newcomer count, and slots alone give no claim."""
    shares = Shares()
    a, b, many = (make_request(id, 4, tenant=id[0], n=n) for id, n in (("A", 1), ("B", 1), ("B3", 3)))
    for tenant in "AB":
        shares.join(tenant)
    shares.slots.update({"A": 3})
    assert shares.outranks(b, a)
    assert not shares.outranks(many, a), "it would hold three and the other two"
    shares.charge(b, 0, 4)
    assert not shares.outranks(b, a), "it was served more"


def test_a_prompt_aboard_waits_for_a_tenant_that_was_served_less(make_rig: MakeRig) -> None:
    """S5: the tokens of a step go by what tenants were served, before they go by who came first."""
    rig = make_rig(fair=True, budget=16, num_blocks=200)
    rig.add("a", 60, max_tokens=2, tenant="A")
    rig.step()
    rig.add("b", 10, max_tokens=2, tenant="B")
    plan = rig.step()
    assert [(item.request_id, len(item.token_ids)) for item in plan.items] == [("b", 10), ("a", 6)]
    rig.run()


def test_tenants_that_leave_unserved_leave_nothing_behind(make_request: MakeRequest) -> None:
    """M5: while nobody boards, each that comes and goes would leave its place in the heap."""
    queue = WaitingQueue(make_order("fcfs"), Shares())
    queue.push(make_request("stays", 4, tenant="stays"))
    for i in range(1000):
        request = make_request(f"r{i}", 4, tenant=f"t{i}")
        queue.push(request)
        queue.remove(request)
    assert len(queue) == 1 and len(queue._least_served) < 100


# -- KV


def test_a_copy_back_says_what_must_be_there(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Only so can a runner tell that a block on disk is damaged: full blocks by their hash, and a part of one by none."""
    store = make_store(4, 4, disk_blocks=8)
    request = store.compute(make_request("a", 10))
    store.swap_out(request)
    store.compute(make_request("b", 16))
    store.release(store.live[-1])
    store.compute(request)
    out, back = (
        [op.content for op in store.ops if op.kind is kind] for kind in (BlockOpKind.SWAP_OUT, BlockOpKind.SWAP_IN)
    )
    assert back == out[:3]
    assert [bool(content) for content in back] == [True, True, False]


def test_pinned_blocks_are_not_for_requests(make_rig: MakeRig) -> None:
    """M1: who would need them is refused, or would wait for ever."""
    rig = make_rig(num_blocks=10, max_model_len=40)
    rig.scheduler.pin(range(8))
    rig.executor.expect(next(iter(rig.scheduler.waiting)))
    rig.step()
    with pytest.raises(RequestRefused):
        rig.add("too large", 30, max_tokens=10)
    rig.add("just fits", 22, max_tokens=10)
    while rig.scheduler.has_work:
        rig.step()
    assert len(rig.tokens("just fits")) == 10


# -- pace


def test_many_steps_that_are_all_alike_leave_the_model_sound() -> None:
    """S2: an hour of equal steps teaches nothing of others, and must not make the estimate overflow."""
    pace = Pace()
    for _ in range(200_000):
        pace.learn(Work(8, 800), 0.01)
    assert pace.seconds(Work(8, 800)) == pytest.approx(0.01)
    for tokens in range(1, 200):
        pace.learn(Work(tokens, 100 * tokens), 0.002 + 0.001 * tokens)
    assert pace.seconds(Work(100, 10_000)) == pytest.approx(0.102, rel=0.01)


# -- the flight recorder


def test_a_swap_in_is_a_boarding_too() -> None:
    """B3: when nobody new boards, the queue moves all the same."""
    recorder = FlightRecorder()
    for step in range(3):
        event = Event(step, 2.0 * step, f"r{step}", 0, "swapped in")
        plan, result = StepPlan(step, ()), StepResult(step, (), ())
        recorder.add(StepRecord(plan, result, (), StepStats(), 2.0 * step, 2.0 * step, (event,)))
    assert recorder._boarding_seconds == 2.0
