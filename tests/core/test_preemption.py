"""Preemption: recomputed or swapped, by which measure, how often, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from chairlift.core.pace import MIN_STEPS, Work
from chairlift.core.plan import BlockOpKind
from chairlift.core.request import Request, Status

MakeRig = Callable[..., Any]


def pressed(make_rig: MakeRig, **kwargs: Any) -> Any:
    """Three requests that do not fit together at their greatest length, right after the first preemption."""
    rig = make_rig(**{"num_blocks": 9, "caching": False} | kwargs)
    for id in "abc":
        rig.add(id, 11, max_tokens=13)
    rig.step()
    while not rig.scheduler.waiting:
        rig.step()
    return rig


def alone(make_rig: MakeRig) -> dict[str, list[int]]:
    answers = {}
    for id in "abc":
        rig = make_rig()
        rig.add(id, 11, max_tokens=13)
        rig.run()
        answers[id] = rig.tokens(id)
    return answers


def kinds(rig: Any) -> list[BlockOpKind]:
    return [op.kind for plan in rig.plans for op in plan.block_ops]


def teach(rig: Any, *, per_token: float, per_block: float) -> None:
    for tokens in range(1, 4 * MIN_STEPS):
        rig.scheduler.pace.learn(Work().plus(0, tokens), 0.001 + per_token * tokens)
    rig.scheduler.pace.learn_swap(10, 10 * per_block)


# -- which kind


@pytest.mark.parametrize(
    ("mode", "host", "disk", "swaps"),
    [
        ("recompute", 20, 20, False),
        ("swap", 20, 0, True),
        ("swap", 0, 20, True),
        ("swap", 2, 20, True),
        ("swap", 0, 0, False),
        ("auto", 0, 0, False),
        ("auto", 20, 0, True),
    ],
)
def test_the_mode_decides(make_rig: MakeRig, mode: str, host: int, disk: int, swaps: bool) -> None:
    """And the answers do not depend on it. ``auto`` tries a swap while it does not know what one costs."""
    rig = pressed(make_rig, preemption_mode=mode, host_blocks=host, disk_blocks=disk)
    (victim,) = rig.scheduler.waiting
    assert (victim.status, bool(victim.host_table), victim.num_computed) == (Status.PREEMPTED, swaps, 0)
    rig.run()
    stats = rig.scheduler.stats()
    assert stats.total_preemptions > 0
    assert stats.total_swaps == (stats.total_preemptions if swaps else 0)
    assert (stats.total_recomputed_tokens > 0) != swaps
    assert (BlockOpKind.SWAP_OUT in kinds(rig)) == (BlockOpKind.SWAP_IN in kinds(rig)) == swaps
    assert {id: rig.tokens(id) for id in "abc"} == alone(make_rig)


@pytest.mark.parametrize(
    ("per_token", "per_block", "swaps"),
    [(1e-3, 1e-3, True), (1e-3, 1e-2, False), (1e-5, 1e-3, False), (1e-2, 1e-2, True)],
)
def test_auto_takes_what_is_cheaper(make_rig: MakeRig, per_token: float, per_block: float, swaps: bool) -> None:
    """Four tokens a block, and each block is copied twice: a swap pays if a block costs less than two tokens."""
    rig = make_rig(num_blocks=9, caching=False, host_blocks=20)
    teach(rig, per_token=per_token, per_block=per_block)
    for id in "abc":
        rig.add(id, 11, max_tokens=13)
    rig.run()
    stats = rig.scheduler.stats()
    assert stats.total_preemptions > 0
    assert stats.total_swaps == (stats.total_preemptions if swaps else 0)


def test_auto_learns_from_the_engines_own_swaps(make_rig: MakeRig) -> None:
    """The first is a trial; when it turns out to be slow, no second one follows."""
    rig = make_rig(num_blocks=9, caching=False, host_blocks=20, max_preemptions=100)
    submit = rig.executor.submit

    def timed(plan: Any) -> Any:
        swaps = sum(op.kind is not BlockOpKind.COPY for op in plan.block_ops)
        seconds = 0.001 + 1e-5 * plan.num_tokens
        return replace(submit(plan), seconds=seconds + swaps * 0.1, swap_seconds=swaps * 0.1)

    rig.executor.submit = timed
    for i in range(12):
        rig.add(f"r{i}", 11, max_tokens=13)
    rig.run()
    stats = rig.scheduler.stats()
    assert 1 <= stats.total_swaps <= 3 < stats.total_preemptions
    assert rig.scheduler.pace.swap_seconds(1) == pytest.approx(0.1)
    assert rig.scheduler.pace.seconds(Work(10, 100)) < 0.01, "the time of swaps is not taken for the model's"


@pytest.mark.parametrize("host", range(8))
def test_a_full_host_pool_falls_back_to_recompute(make_rig: MakeRig, host: int) -> None:
    """M6: wholly or for some of them, with the same answers and no error."""
    rig = make_rig(num_blocks=9, caching=False, host_blocks=host, preemption_mode="swap")
    for id in "abc":
        rig.add(id, 11, max_tokens=13)
    rig.run()
    stats = rig.scheduler.stats()
    assert stats.total_preemptions > 0
    assert stats.total_swaps < stats.total_preemptions or host >= 3
    assert {id: rig.tokens(id) for id in "abc"} == alone(make_rig)


def test_a_swapped_request_computes_only_what_is_new(make_rig: MakeRig) -> None:
    """What was swapped out comes back, and the next token is computed: one, not all of them again."""
    rig = pressed(make_rig, preemption_mode="swap", host_blocks=20)
    (victim,) = rig.scheduler.waiting
    known = len(victim.token_ids)
    while victim.status is not Status.RUNNING:
        plan = rig.step()
    (item,) = [item for item in plan.items if item.request_id == victim.id]
    assert (item.start, len(item.token_ids)) == (known - 1, 1)
    rig.run()


@pytest.mark.parametrize("n", [1, 3])
def test_aborts_of_swapped_requests_leave_nothing(make_rig: MakeRig, n: int) -> None:
    """M5, M12"""
    rig = make_rig(num_blocks=9, host_blocks=20, preemption_mode="swap", caching=False)
    rig.add("first", 12, max_tokens=18)
    rig.add("a", 12, max_tokens=18, n=n)
    while not any(request.host_table for request in rig.scheduler.waiting):
        rig.step()
    assert rig.scheduler.stats().free_host_blocks < 20
    rig.abort("a")
    assert rig.scheduler.stats().free_host_blocks == 20
    rig.run()


# -- how often


def test_who_was_preempted_often_stays(make_rig: MakeRig) -> None:
    """S4: after so many times it boards with all its memory promised, and is never preempted again. Random loads."""
    for limit in (0, 1, 2, 4):
        most = 0
        for seed in range(12):
            rng = Random(seed)
            rig = make_rig(num_blocks=12, max_preemptions=limit, order="priority", caching=False)
            requests: list[Request] = []
            for i in range(20):
                requests.append(
                    rig.add(f"r{i}", rng.randint(1, 20), max_tokens=rng.randint(1, 25), priority=rng.randint(0, 2))
                )
                for _ in range(rng.randint(0, 3)):
                    if rig.scheduler.has_work:
                        rig.step()
            rig.run()
            most = max(most, *(request.num_preemptions for request in requests))
        assert most == limit


def test_a_protected_request_is_passed_over(make_rig: MakeRig) -> None:
    """S4: it boarded last and would be the victim; now it is the next one."""
    rig = make_rig(num_blocks=14, caching=False, max_preemptions=1)
    a, b = (rig.add(id, 4, max_tokens=30) for id in "ab")
    c = rig.add("c", 4, max_tokens=24)
    c.num_preemptions = 1
    rig.run()
    assert (a.num_preemptions + b.num_preemptions > 0, c.num_preemptions) == (True, 1)


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("n", [4, 8])
def test_samples_that_never_fit_together_still_end(make_rig: MakeRig, limit: int, n: int) -> None:
    """M2: what cannot be promised is not waited for: a long prompt of many samples that was preempted often enough."""
    rig = make_rig(num_blocks=16, budget=8, caching=False, max_preemptions=limit)
    rig.add("a", 4, max_tokens=20)
    rig.step()
    long = rig.add("long", 38, max_tokens=20, n=n)
    for i in range(6):
        rig.add(f"r{i}", 4, max_tokens=20)
    while rig.scheduler.has_work and len(rig.plans) < 4000:
        if long.status is Status.RUNNING and long.num_samples > 1 and long.num_computed > 16 > long.num_preemptions:
            rig.scheduler.boarding.preempt(long, "the test")
        rig.step()
    rig.check_empty()
    assert [len(rig.tokens("long", k)) for k in range(n)] == [20] * n


def test_a_long_prompt_of_many_samples_is_protected_too(make_rig: MakeRig) -> None:
    """S4: though not all of its samples can be promised their memory. Its prompt is, until they are forked."""
    rig = make_rig(num_blocks=30, max_model_len=80, budget=8, order="priority", caching=False, max_preemptions=3)
    low = rig.add("low", 60, n=6, max_tokens=20, priority=5)
    for i in range(20):
        for _ in range(6):
            rig.step()
        rig.add(f"high{i}", 60, max_tokens=2, priority=0)
        while f"high{i}" in rig.scheduler.sequences:
            rig.step()
            assert low.num_samples == 1 or low.num_preemptions <= 3
            assert low.num_samples > 1 or low.reservation is None or low.num_preemptions == 4, "kept for the prompt"
        if low.num_samples == 1:
            break
    assert rig.tokens("low") and i < 10
    rig.run()
    assert low.num_preemptions <= 4, "once more, since not all samples could be promised their memory"
    assert [len(rig.tokens("low", k)) for k in range(6)] == [20] * 6


def test_what_cannot_be_promised_to_those_preempted_often(make_rig: MakeRig) -> None:
    """M4: one request alone in a pool that is full at its end."""
    rig = make_rig(num_blocks=8, max_model_len=32, max_preemptions=0)
    rig.add("a", 1, max_tokens=31)
    rig.add("b", 31, max_tokens=1)
    rig.run()
    assert (len(rig.tokens("a")), len(rig.tokens("b"))) == (31, 1)


# -- what it costs


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_three_times_the_demand_keeps_the_throughput(make_rig: MakeRig, mode: str) -> None:
    """M3: useful tokens over time, against a demand that is just the pool; a step costs 32 tokens in itself."""
    rates = []
    for demand in (1, 3):
        rig = make_rig(num_blocks=64, max_num_seqs=32, budget=64, caching=False, host_blocks=80, preemption_mode=mode)
        for i in range(8 * demand):
            rig.add(f"r{i}", 8, max_tokens=24)  # eight blocks at its end
        rig.run()
        rates.append(8 * demand * (8 + 23) / sum(32 + plan.num_tokens for plan in rig.plans))
        assert (rig.scheduler.stats().total_preemptions > 0) == (demand == 3)
    assert rates[1] > 0.8 * rates[0]


def test_counts_tell_what_preemption_cost(make_rig: MakeRig) -> None:
    """M11: how often, and how many tokens were thrown away."""
    rig = make_rig(num_blocks=9, caching=False)
    for id in "abc":
        rig.add(id, 11, max_tokens=13)
    rig.run()
    stats = rig.scheduler.stats()
    once = 3 * (11 + 12)
    assert stats.total_recomputed_tokens == sum(plan.num_tokens for plan in rig.plans) - once > 0
