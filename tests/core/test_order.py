"""Orders: who boards next, who makes room for whom, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from random import Random
from typing import Any

import pytest

from chairlift.core.order import PATIENCE, ByPriority, EarliestDeadline, LongestPrefix, Order, make_order
from chairlift.core.plan import StepPlan
from chairlift.core.request import FinishReason, Request, Status
from chairlift.errors import ConfigError

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]
Share = Callable[[StepPlan], dict[str, int]]

ORDERS = ("fcfs", "priority", "shortest-prefill", "longest-prefix", "deadline")
POLICIES = ("continuous", "chunked")


def boarding(rig: Any) -> list[str]:
    """Runs all, and tells in which order they were first computed."""
    rig.run(most_steps=5000)
    return list(dict.fromkeys(item.request_id for plan in rig.plans for item in plan.items))


def test_names() -> None:
    for name in ORDERS:
        assert isinstance(make_order(name), Order)
    with pytest.raises(ConfigError, match=r"--order must be one of fcfs, priority, .*, got 'lifo'"):
        make_order("lifo")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_equals_board_as_they_came(make_rig: MakeRig, order: str, policy: str) -> None:
    """S4: no order has a reason to change the order of requests that differ in nothing."""
    rig = make_rig(policy, order=order, max_num_seqs=2)
    for i in range(9):
        rig.add(f"r{i}", 6, max_tokens=1 + i % 3)
    assert boarding(rig) == [f"r{i}" for i in range(9)]


# -- priority


def test_lower_numbers_board_first(make_rig: MakeRig) -> None:
    rig = make_rig(order="priority", max_num_seqs=1)
    for id, priority in (("c", 2), ("a", 0), ("d", 2), ("b", 1), ("aa", 0)):
        rig.add(id, 4, max_tokens=2, priority=priority)
    assert boarding(rig) == ["a", "aa", "b", "c", "d"]


def flooded(make_rig: MakeRig, policy: str, waiting: int, **kwargs: Any) -> Any:
    """An engine that a low class has filled."""
    rig = make_rig(policy, order="priority", caching=False, budget=64, **kwargs)
    for i in range(4 + waiting):
        rig.add(f"low{i}", 8, max_tokens=24, priority=1)
    for _ in range(3):
        rig.step()
    return rig


@pytest.mark.parametrize("bottleneck", [{"max_num_seqs": 4}, {"num_blocks": 12}], ids=["slots", "blocks"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_high_class_boards_at_once_however_long_the_queue_of_a_lower_one(
    make_rig: MakeRig, policy: str, bottleneck: dict[str, int], share: Share
) -> None:
    """S3: in the next step, whether slots or memory are short, and with any number of others waiting."""
    for waiting in (0, 3, 300):
        rig = flooded(make_rig, policy, waiting, **bottleneck)
        rig.add("high", 12, max_tokens=3, priority=0)
        assert share(rig.step())["high"] == 12
        assert len(rig.tokens("high")) == 1
        assert rig.scheduler.stats().num_preempted > 0
        while not rig.ends("high"):
            rig.step()
        assert len(rig.tokens("high")) == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_no_more_make_way_than_must(make_rig: MakeRig, policy: str) -> None:
    rig = flooded(make_rig, policy, 0, max_num_seqs=4)
    rig.add("high", 4, max_tokens=2, n=2, priority=0)
    rig.step()
    assert rig.scheduler.stats().total_preemptions == 2
    assert [r.id for r in rig.scheduler.waiting] == ["low2", "low3"], "who boarded last goes first"
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 2
    assert all(len(rig.tokens(f"low{i}")) == 24 for i in range(4))


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_makes_way_in_vain(make_rig: MakeRig, policy: str) -> None:
    """M3: if the places of all lower ones together are not enough, they keep them."""
    rig = make_rig(policy, order="priority", max_num_seqs=4, budget=64)
    for i in range(3):
        rig.add(f"same{i}", 4, max_tokens=20, priority=0)
    rig.add("low", 4, max_tokens=20, priority=1)
    rig.step()
    rig.add("wide", 4, max_tokens=4, n=2, priority=0)
    rig.step()
    assert rig.scheduler.stats().total_preemptions == 0
    rig.run()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_class_makes_no_way_for_its_own_or_a_lower_one(make_rig: MakeRig, policy: str) -> None:
    rig = make_rig(policy, order="priority", max_num_seqs=2, budget=64)
    for id, priority in (("a", 1), ("b", 1), ("c", 1), ("d", 2)):
        rig.add(id, 4, max_tokens=12, priority=priority)
        rig.now += 1
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_low_class_is_served_among_endless_others(make_rig: MakeRig, policy: str) -> None:
    """S3's other side: waiting for 30 seconds counts as much as one class."""
    rig = make_rig(policy, order="priority", max_num_seqs=1, budget=64)
    rig.add("low", 4, max_tokens=4, priority=2)
    for second in range(200):
        rig.now = float(second)
        rig.add(f"high{second}", 4, max_tokens=1, priority=0)
        rig.step()
        if rig.ends("low"):
            break
    assert rig.ends("low") == [FinishReason.LENGTH]
    assert 60 < rig.now < 80


def test_ageing_is_a_setting() -> None:
    order = make_order("priority", priority_ageing=5.0)
    assert isinstance(order, ByPriority)


def some_requests(make_request: MakeRequest, rng: Random, n: int) -> Iterator[Request]:
    for i in range(n):
        request = make_request(f"r{i}", 4, priority=rng.randint(0, 3), tenant=rng.choice("AB"))
        request.ticket, request.queued_at = i, rng.uniform(0, 90)
        yield request


@pytest.mark.parametrize("order", ORDERS)
def test_no_two_requests_make_way_for_each_other(make_request: MakeRequest, order: str) -> None:
    """S4: else they would push each other out for ever. Who makes way also comes later in the queue."""
    chosen = make_order(order)
    requests = list(some_requests(make_request, Random(1), 40))
    pairs = [(a, b) for a, b in permutations(requests, 2) if chosen.outranks(a, b)]
    for a, b in pairs:
        assert not chosen.outranks(b, a)
        assert chosen.key(a) < chosen.key(b)
    assert bool(pairs) == (order == "priority")


@pytest.mark.parametrize("policy", POLICIES)
def test_each_newcomer_costs_at_most_the_places_it_needs(make_rig: MakeRig, policy: str) -> None:
    """M3, S4: random classes and times; a request makes way only for what came since; nothing goes back and forth."""
    for seed in range(20):
        rng = Random(seed)
        rig = make_rig(policy, order="priority", max_num_seqs=3, budget=64)
        for i in range(30):
            rig.add(f"r{i}", rng.randint(1, 8), max_tokens=rng.randint(1, 8), priority=rng.randint(0, 3))
            for _ in range(rng.randint(0, 3)):
                rig.now += rng.choice((0.1, 1, 10))
                if rig.scheduler.has_work:
                    rig.step()
        rig.run()
        assert rig.scheduler.stats().total_preemptions <= 30


# -- shortest prefill


def test_the_shortest_prompt_boards_first(make_rig: MakeRig) -> None:
    rig = make_rig(order="shortest-prefill", max_num_seqs=1)
    for id, length in (("long", 40), ("short", 3), ("middle", 20), ("short too", 3)):
        rig.add(id, length, max_tokens=2)
    assert boarding(rig) == ["short", "short too", "middle", "long"]


def test_a_long_prompt_is_served_among_endless_short_ones(make_rig: MakeRig) -> None:
    """S5's kin: 50 tokens more count as half a second of waiting, and no more."""
    rig = make_rig(order="shortest-prefill", max_num_seqs=1)
    rig.add("long", 52, max_tokens=2)
    for i in range(100):
        rig.now = i / 10
        rig.add(f"short{i}", 2, max_tokens=1)
        rig.step()
        if rig.ends("long"):
            break
    assert rig.ends("long") and 0.3 < rig.now < 1.5


# -- longest prefix


def test_who_has_most_in_the_cache_boards_first(make_rig: MakeRig) -> None:
    rig = make_rig(order="longest-prefix", max_num_seqs=1)
    rig.add("before", range(33), max_tokens=1)
    rig.run()
    rig.add("none", 20, max_tokens=1)
    rig.add("some", [*range(12), 1, 2, 3], max_tokens=1)
    rig.add("most", [*range(32), 1, 2, 3], max_tokens=1)
    rig.add("none either", 20, max_tokens=1)
    assert boarding(rig)[1:] == ["most", "some", "none", "none either"]


def test_a_new_prefix_is_served_among_endless_cached_ones(make_rig: MakeRig) -> None:
    rig = make_rig(order="longest-prefix", max_num_seqs=1)
    rig.add("before", range(33), max_tokens=1)
    rig.run()
    rig.add("new", 8, max_tokens=1)
    for i in range(200):
        rig.add(f"cached{i}", [*range(32), 1], max_tokens=1)
        rig.step()
        rig.now += 1.0
        if rig.ends("new"):
            break
    assert PATIENCE < rig.now <= PATIENCE + 3


def test_a_long_queue_costs_no_more_than_a_short_one(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 14: only so many at the head are looked at."""
    rig = make_rig(order="longest-prefix", max_num_seqs=1)
    for i in range(300):
        rig.add(f"r{i}", 8, max_tokens=2)
    looks: list[str] = []
    lookup = rig.kv.lookup
    monkeypatch.setattr(rig.kv, "lookup", lambda request: (looks.append(request.id), lookup(request))[1])
    rig.step()
    assert len(set(looks)) == LongestPrefix.DEPTH, "nobody is chosen when no slot is left"


# -- deadline


def test_the_earliest_deadline_boards_first(make_rig: MakeRig) -> None:
    """S9's ground. A time for the first token counts like one for the last; without either, 60 seconds do."""
    rig = make_rig(order="deadline", max_num_seqs=1)
    for id, params in (
        ("none", {}),
        ("late", {"deadline_ms": 50_000}),
        ("later than none", {"deadline_ms": 70_000}),
        ("soon", {"ttft_ms": 20_000}),
        ("soonest", {"deadline_ms": 10_000, "ttft_ms": 30_000}),
    ):
        rig.add(id, 4, max_tokens=2, **params)
    assert boarding(rig) == ["soonest", "soon", "late", "none", "later than none"]


def test_the_engines_own_target_is_the_deadline_of_those_without(make_request: MakeRequest) -> None:
    for target, due in ((None, PATIENCE), (0.5, 0.5)):
        request = make_request("a", 4)
        request.queued_at = 7.0
        assert EarliestDeadline(target).key(request) == 7.0 + due


# -- all orders: preempted requests


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_preempted_request_resumes_before_newer_ones(make_rig: MakeRig, order: str, policy: str) -> None:
    """S4: of its class, whatever else would speak for them: shorter, and with all of its prompt in the cache."""
    rig = make_rig(policy, order=order, num_blocks=9, budget=64, max_num_seqs=3)
    for id in "abc":
        rig.add(id, 11, max_tokens=21)
    rig.step()
    while not rig.scheduler.waiting:
        rig.step()
    (victim,) = rig.scheduler.waiting
    rig.now += 0.01
    newer = rig.add("newer", list(rig.scheduler.running["a", 0].token_ids[:9]), max_tokens=2)
    while victim.status is Status.PREEMPTED:
        assert newer.status is Status.WAITING, "it passed the preempted one"
        rig.step()
    rig.run()


def test_a_preempted_request_is_not_passed_from_behind_an_older_one(make_rig: MakeRig) -> None:
    """S4: also when it is not the first in the queue, since prefixes let requests board out of turn."""
    rig = make_rig(order="longest-prefix", num_blocks=20, max_num_seqs=2, max_model_len=80)
    rig.add("before", range(33), max_tokens=1)
    rig.run()
    rig.add("a", 16, max_tokens=8)
    rig.step()
    older = rig.add("older", 72, max_tokens=4)  # needs nearly all
    cached = rig.add("cached", [*range(16), 1], max_tokens=8)
    rig.step()
    assert cached.status is Status.RUNNING and older.status is Status.WAITING
    rig.scheduler.boarding.preempt(cached, "the test")
    newest = rig.add("newest", [*range(32), 2, 3], max_tokens=4)
    while cached.status is Status.PREEMPTED:
        assert newest.status is Status.WAITING
        rig.step()
    rig.run()
