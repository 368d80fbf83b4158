"""What no other test noticed when it was broken on purpose (see ``tests/mutation``)."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any

import pytest

from chairlift.core.clock import VirtualClock
from chairlift.core.deadlines import Deadlines
from chairlift.core.engine import Engine
from chairlift.core.gates import MOST_SPANS, Optimistic, Peak, _Future
from chairlift.core.kv import Hit
from chairlift.core.order import PATIENCE, make_order
from chairlift.core.pace import MIN_STEPS, MOST_RATIO, Pace, Work
from chairlift.core.plan import BlockOpKind, Event, Output, StepItem, StepPlan, StepRecord, StepResult, StepStats
from chairlift.core.ports import Message, Report
from chairlift.core.queue import WaitingQueue
from chairlift.core.recorder import FlightRecorder
from chairlift.core.request import FinishReason, Request, SamplingParams, Status
from chairlift.core.shares import Shares
from chairlift.errors import RequestRefused, StepFailed
from chairlift.sim.shadow import ShadowExecutor

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]
MakeStore = Callable[..., Any]
Share = Callable[[StepPlan], dict[str, int]]


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
    """Only so can a runner tell that a block on disk is damaged. A block that is not full has no hash."""
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
    """M1: who would need them is cut short or refused, or would wait for ever."""
    rig = make_rig(num_blocks=10, max_model_len=40)
    rig.scheduler.pin(range(8))
    rig.executor.expect(next(iter(rig.scheduler.waiting)))
    rig.step()
    with pytest.raises(RequestRefused):
        rig.add("too long", 32)
    rig.add("longest", 30, max_tokens=10)
    while rig.scheduler.has_work:
        rig.step()
    assert len(rig.tokens("longest")) == 2 and rig.ends("longest") == [FinishReason.LENGTH]


@pytest.mark.parametrize("search", [False, True])
def test_a_promise_is_no_greater_than_what_may_be_needed(make_rig: MakeRig, search: bool) -> None:
    """Three share a whole block and a part of one: each may need a third, and two a copy of the second."""
    params = {"use_beam_search": True, "temperature": 0.0} if search else {}
    rig = make_rig(admission="reserve", caching=False)
    rig.add("a", 6, n=3, max_tokens=6, **params)
    rig.step()
    assert len(rig.scheduler.running) == 3 and rig.kv.reserved == 3 + 2
    rig.run()


# -- boarding and preemption


def test_a_row_that_is_held_is_not_pushed_out(make_rig: MakeRig) -> None:
    """It has ended, and would only board again to leave. A static policy of one's own may board without a promise."""
    rig = make_rig("static", num_blocks=6, caching=False)
    rig.scheduler.policy.gate = Optimistic(0.0)
    rig.add("long", 4, max_tokens=16)
    rig.add("short", 4, max_tokens=1)
    rig.run()
    preempted = {event.request_id for event in rig.scheduler.take_events() if event.what == "preempted"}
    assert preempted == {"long"}
    assert len(rig.tokens("long")) == 16 and len(rig.tokens("short")) == 1


def test_a_swap_pays_for_the_way_back_too(make_rig: MakeRig) -> None:
    """A block that costs as much as three of its four tokens is computed again."""
    rig = make_rig(num_blocks=9, caching=False, host_blocks=20)
    for tokens in range(1, 4 * MIN_STEPS):
        rig.scheduler.pace.learn(Work().plus(0, tokens), 0.001 + 1e-3 * tokens)
    rig.scheduler.pace.learn_swap(10, 10 * 3e-3)
    for id in "abc":
        rig.add(id, 11, max_tokens=13)
    rig.run()
    stats = rig.scheduler.stats()
    assert stats.total_preemptions > 0 and stats.total_swaps == 0


def test_all_samples_must_keep_the_target(make_rig: MakeRig) -> None:
    """S2: a prompt of many samples is a single row, and each of its tokens many. Beside decodes it waits."""
    rig = make_rig(slo_itl=0.02, max_num_seqs=16)
    for tokens in range(1, 4 * MIN_STEPS):
        rig.scheduler.pace.learn(Work().plus(0, tokens), 0.002 * tokens)
    rig.add("first", 4, max_tokens=6)
    rig.step()
    rig.add("many", 2, n=12, max_tokens=4)
    rig.step()
    assert len(rig.scheduler.running) == 1 and rig.scheduler.stats().binding == "slo"
    rig.run()


def test_a_prompt_aboard_goes_on_whatever_the_target(make_rig: MakeRig, share: Share) -> None:
    """M2: it holds memory that others wait for."""
    rig = make_rig(slo_itl=0.01)
    rig.add("a", 4, max_tokens=30)
    rig.step()
    rig.add("long", 60, max_tokens=2)
    rig.step()
    for tokens in range(1, 4 * MIN_STEPS):
        rig.scheduler.pace.learn(Work().plus(0, tokens), 1.0 + tokens)
    assert share(rig.step()) == {"a": 1, "long": 4}
    rig.run()


def test_who_cannot_board_is_not_tried_in_vain(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 14: until something is given back, a full engine's step does nothing for those who wait."""
    rig = make_rig(max_num_seqs=4, num_blocks=8)
    rig.add("a", 20, max_tokens=12)
    rig.add("b", 20, max_tokens=12)
    rig.step()
    rig.step()
    assert rig.scheduler.stats().binding == "blocks"
    monkeypatch.setattr(rig.kv, "lookup", None)
    for _ in range(5):
        rig.step()


def test_a_failed_step_is_no_preemption(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """S4, O3: who only has to begin again is not the nearer to being protected for it."""
    rig = make_rig()
    request = rig.add("a", 4, max_tokens=4)
    rig.step()
    plan = rig.scheduler.schedule(0.0)
    monkeypatch.setattr(rig.executor, "fails", lambda plan: True)
    with pytest.raises(StepFailed):
        rig.executor.result(rig.executor.submit(plan))
    monkeypatch.undo()
    assert rig.scheduler.fail(plan, "broken") == []
    assert request.status is Status.PREEMPTED and request.num_preemptions == 0
    assert rig.scheduler.stats().total_preemptions == 0
    rig.run()


class Picky(ShadowExecutor):
    """Fails each step in which somebody's token is computed, and not its prompt."""

    hates: Callable[[StepItem], bool]

    def fails(self, plan: StepPlan) -> bool:
        return any(self.hates(item) and item.start + len(item.token_ids) > item.num_prompt for item in plan.items)


def run_with_failures(rig: Any, most_steps: int = 100) -> None:
    for _ in range(most_steps):
        if not rig.scheduler.has_work:
            break
        plan = rig.scheduler.schedule(0.0)
        try:
            result = rig.executor.result(rig.executor.submit(plan))
        except StepFailed:
            rig.outputs += rig.scheduler.fail(plan, "broken")
        else:
            rig.outputs += rig.scheduler.commit(plan, result, 0.0)
    rig.check_empty()


def test_a_search_whose_steps_fail_ends(make_rig: MakeRig) -> None:
    """D4: its beams are dropped at each failure, and the failures are not forgotten with them."""
    rig = make_rig(executor=Picky)
    rig.executor.hates = lambda item: item.params.use_beam_search
    rig.add("search", 4, n=2, use_beam_search=True, temperature=0.0, max_tokens=8)
    rig.add("other", 4, max_tokens=8)
    run_with_failures(rig)
    assert rig.ends("search") == rig.ends("search", 1) == [FinishReason.ERROR]
    assert rig.ends("other") == [FinishReason.LENGTH]


def test_a_sample_that_gets_on_does_not_acquit_the_other(make_rig: MakeRig) -> None:
    """D4: they are tried together, and while one's prompt is computed again in pieces the other gets past the fault."""
    rig = make_rig(executor=Picky, budget=4, max_num_seqs=4, caching=False)
    rig.executor.hates = lambda item: item.index == 1
    rig.add("two", 8, n=2, max_tokens=30)
    rig.add("other", 4, max_tokens=8)
    run_with_failures(rig)
    assert rig.ends("two", 1) == [FinishReason.ERROR] and rig.ends("other") == [FinishReason.LENGTH]


def test_who_was_served_more_pushes_out_nobody(make_rig: MakeRig) -> None:
    """S4, S5: whatever its class. The tenant that makes way would be the next to board, and so on for ever."""
    rig = make_rig(fair=True, order="priority", max_num_seqs=1)
    rig.add("big", 40, max_tokens=2, tenant="A", priority=5)
    rig.run()
    rig.add("b", 4, max_tokens=10, tenant="B", priority=5)
    rig.step()
    rig.add("a", 4, max_tokens=2, tenant="A", priority=0)
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_others_make_way_for_one_and_it_boards(make_rig: MakeRig) -> None:
    """While no slot is free the first in line is chosen without a look at its prefix; it keeps the place it got."""
    rig = make_rig(fair=True, order="longest-prefix", max_num_seqs=2)
    rig.add("cached", range(20), max_tokens=1, tenant="B")
    rig.run()
    for id in ("a1", "a2"):
        rig.add(id, 4, max_tokens=40, tenant="A")
    for _ in range(30):
        rig.step()
    rig.add("first", 20, max_tokens=2, tenant="B")
    rig.add("known", [*range(20), 1], max_tokens=2, tenant="B")
    rig.step()
    assert [request.id for request in rig.scheduler.running.values()] == ["a1", "first"]
    rig.run()


def test_who_makes_way_gives_its_memory_to_peak(make_rig: MakeRig) -> None:
    """S3: the gate looks ahead as if those who are to leave had left, and given back what they hold."""
    rig = make_rig(admission="peak", order="priority", num_blocks=19, caching=False)
    rig.add("stays", 4, max_tokens=8, priority=0)
    rig.add("low", 20, max_tokens=40, priority=5)
    rig.step()
    rig.add("high", 20, max_tokens=40, priority=0)
    rig.step()
    assert rig.tokens("high")
    rig.run()


def test_a_decode_waits_for_a_lower_class_no_longer_than_a_step_in_flight(make_rig: MakeRig) -> None:
    """S3: with two steps in flight, who is to make way is left out of one, and leaves before the next."""
    rig = make_rig(order="priority", num_blocks=3, block_size=16, max_model_len=48, caching=False)
    rig.add("low", 18, max_tokens=20, priority=5)
    rig.add("high", 15, max_tokens=10, priority=0)
    flights, steps, scheduler = deque[Any](), [], rig.scheduler
    while scheduler.has_work or flights:
        plan = scheduler.schedule(0.0)
        if plan is not None:
            flights.append((plan, rig.executor.submit(plan)))
            steps.append("high" in {item.request_id for item in plan.items})
        if plan is None or len(flights) == 2:
            plan, handle = flights.popleft()
            rig.outputs += scheduler.commit(plan, rig.executor.result(handle), 0.0)
    assert scheduler.stats().total_preemptions > 0
    waits = "".join("x" if here else " " for here in steps).strip().split("x")
    assert max(map(len, waits)) <= 2, "steps without it, in a row"


def test_half_of_the_cache_can_be_pinned(make_rig: MakeRig) -> None:
    """To compute a prefix once takes as much again. What is refused changes nothing."""
    rig = make_rig(num_blocks=10, max_model_len=40)
    with pytest.raises(RequestRefused, match="half"):
        rig.scheduler.pin(range(20))
    assert rig.kv.num_pinned == 0 and not rig.scheduler.has_work
    rig.scheduler.pin(range(16))
    assert rig.kv.num_pinned == 4


def test_a_pin_leaves_those_who_are_here_what_they_need(make_rig: MakeRig) -> None:
    """M1: a request that came in must be able to run."""
    rig = make_rig(num_blocks=10, max_model_len=40)
    rig.add("large", 28, max_tokens=4)
    with pytest.raises(RequestRefused, match="pin it first"):
        rig.scheduler.pin(range(12))
    rig.run()


# -- peak


def test_peak_never_preempts_though_many_run(make_rig: MakeRig) -> None:
    """Above 16 the time to come is looked at in spans; all that ends within one counts to its end."""
    for seed in range(6):
        rng = Random(seed)
        rig = make_rig(admission="peak", max_num_seqs=60, num_blocks=rng.choice((90, 140, 220)), caching=False)
        for i in range(80):
            rig.add(f"r{i}", rng.randint(1, 6), max_tokens=rng.randint(1, 50))
            if i % 10 == 0:
                rig.step()
        while rig.scheduler.has_work:
            rig.step()
        assert rig.scheduler.stats().total_preemptions == 0, seed
        assert max(len(plan.items) for plan in rig.plans) > MOST_SPANS


def test_a_look_ahead_costs_at_most_16_sums(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 14: each sum is over all who run, so more of them must not mean more sums."""
    rig = make_rig(admission="peak", max_num_seqs=100, num_blocks=120, caching=False)
    for i in range(99):
        rig.add(f"r{i}", 1, max_tokens=1 + i % 50)
    rig.step()
    running, sums = len(rig.scheduler.running), []
    assert running > 30
    monkeypatch.setattr(_Future, "blocks", lambda *span: sums.append(span) or 0)  # as if it always fitted
    head = rig.scheduler.waiting.peek()
    assert Peak().fits(head, Hit(), list(rig.scheduler.running.values()), rig.kv, promised=False)
    assert 0 < len(sums) <= MOST_SPANS * (running + 1)


def test_peak_waits_for_a_prompt_whatever_its_answer(make_rig: MakeRig) -> None:
    """Nobody knows when a prompt in pieces is done, so it gives nothing back."""
    rig = make_rig(admission="peak", order="shortest-prefill", num_blocks=18, budget=2, max_num_seqs=2, caching=False)
    rig.add("slow", 60, max_tokens=1)
    rig.step()
    rig.add("long", 4, max_tokens=40)
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_peak_counts_on_those_who_end(make_rig: MakeRig) -> None:
    """Who comes needs its blocks only when who runs has given back its own."""
    rig = make_rig(admission="peak", num_blocks=9, caching=False)
    rig.add("short", 20, max_tokens=4)
    rig.step()
    rig.add("long", 4, max_tokens=24)
    rig.step()
    assert len(rig.scheduler.running) == 2
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_peak_is_asked_again_when_a_prompt_is_done(make_rig: MakeRig) -> None:
    """From then on it is known when its samples end, though nothing was given back."""
    rig = make_rig(admission="peak", num_blocks=9, caching=False)
    rig.add("two", 8, n=2, max_tokens=4)
    rig.add("long", 4, max_tokens=24)
    rig.step()
    assert rig.scheduler.stats().binding == "gate"
    rig.step()
    assert rig.tokens("long") and not rig.ends("two")
    rig.run()


def test_peak_foresees_the_copies_of_samples(make_rig: MakeRig) -> None:
    """Three samples share a block that is not full; two of them need another for their next token."""
    rig = make_rig("continuous", admission="peak", num_blocks=5, caching=False)
    rig.add("three", 6, n=3, max_tokens=2)
    rig.step()
    rig.add("next", 8, max_tokens=2)
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_peak_keeps_what_it_promised_and_counts_it_once(make_rig: MakeRig) -> None:
    """A beam search has all its memory promised, whatever the gate."""
    beams = {"use_beam_search": True, "n": 2, "temperature": 0.0, "max_tokens": 12}
    rig = make_rig(admission="peak", num_blocks=12, caching=False)
    rig.add("a", 4, max_tokens=20)
    rig.step()
    rig.add("search", 4, **beams)
    rig.step()
    assert "search" in {request.id for request in rig.scheduler.waiting}, "7 blocks beside 6 of 12"
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0
    rig = make_rig(admission="peak", num_blocks=13, caching=False)
    rig.add("search", 4, **beams)
    rig.step()
    rig.add("a", 4, max_tokens=20)
    rig.step()
    assert not rig.scheduler.waiting, "7 blocks beside 6 of 13"
    rig.run()


# -- pace


def test_many_steps_that_are_all_alike_leave_the_model_sound() -> None:
    """S2: what they do not teach is not forgotten, or the estimate would overflow after an hour."""
    pace = Pace()
    for _ in range(10_000):
        pace.learn(Work(8, 800), 0.01)
    assert sum(pace._covariance[i] for i in (0, 3, 5)) < 1e7
    for tokens in range(1, 200):
        pace.learn(Work(tokens, 100 * tokens), 0.002 + 0.001 * tokens)
    assert pace.seconds(Work(100, 10_000)) == pytest.approx(0.102, rel=0.01)


def test_a_step_that_strays_far_does_not_rule_the_next_hundred() -> None:
    """S2: one that took a hundred times as long is bad luck, not a measure."""
    pace = Pace()
    for tokens in range(1, 60):
        pace.learn(Work(tokens, 100 * tokens), 0.001 * tokens)
    pace.learn(Work(30, 3000), 3.0)
    assert pace.safe_seconds(Work(30, 3000)) == pytest.approx(MOST_RATIO * pace.seconds(Work(30, 3000)))


def test_a_target_without_room_for_slow_steps_is_kept_for_most() -> None:
    """M2: a prompt must go on though no chunk is safe: by what the model foresees, and by some tokens in any case."""
    pace = Pace()
    for tokens in range(1, 60):
        pace.learn(Work(tokens, 100 * tokens), 0.001 * tokens)
    pace._ratios.extend([2.0])
    assert pace.chunk(Work(), 0, 100, 0.0) == 0
    assert pace.chunk(Work(), 0, 100, 0.0, least=4) == 4 and pace.chunk(Work(), 0, 3, 0.0, least=4) == 3
    decodes = Work(20, 2000)
    assert pace.safe_seconds(decodes) == pytest.approx(0.04, rel=0.01)
    assert 8 <= pace.chunk(decodes, 0, 100, 0.03) <= 11, "not safe, and kept by a step like most"
    assert pace.chunk(decodes, 0, 100, 0.05) <= 6, "safe"


# -- time


def test_an_engine_that_runs_does_not_wait_for_more(make_rig: MakeRig) -> None:
    """--max-batch-delay-ms is for an idle engine: once it runs, nobody waits for a batch to fill."""
    rig = make_rig(max_num_seqs=3, max_batch_delay=1.0)
    for id in "abc":
        rig.add(id, 4, max_tokens=3 if id == "a" else 9)
    for _ in range(3):
        rig.step()
    rig.now = 0.1
    rig.add("d", 4, max_tokens=2)
    assert "d" in {item.request_id for item in rig.step().items}


class Quiet:
    """A source without messages, and a sink that does not listen."""

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        return ()

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        pass

    def answer(self, report: Report) -> None:
        pass


class Closing(ShadowExecutor):
    """Notes its end; its last step may fail."""

    closed = False
    broken = False

    def fails(self, plan: StepPlan) -> bool:
        return self.broken

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("broken", [False, True])
def test_closing_saves_the_prefixes_and_closes_the_executor(make_rig: MakeRig, broken: bool) -> None:
    """D5: the last plan is executed; if that fails nothing is kept, and all is closed as well."""
    rig = make_rig(executor=Closing, disk_blocks=8)
    rig.add("a", 12, max_tokens=2)
    rig.run()
    plans, submit, rig.executor.broken = [], rig.executor.submit, broken
    rig.executor.submit = lambda plan: plans.append(plan) or submit(plan)
    Engine(rig.scheduler, rig.executor, Quiet(), Quiet(), VirtualClock()).close()
    assert [op.kind for plan in plans for op in plan.block_ops] == [BlockOpKind.SWAP_OUT] * 3
    assert rig.executor.closed


def test_time_stands_still_while_the_clock_is_behind(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was late stays late, and no step takes less than no time."""
    rig, clock = make_rig(), VirtualClock(10.0)
    engine = Engine(rig.scheduler, rig.executor, Quiet(), Quiet(), clock)
    monkeypatch.setattr(clock, "now", lambda: 4.0)
    rig.add("a", 4, max_tokens=2)
    engine.step()
    assert rig.scheduler._now == 10.0


# -- the flight recorder


def test_a_swap_in_is_a_boarding_too() -> None:
    """B3: when nobody new boards, the queue moves all the same."""
    recorder = FlightRecorder()
    for step in range(3):
        event = Event(step, 2.0 * step, f"r{step}", 0, "swapped in")
        plan, result = StepPlan(step, ()), StepResult(step, (), ())
        recorder.add(StepRecord(plan, result, (), StepStats(), 2.0 * step, 2.0 * step, (event,)))
    assert recorder._boarding_seconds == 2.0


def record(rig: Any, recorder: FlightRecorder, most_steps: int = 100) -> FlightRecorder:
    """Takes some steps, or all that there are."""
    scheduler = rig.scheduler
    for _ in range(most_steps):
        if not scheduler.has_work:
            break
        plan = scheduler.schedule(0.0)
        result = rig.executor.result(rig.executor.submit(plan))
        outputs = tuple(scheduler.commit(plan, result, 0.0))
        recorder.add(StepRecord(plan, result, outputs, scheduler.stats(), 0.0, 0.0, scheduler.take_events()))
    return recorder


def decodes(recorder: FlightRecorder, rig: Any, id: str) -> list[tuple[int, int, str]]:
    life = recorder.report(1, id, rig.scheduler, 0.0).life
    return [(line.step, line.last_step, line.detail) for line in life if line.what == "decode"]


def test_a_row_that_is_held_is_no_company(make_rig: MakeRig) -> None:
    """It is computed, and nobody waits for it; nor does it decode."""
    rig = make_rig("static")
    rig.add("short", 4, max_tokens=2)
    rig.add("long", 4, max_tokens=6)
    recorder = record(rig, FlightRecorder())
    assert decodes(recorder, rig, "long") == [(1, 1, "beside 1 other"), (2, 5, "beside 0 others")]
    assert decodes(recorder, rig, "short") == [(1, 1, "beside 1 other")]


def test_a_step_without_a_decode_is_a_gap(make_rig: MakeRig) -> None:
    """S1: while another's whole prompt is computed, a decode waits; a life shows when."""
    rig = make_rig("continuous")
    rig.add("a", 4, max_tokens=6)
    recorder = record(rig, FlightRecorder(), 3)
    rig.add("b", 4, max_tokens=1)
    record(rig, recorder)
    assert decodes(recorder, rig, "a") == [(1, 2, "beside 0 others"), (4, 6, "beside 0 others")]


def test_a_view_counts_the_blocks_that_are_held(make_rig: MakeRig) -> None:
    """S8: what a window has passed is given back."""
    rig = make_rig(windows=(4,))
    request = rig.add("a", 20, max_tokens=8)
    rig.step()
    rig.step()
    (view,) = FlightRecorder().report(1, "a", rig.scheduler, 0.0).requests
    assert view.num_blocks == rig.capacity.num_blocks - rig.kv.pool.num_free < len(request.block_table)
    rig.run()


def test_peak_does_not_count_on_blocks_that_the_newcomer_shares(make_rig: MakeRig) -> None:
    """They stay in use when the other has ended."""
    rig = make_rig(admission="peak", num_blocks=20, max_num_seqs=4)
    rig.add("first", range(20), max_tokens=3)
    rig.add("long", 4, max_tokens=34)
    rig.step()
    rig.add("shares", [*range(20), 77], max_tokens=36)
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_what_is_kept_for_a_prompt_does_not_grow(make_store: MakeStore, make_request: MakeRequest) -> None:
    """When its window moves on, the others' memory is not taken for samples that will have to find their own."""
    store = make_store(60, windows=(0, 8), max_chunk=8)
    request = make_request("a", 40, n=8, max_tokens=20)
    request.max_len = 60
    kept = store.kv.layout.held(40, prefilling=True)
    assert kept < store.kv.layout.full_blocks(request)
    assert store.board(request, 8, total=kept, promise=True)
    reserved = [store.kv.reserved]
    while request.num_computed < 40:
        store.commit(request)
        reserved.append(store.kv.reserved)
        if request.num_computed < 40:
            assert store.grow(request, 8)
    assert reserved == sorted(reserved, reverse=True) and reserved[0] > 0


def test_a_static_batch_leaves_when_its_last_row_is_late(make_rig: MakeRig) -> None:
    """S9: at once, and not after a step more of rows that are held."""
    rig = make_rig("static")
    rig.add("done", 4, max_tokens=1)
    rig.add("late", 4, max_tokens=9, deadline_ms=1000)
    rig.step()
    assert not rig.ends("done")
    ends = {output.request_id: output.finish_reason for output in rig.scheduler.expire(2.0)}
    assert ends == {"late": FinishReason.DEADLINE, "done": FinishReason.LENGTH}
    rig.check_empty()
