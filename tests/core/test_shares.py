"""Fairness between tenants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from chairlift.core import shares as shares_module
from chairlift.core.plan import StepPlan
from chairlift.core.request import Request
from chairlift.core.shares import OUTPUT_COST, Shares

MakeRig = Callable[..., Any]
MakeRequest = Callable[..., Request]
Share = Callable[[StepPlan], dict[str, int]]

STEP = 64  # what a step costs in itself, in tokens computed: the weights are read as often as for so many


# -- S5


def ttft(rig: Any) -> tuple[int, int]:
    """Steps, and their time in tokens, until the request "b" has its first token."""
    rig.add("b", rig.prompt, max_tokens=4, tenant="B")
    before = len(rig.plans)
    while not rig.tokens("b"):
        assert len(rig.plans) < before + 200, "never served"
        rig.step()
    plans = rig.plans[before:]
    return len(plans), sum(STEP + plan.num_tokens for plan in plans)


FLOODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # what is short: the engine, the flood's requests
    "slots": ({"max_num_seqs": 8}, {"prompt": 8, "max_tokens": 100}),
    "slots, samples": ({"max_num_seqs": 8}, {"prompt": 8, "max_tokens": 100, "n": 2}),
    "tokens": ({"max_num_seqs": 8}, {"prompt": 90, "max_tokens": 2}),
    "tokens, many slots": ({"max_num_seqs": 40}, {"prompt": 90, "max_tokens": 2}),
    "blocks": ({"max_num_seqs": 40, "num_blocks": 60}, {"prompt": 20, "max_tokens": 60}),
    "blocks, large": ({"max_num_seqs": 40, "num_blocks": 60}, {"prompt": 100, "max_tokens": 20}),
}
BLOCKS = {"num_blocks": 400}


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("prompt", [8, 60, 100])
@pytest.mark.parametrize("after", [1, 2, 7, 20])
def test_a_flood_of_one_tenant_does_not_double_the_wait_of_another(
    make_rig: MakeRig, flood: str, prompt: int, after: int
) -> None:
    """S5: whatever is short, and at whatever moment the other comes."""
    engine, requests = FLOODS[flood]
    results = []
    for flooded in (False, True):
        rig = make_rig("chunked", fair=True, budget=64, max_model_len=128, caching=False, **BLOCKS | engine)
        rig.prompt = prompt
        if flooded:
            for i in range(60):
                rig.add(f"a{i}", tenant="A", **requests)
            for _ in range(after):
                rig.step()
        results.append(ttft(rig))
    (steps_alone, time_alone), (steps, time) = results
    assert steps <= 2 * steps_alone
    assert time <= 2 * time_alone


def test_without_fairness_the_other_waits_for_the_whole_flood(make_rig: MakeRig) -> None:
    """S5's measure can tell: first come, first served fails it by far."""
    rig = make_rig("chunked", budget=64, max_model_len=128, num_blocks=400)
    rig.prompt = 8
    for i in range(50):
        rig.add(f"a{i}", 8, max_tokens=20, tenant="A")
    rig.step()
    assert ttft(rig)[0] > 100


def test_a_prompt_that_came_aboard_is_not_pushed_out_by_the_flood(make_rig: MakeRig) -> None:
    """S5: when the flood's decodes run out of memory, it is the flood that makes room."""
    rig = make_rig("chunked", fair=True, budget=16, num_blocks=32, max_model_len=96, caching=False)
    for i in range(6):
        rig.add(f"a{i}", 12, max_tokens=60, tenant="A")
    for _ in range(8):
        rig.step()
    b = rig.add("b", 48, max_tokens=4, tenant="B")
    while not rig.tokens("b"):
        rig.step()
    assert b.num_preemptions == 0
    rig.run()


@pytest.mark.parametrize("weights", [{}, {"A": 2.0}, {"A": 0.5, "B": 2.0}])
def test_shares_follow_the_weights(make_rig: MakeRig, weights: dict[str, float]) -> None:
    """Two tenants that always have more than enough to do."""
    rig = make_rig("chunked", fair=True, max_num_seqs=1, budget=64, num_blocks=400, caching=False)
    rig.scheduler._shares._weights.update(weights)
    rng = Random(3)
    rig.scheduler.settings = replace(rig.scheduler.settings, check=False)
    for i in range(200):
        for tenant in "AB":
            rig.add(f"{tenant}{i}", rng.randint(2, 30), max_tokens=rng.randint(1, 9), tenant=tenant)
    for _ in range(800):
        rig.step()
    cost: Counter[str] = Counter()
    for plan in rig.plans:
        for item in plan.items:
            prompt = max(0, min(item.start + len(item.token_ids), item.num_prompt) - item.start)
            cost[item.request_id[0]] += prompt + OUTPUT_COST * (len(item.token_ids) - prompt)
    wanted = weights.get("A", 1.0) / weights.get("B", 1.0)
    assert cost["A"] / cost["B"] == pytest.approx(wanted, rel=0.05)


def test_equal_tenants_share_the_slots(make_rig: MakeRig) -> None:
    """Both flood. The second gets its half within as many steps, and then hardly anybody is pushed out (M3)."""
    rig = make_rig("chunked", fair=True, max_num_seqs=8, budget=64, num_blocks=400)
    for i in range(20):
        rig.add(f"a{i}", 4, max_tokens=40, tenant="A")
    rig.step()
    rig.step()
    for i in range(20):
        rig.add(f"b{i}", 4, max_tokens=40, tenant="B")
    for _ in range(4):
        rig.step()
    assert Counter(r.tenant for r in rig.scheduler.running.values()) == {"A": 4, "B": 4}
    rig.run(most_steps=2000)
    assert rig.scheduler.stats().total_preemptions <= 12


# -- who pays


@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_a_tenant_alone_pays_nothing(make_rig: MakeRig, policy: str) -> None:
    """S5: with one tenant there, the plans are the same with and without fairness, preemptions and all."""
    for seed in range(10):
        plans = []
        for fair in (False, True):
            rng = Random(seed)
            rig = make_rig(policy, fair=fair, num_blocks=20, max_num_seqs=4, budget=64)
            for i in range(25):
                rig.add(f"r{i}", rng.randint(1, 30), max_tokens=rng.randint(1, 20), n=rng.choice((1, 1, 2)), tenant="A")
                for _ in range(rng.randint(0, 4)):
                    if rig.scheduler.has_work:
                        rig.step()
            rig.run()
            plans.append([(plan.items, plan.block_ops, plan.finished_ids) for plan in rig.plans])
        assert [str(plan) for plan in plans[0]] == [str(plan) for plan in plans[1]]


def test_who_asked_for_nothing_is_owed_nothing(make_rig: MakeRig) -> None:
    """S5: a tenant that was idle while another worked does not have the engine for itself afterwards."""
    rig = make_rig("chunked", fair=True, max_num_seqs=1, budget=64, num_blocks=400, caching=False)
    rig.add("b", 4, max_tokens=1, tenant="B")
    for i in range(100):
        rig.add(f"a{i}", 20, max_tokens=4, tenant="A")
    for _ in range(200):
        rig.step()
    for i in range(100):
        rig.add(f"b{i}", 20, max_tokens=4, tenant="B")
    before = len(rig.plans)
    for _ in range(80):
        rig.step()
    boarded = [item.request_id[0] for plan in rig.plans[before:] for item in plan.items if item.start == 0]
    assert 8 <= boarded.count("a") <= 12 and 8 <= boarded.count("b") <= 12


def test_what_is_computed_again_is_not_charged_again(make_rig: MakeRig) -> None:
    rig = make_rig("chunked", fair=True, num_blocks=10, caching=False)
    requests = [rig.add(f"r{i}", 8, max_tokens=20, tenant="A") for i in range(5)]
    rig.add("three", 8, max_tokens=4, n=3, tenant="A")
    rig.run()
    assert rig.scheduler.stats().total_recomputed_tokens > 0
    outputs = 19 * len(requests) + 3 * 3  # the last token's KV is never computed
    assert rig.scheduler._shares.counter("A") == 8 * 6 + OUTPUT_COST * outputs


def test_what_is_cached_costs_nothing(make_rig: MakeRig) -> None:
    rig = make_rig("chunked", fair=True)
    for id in "ab":
        rig.add(id, range(33), max_tokens=1, tenant="A")
        rig.run()
    assert rig.scheduler._shares.counter("A") == 33 + 1


@pytest.mark.parametrize("ends", ["abort", "run"])
def test_slots_are_counted_through_forks_and_aborts(make_rig: MakeRig, ends: str) -> None:
    """M5"""
    rig = make_rig("chunked", fair=True, num_blocks=14, budget=16, caching=False)
    for i in range(6):
        rig.add(f"r{i}", 9, max_tokens=12, n=1 + i % 3, tenant="AB"[i % 2])
    while rig.scheduler.has_work:
        held: Counter[str] = Counter()
        for request in rig.scheduler.running.values():
            held[request.tenant] += request.num_samples
        assert {t: n for t, n in rig.scheduler._shares.slots.items() if n} == held
        rig.step()
        if ends == "abort" and len(rig.plans) % 5 == 0:
            rig.abort(f"r{len(rig.plans) // 5}", None if len(rig.plans) % 2 else 1)
    rig.check_empty()
    assert not any(rig.scheduler._shares.slots.values()) and not rig.scheduler._shares._live


def test_who_makes_way_is_not_the_next_to_board(make_rig: MakeRig) -> None:
    """M3, S4: a tenant that was served less, and has nobody else waiting, keeps its slots; else it would give one away,
    take it back at once, and have done its work for nothing."""
    rig = make_rig("chunked", fair=True, max_num_seqs=4, budget=64)
    for i in range(4):
        rig.add(f"b{i}", 30, max_tokens=1, tenant="B")
    rig.run()
    for i in range(4):
        rig.add(f"a{i}", 4, max_tokens=12, tenant="A")
    rig.step()
    assert rig.scheduler._shares.counter("A") < rig.scheduler._shares.counter("B")
    rig.add("b", 4, max_tokens=2, tenant="B")
    rig.step()
    assert rig.scheduler.stats().total_preemptions == 0
    rig.run()


def test_slots_never_pass_back_and_forth(make_request: MakeRequest) -> None:
    """S4: after a slot has passed to another tenant, the first has no claim to it."""
    for seed in range(200):
        rng = Random(seed)
        shares = Shares({tenant: rng.choice((0.5, 1.0, 2.0)) for tenant in "AB"})
        shares.slots.update({"A": rng.randint(1, 8), "B": rng.randint(0, 8)})
        a, b = (make_request(t, 4, tenant=t, n=rng.randint(1, 2)) for t in "AB")
        shares.slots["A"] = max(shares.slots["A"], a.num_samples)
        if shares.outranks(b, a):
            shares.slots["A"] -= a.num_samples
            shares.slots["B"] += b.num_samples
            assert not shares.outranks(a, b)


# -- counters


def test_a_newcomer_begins_where_the_served_are(make_request: MakeRequest) -> None:
    shares = Shares()
    shares.join("A")
    shares.serve("A")
    a = make_request("a", 10, tenant="A")
    shares.charge(a, 0, 10)
    shares.serve("A")
    shares.join("B")
    assert shares.counter("B") == shares.counter("A") == 10
    shares.leave("B")
    shares.charge(a, 10, 12)
    shares.serve("A")
    shares.join("B")
    assert shares.counter("B") == 10 + 2 * OUTPUT_COST


def test_who_was_served_much_still_owes_it_after_a_pause(make_request: MakeRequest) -> None:
    """S5: leaving and coming back is no way to be served first."""
    shares = Shares()
    for tenant in "AB":
        shares.join(tenant)
    shares.serve("A")
    shares.charge(make_request("a", 50, tenant="A"), 0, 50)
    shares.leave("A")
    shares.join("A")
    assert shares.counter("A") == 50 > shares.counter("B")


def test_counters_of_tenants_long_gone_are_forgotten(
    make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M5: any client can make up a user name per request. Those who were served most are remembered longest."""
    monkeypatch.setattr(shares_module, "_MOST_IDLE", 10)
    shares = Shares()
    shares.join("live")
    for i in range(500):
        tenant = f"t{i}"
        shares.join(tenant)
        shares.serve(tenant)
        shares.charge(make_request("a", 100, tenant=tenant), 0, 90 if i == 7 else 3)
        shares.leave(tenant)
    assert len(shares._counters) <= 2 * 10 + 2 and len(shares._live) == 1
    assert shares.counter("t7") == 90
    assert "live" in shares._counters


@pytest.mark.parametrize("n", [2, 8])
def test_samples_are_charged_as_requests_of_their_own(make_rig: MakeRig, n: int) -> None:
    """S5: a client chooses n. Only the prompt, which is computed once, is cheaper."""
    rig = make_rig(fair=True, block_size=16, max_num_seqs=8)
    rig.add("many", 8, n=n, max_tokens=13, tenant="A")
    for i in range(n):
        rig.add(f"r{i}", 8, max_tokens=13, tenant="B")
    rig.run()
    assert rig.scheduler._shares.counter("B") - rig.scheduler._shares.counter("A") == 8 * (n - 1)


def test_tenants_that_left_hold_nothing_for_ever(make_rig: MakeRig) -> None:
    """M5: names of tenants come from clients."""
    rig = make_rig(fair=True)
    for i in range(50):
        search = {"use_beam_search": True, "temperature": 0.0} if i % 2 else {}
        rig.add(f"r{i}", 4, n=1 + i % 3, max_tokens=2, tenant=f"t{i}", **search)
        rig.run()
    assert not rig.scheduler._shares.slots


def test_a_prompt_for_which_others_made_way_goes_on(make_rig: MakeRig) -> None:
    """M2, S4: who made way was served less and boards again at once, before it; it must not take back what it gave."""
    rig = make_rig(order="priority", fair=True, num_blocks=40, block_size=1, max_model_len=40, max_num_seqs=4, budget=4,
                   caching=False, max_preemptions=1000)  # fmt: skip
    rig.add("a", 24, max_tokens=4, tenant="A")
    for _ in range(2):
        rig.step()
    rig.scheduler._shares._counters["A"] += 1000
    rig.add("other", 1, max_tokens=20, tenant="B")
    rig.add("b", 12, max_tokens=4, tenant="B")
    rig.run()
    assert rig.scheduler.stats().total_preemptions <= 3, "8 if they go first"


def test_nobody_comes_before_each_other(make_rig: MakeRig) -> None:
    """S4: two that push each other out would never come to an end. The order is for those of one tenant."""
    rig = make_rig(order="priority", fair=True, max_num_seqs=6)
    requests = [
        rig.add(f"{tenant}{i}", 4, max_tokens=9, tenant=tenant, priority=priority)
        for tenant, priorities in (("A", [5]), ("B", [0, -1]), ("C", [2, -3, 1]))
        for i, priority in enumerate(priorities)
    ]
    rig.step()
    before = rig.scheduler.boarding._comes_before
    pairs = [(a, b) for a in requests for b in requests if before(a, b)]
    assert pairs and not any((b, a) in pairs for a, b in pairs)
    assert all(a.tenant < b.tenant for a, b in pairs if a.tenant != b.tenant), "who has fewer slots"


def test_a_high_class_takes_no_other_tenants_only_slot(make_rig: MakeRig) -> None:
    """S5: classes are each tenant's own affair."""
    rig = make_rig(order="priority", fair=True, max_num_seqs=1)
    rig.add("a", 8, max_tokens=8, tenant="A", priority=5)
    rig.step()
    rig.step()
    rig.add("b", 4, max_tokens=4, tenant="B", priority=0)
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0
