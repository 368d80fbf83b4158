"""The waiting queue, against a plain sorted list."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from chairlift.core.kv import KVManager
from chairlift.core.order import make_order
from chairlift.core.plan import Capacity
from chairlift.core.queue import Line, WaitingQueue
from chairlift.core.request import Request, Status
from chairlift.core.shares import Shares

MakeRequest = Callable[..., Request]

KV = KVManager(Capacity(8, 4, 64), max_chunk=8)


def ticketed(make_request: MakeRequest, ticket: int, tenant: str = "", **kwargs: int) -> Request:
    request = make_request(f"r{ticket}", 4, tenant=tenant, **kwargs)
    request.ticket = ticket
    return request


def test_a_line_keeps_its_order_and_gives_out_from_anywhere(make_request: MakeRequest) -> None:
    rng, line = Random(1), Line()
    requests = [ticketed(make_request, i) for i in range(60)]
    keys = {request: rng.choice((1, 2.5, 7)) for request in requests}
    rng.shuffle(requests)
    for request in requests:
        line.push(keys[request], request)
    while requests:
        requests.sort(key=lambda request: (keys[request], request.ticket))
        assert list(line) == requests and len(line) == len(requests)
        gone = requests.pop(rng.randrange(len(requests)))
        line.remove(keys[gone], gone)
    assert len(line) == 0


def test_samples_of_one_request_stand_behind_each_other(make_request: MakeRequest) -> None:
    queue = WaitingQueue(make_order("fcfs"))
    samples = [make_request("a", 4, index=i) for i in (2, 0, 1)]
    for sample in samples:
        queue.push(sample)
    assert [request.index for request in queue] == [0, 1, 2]
    queue.remove(samples[1])
    assert queue.first(KV, 0.0).index == 1


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("order", ["fcfs", "priority", "shortest-prefill", "deadline"])
def test_the_first_is_the_first_of_a_sorted_list(make_request: MakeRequest, order: str, fair: bool) -> None:
    """S5: of the tenant that was served least; within it, by the order. Random arrivals, ends and charges."""
    for seed in range(10):
        rng = Random(seed)
        shares = Shares({"A": 2.0, "B": 0.5}) if fair else None
        queue, here = WaitingQueue(make_order(order), shares), list[Request]()
        for ticket in range(200):
            if rng.random() < 0.6:
                request = ticketed(make_request, ticket, rng.choice("ABCD"), priority=rng.randint(0, 2))
                request.queued_at = rng.uniform(0, 50)
                if rng.random() < 0.2:
                    request.status, request.num_preemptions = Status.PREEMPTED, 1
                if shares:
                    shares.join(request.tenant)
                queue.push(request)
                here.append(request)
            elif here:
                leaves = queue.first(KV, 0.0) if rng.random() < 0.7 else rng.choice(here)
                queue.remove(leaves)
                here.remove(leaves)
                if shares:
                    shares.serve(leaves.tenant)
                    shares.charge(leaves, 0, rng.randint(1, 4))
                    shares.leave(leaves.tenant)
            assert len(queue) == len(here) and bool(queue) == bool(here)
            assert queue.num_preempted == sum(request.status is Status.PREEMPTED for request in here)
            if here:
                best = min(here, key=queue.rank)
                first = queue.first(KV, 0.0)
                assert queue.rank(first)[0] == queue.rank(best)[0], "a tenant that was served least"
                mine = [r for r in here if not fair or r.tenant == first.tenant]
                assert first is min(mine, key=lambda request: queue.rank(request)[1:])
                assert next(iter(queue)) is first or queue.rank(next(iter(queue)))[0] == queue.rank(first)[0]
                assert sorted(map(id, queue)) == sorted(map(id, here))


def test_tenants_that_come_and_go_leave_nothing_behind(make_request: MakeRequest) -> None:
    """M5: one tenant whose requests come one by one, and many that come once."""
    shares = Shares()
    queue = WaitingQueue(make_order("fcfs"), shares)
    for ticket in range(2000):
        request = ticketed(make_request, ticket, "always" if ticket % 2 else f"once{ticket}")
        shares.join(request.tenant)
        queue.push(request)
        first = queue.first(KV, 0.0)
        queue.remove(first)
        shares.serve(first.tenant)
        shares.charge(first, 0, 4)
        shares.leave(first.tenant)
    assert not queue and len(queue._least_served) < 100 and not queue._lines and not queue._keys
