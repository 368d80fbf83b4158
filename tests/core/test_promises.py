"""Blocks that are kept: those promised to running requests, and those of pinned beginnings. Blocks hold four tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chairlift.core.kv import NO_HIT
from chairlift.core.request import Request

MakeRequest = Callable[..., Request]
MakeStore = Callable[..., Any]


# -- promises


def test_reserved_blocks_are_only_for_their_owner(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(6)
    owner = store.compute(make_request("a", 4), total=4)
    assert (store.kv.reserved, store.kv.pool.num_free, store.kv.num_available) == (3, 5, 2)
    assert not store.kv.admit(make_request("b", 12), NO_HIT, 12)
    other = store.compute(make_request("c", 8))
    other.token_ids.append(1)
    assert not store.kv.grow(other, 1)
    owner.token_ids += range(12)
    assert store.kv.grow(owner, 12)
    assert store.kv.reserved == 0 and store.kv.pool.num_free == 0
    store.release(owner)
    store.release(other)
    store.check()


def test_a_promise_counts_what_a_hit_brings(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Of five blocks promised, two are the hit's and two are taken at once; without a promise nothing is reserved."""
    for promise, reserved in ((True, 1), (False, 0)):
        store = make_store()
        store.compute(make_request("a", range(8)))
        request = make_request("b", range(16))
        assert store.board(request, total=5, promise=promise)
        assert store.kv.reserved == reserved


def test_beyond_its_promise_a_request_takes_what_is_available(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(4)
    request = store.compute(make_request("a", 4), total=2)
    request.token_ids += range(12)
    assert store.kv.grow(request, 12)
    assert store.kv.reserved == 0 and store.kv.pool.num_free == 0
    store.check()


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("output", [1, 3, 4, 9])
def test_full_blocks_suffice_for_all_samples(
    make_request: MakeRequest, make_store: MakeStore, prompt: int, n: int, output: int
) -> None:
    """In a pool of exactly that size, all samples grow side by side to their greatest length; in any order."""
    for one_by_one in (False, True):
        request = make_request("a", prompt, n=n)
        request.max_len = prompt + output
        store = make_store(make_store().kv.layout.full_blocks(request))
        store.compute(request, total=store.kv.layout.full_blocks(request))
        assert store.kv.num_available == 0
        samples = [request, *(store.fork(request, index=i) for i in range(1, n))]
        store.kv.settle(request)
        steps = [(sample, token) for token in range(output) for sample in samples]
        for sample, token in sorted(steps, key=lambda step: step[0].index) if one_by_one else steps:
            store.append(sample, token)
            store.check()
        assert store.kv.reserved == 0


def test_samples_share_a_promise_and_give_back_what_none_of_them_needs(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    """Three samples of a prompt of six tokens that may become fourteen: each needs two blocks of its own besides the
    one that the last writer keeps. A sample that ends leaves no more than the others need."""
    store = make_store(20)
    request = make_request("a", 6, n=3)
    request.max_len = 14
    store.compute(request, total=store.kv.layout.full_blocks(request))
    samples = [request, *(store.fork(request, index=i) for i in (1, 2))]
    store.kv.settle(request)
    assert store.kv.reserved == 3 * 2 + 2
    store.append(samples[0], 1)
    assert store.kv.reserved == 3 * 2 + 1, "one copy is made"
    store.release(samples[1])
    assert store.kv.reserved == 2 * 2, "the last owner of the shared block will not copy"
    store.append(samples[0], 1, 2)
    assert store.kv.reserved == 3
    store.kv.check([samples[0], samples[2]])
    for sample in (samples[0], samples[2]):
        store.release(sample)
    assert store.kv.reserved == 0
    store.check()


def test_settling_takes_no_more_than_there_is(make_request: MakeRequest, make_store: MakeStore) -> None:
    """A sample more than was promised for."""
    store = make_store(4)
    request = make_request("a", 4)
    request.max_len = 8
    store.compute(request, total=2)
    other = store.compute(make_request("b", 4))
    store.fork(request)
    store.kv.settle(request)
    assert store.kv.reserved == store.kv.pool.num_free == 2
    store.release(other)
    store.fork(request, index=2)
    store.kv.settle(request)
    assert store.kv.reserved == 3
    store.check()


# -- pinned beginnings


def test_a_pinned_beginning_is_shared_by_all_tenants_and_only_it(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store(20)
    store.kv.pin(range(8))
    store.compute(make_request("a", range(16), tenant="red"))
    assert store.known(range(16), tenant="blue") == 8
    assert store.known(range(16), tenant="red") == 12


def test_a_pinned_beginning_stays(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Its whole blocks, from when they were computed; also while requests need every other block."""
    store = make_store(4)
    store.kv.pin(range(10))
    assert store.kv.num_pinned == 2
    request = store.compute(make_request("a", range(10)))
    store.check()
    store.release(request)
    assert store.kv.pool.num_free == 2
    store.check()
    store.release(store.compute(make_request("c", 8)))
    assert store.known(range(10)) == 8
    assert not store.kv.admit(make_request("d", 9), NO_HIT, 9)


def test_pinning_in_two_lengths_counts_each_block_once(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    store.kv.pin(range(8))
    store.kv.pin(range(12))
    store.kv.pin(range(3))
    assert store.kv.num_pinned == 3
    store.release(store.compute(make_request("a", range(12))))
    assert store.kv.pool.num_free == 7
    store.check()


def test_without_a_prefix_cache_nothing_is_pinned(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(caching=False)
    store.kv.pin(range(8))
    assert store.kv.num_pinned == 0
    store.release(store.compute(make_request("a", range(8))))
    assert store.kv.pool.num_free == 10


def test_after_a_failure_nothing_is_known_and_pins_are_made_again(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store(6)
    store.kv.pin(range(8))
    store.release(store.compute(make_request("a", range(12))))
    store.kv.forget_all()
    store.check()
    again = make_request("b", range(12))
    assert store.kv.pool.num_free == 6 and store.kv.num_pinned == 2 and store.kv.lookup(again) == NO_HIT
    store.release(store.compute(again))
    assert store.kv.pool.num_free == 4
    store.check()
