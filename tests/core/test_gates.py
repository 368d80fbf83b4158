"""Admission gates: `peak` and `reserve` never preempt, and `peak` runs more at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from chairlift.core.gates import Optimistic, Peak, Reserve, make_gate
from chairlift.core.kv import Hit, KVManager
from chairlift.core.layout import NO_BLOCK
from chairlift.core.request import Request
from chairlift.errors import ConfigError, RequestRefused

MakeRig = Callable[..., Any]


def drive(rig: Any, depth: int = 1) -> list[int]:
    """Runs all with so many steps in flight. Returns how many sequences ran at each commit."""
    flights: deque[tuple[Any, Any]] = deque()
    running: list[int] = []
    while rig.scheduler.has_work or flights:
        plan = rig.scheduler.schedule(rig.now)
        if plan is not None:
            rig.plans.append(plan)
            flights.append((plan, rig.executor.submit(plan)))
        assert flights, "no plan, and nothing in flight"
        if plan is None or len(flights) == depth:
            running.append(sum(request.num_samples for request in rig.scheduler.running.values()))
            plan, handle = flights.popleft()
            rig.outputs += rig.scheduler.commit(plan, rig.executor.result(handle), rig.now)
        assert len(rig.plans) < 5000, "no progress"
    rig.check_empty()
    return running


def mixed(rig: Any, rng: Random, count: int, n: int) -> None:
    """Requests of all sizes, a third of them with a beginning in common."""
    for i in range(count):
        prompt = rng.randint(1, 40)
        tokens: Sequence[int] | int = [*range(prompt), i + 5000] if rng.random() < 0.33 else prompt
        rig.add(f"r{i}", tokens, max_tokens=rng.randint(1, 63 - prompt), n=rng.randint(1, n), temperature=1.0)


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"policy": "static", "budget": 128},
    "windows": {"windows": (0, 9)},
    "all windows": {"windows": (7, 9), "num_blocks": 50},
    "swap": {"host_blocks": 20},
    "large blocks": {"block_size": 16, "num_blocks": 16},
    "small pool": {"num_blocks": 18},
}


@pytest.mark.parametrize("admission", ["reserve", "peak"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_nobody_is_preempted(make_rig: MakeRig, policy: str, caching: bool, n: int, depth: int, admission: str) -> None:
    """Every output goes to its bound, so what the gate foresees is exact, and must do. Nothing hangs either (M2)."""
    boarded = 0
    for seed in range(6):
        rng = Random(seed)
        rig = make_rig(
            policy,
            admission=admission,
            num_blocks=rng.choice((50, 60, 80)),
            caching=caching,
            budget=64 if policy == "continuous" else rng.choice((8, 16, 64)),
        )
        mixed(rig, rng, 14, n)
        drive(rig, depth)
        assert rig.scheduler.stats().total_preemptions == 0
        boarded += len(rig.plans)
    assert boarded > 0


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("admission", ["reserve", "peak"])
def test_nobody_is_preempted_elsewhere(make_rig: MakeRig, config: str, depth: int, admission: str) -> None:
    """The same with sliding windows, swapping, large blocks, static batches; with arrivals all along, and aborts."""
    for seed in range(8):
        rng = Random(seed)
        kwargs = {"policy": "chunked", "num_blocks": 70, "budget": 16} | CONFIGS[config]
        rig = make_rig(admission=admission, **kwargs)
        for batch in range(4):
            for i in range(6):
                prompt = rng.randint(1, 40)
                tokens: Any = [*range(prompt), batch] if rng.random() < 0.33 else prompt
                try:
                    rig.add(f"{batch}.{i}", tokens, max_tokens=rng.randint(1, 63 - prompt), n=rng.choice((1, 1, 2)))
                except RequestRefused:
                    continue
            for _ in range(rng.randint(1, 20)):
                if rig.scheduler.has_work:
                    rig.step()
            rig.abort(f"{batch}.{rng.randint(0, 5)}")
        drive(rig, depth)
        assert rig.scheduler.stats().total_preemptions == 0


def test_optimistic_may_preempt(make_rig: MakeRig) -> None:
    """The same kind of load, and the measure can tell."""
    preemptions = 0
    for seed in range(6):
        rig = make_rig(num_blocks=50, budget=16)
        mixed(rig, Random(seed), 14, 1)
        drive(rig)
        preemptions += rig.scheduler.stats().total_preemptions
    assert preemptions > 0


# -- how many run


@pytest.mark.parametrize("policy", ["continuous", "chunked"])
def test_peak_runs_more_at_once_than_reserve(make_rig: MakeRig, policy: str) -> None:
    """On each mixed workload the mean over the steps is at least that of `reserve`, and on nearly all it is higher."""
    higher = 0
    for seed in range(12):
        means, steps = [], []
        for admission in ("reserve", "peak"):
            rng = Random(seed)
            rig = make_rig(policy, admission=admission, num_blocks=48, budget=64, max_num_seqs=32, caching=False)
            mixed(rig, rng, 24, 1)
            running = drive(rig)
            means.append(sum(running) / len(running))
            steps.append(len(running))
        assert means[1] >= means[0]
        higher += means[1] > means[0] and steps[1] <= steps[0]
    assert higher >= 10


def test_requests_that_end_one_after_the_other_fill_each_others_place(make_rig: MakeRig) -> None:
    """The case that `peak` is for: each is short of its greatest length while the others are there."""
    most = {}
    for admission in ("reserve", "peak"):
        rig = make_rig(admission=admission, num_blocks=16, budget=64, caching=False)
        for i, output in enumerate((4, 12, 20, 28, 36, 44)):
            rig.add(f"r{i}", 4, max_tokens=output)
        most[admission] = max(drive(rig))
        assert rig.scheduler.stats().total_preemptions == 0
    assert most == {"reserve": 3, "peak": 4}


class Compared(Peak):
    """Peak, held against `Reserve` in each state it meets."""

    def __init__(self) -> None:
        self.asked = self.more = 0

    def fits(self, request: Request, hit: Hit, running: Sequence[Request], kv: KVManager, **how: Any) -> bool:
        verdict = super().fits(request, hit, running, kv, **how)
        promised = sum(
            max(0, kv.layout.full_blocks(other) - sum(block != NO_BLOCK for block in other.block_table))
            for other in running
        )
        reserve = kv.layout.full_blocks(request) + promised <= kv.num_available
        assert verdict or not reserve, "reserve admits what peak does not"
        self.asked += 1
        self.more += verdict and not reserve
        return verdict


@pytest.mark.parametrize("n", [1, 3])
def test_what_reserve_admits_peak_admits(make_rig: MakeRig, n: int) -> None:
    gate = Compared()
    for seed in range(15):
        rng = Random(seed)
        rig = make_rig(num_blocks=60, budget=rng.choice((8, 64)), caching=False)
        rig.scheduler.policy.gate = gate
        mixed(rig, rng, 14, n)
        drive(rig)
    assert gate.more > 20 and gate.asked > 100


# -- names


def test_peak_looks_again_when_ends_come_nearer(make_rig: MakeRig) -> None:
    """Nothing is given back, and yet more fits: the newcomer must not wait for the end itself."""
    rig = make_rig(admission="peak", num_blocks=25, max_model_len=100, max_num_seqs=4, caching=False)
    a = rig.add("a", 8, max_tokens=72)
    rig.step()
    b = rig.add("b", 8, max_tokens=40)
    while not b.num_output:
        rig.step()
    assert a.finish_reason is None and a.max_len - len(a.token_ids) >= 8
    rig.run()
    assert rig.scheduler.stats().total_preemptions == 0


def test_names() -> None:
    made = [type(make_gate(name)) for name in (None, "optimistic", "reserve", "peak")]
    assert made == [Optimistic, Optimistic, Reserve, Peak]
    with pytest.raises(ConfigError, match="--admission must be one of optimistic, reserve, peak, got 'all'"):
        make_gate("all")


@pytest.mark.parametrize("admission", ["reserve", "peak"])
def test_what_never_fits_is_refused(make_rig: MakeRig, admission: str) -> None:
    """M1: a gate that never preempts needs room for all samples at their greatest length."""
    rig = make_rig(admission=admission, num_blocks=27)
    with pytest.raises(RequestRefused, match="28 KV blocks"):
        rig.add("a", 4, max_tokens=36, n=3)
    rig.check_empty()
    rig = make_rig(admission=admission, num_blocks=28)
    rig.add("a", 4, max_tokens=36, n=3)
    rig.run()
