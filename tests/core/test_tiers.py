"""Host memory and disk: what is swapped there comes back as it was, and prefixes pushed off the device are kept."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from chairlift.core.kv import NO_HIT
from chairlift.core.layout import NO_BLOCK
from chairlift.core.plan import BlockOpKind
from chairlift.core.request import Request

MakeRequest = Callable[..., Request]
MakeStore = Callable[..., Any]


def swaps(store: Any, kind: BlockOpKind) -> int:
    """How many blocks were moved so far, in one direction."""
    store.apply()
    return sum(op.kind is kind for op in store.ops)


# -- rule 8: swapping a request out and in


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 7, 8, 13])
def test_rule_8_a_request_comes_back_with_what_it_had(
    make_request: MakeRequest, make_store: MakeStore, length: int, caching: bool
) -> None:
    """Others have overwritten the device meanwhile; it goes on where it was."""
    store = make_store(4, host_blocks=4, caching=caching)
    request = store.compute(make_request("a", length))
    assert store.swap_out(request)
    assert (request.block_table, request.num_computed, request.num_swapped) == ([], 0, length)
    assert len(request.host_table) == -(-length // 4)
    assert store.kv.pool.num_free == 4
    store.check()
    store.release(store.compute(make_request("other", 16)))
    request.token_ids.append(1)
    assert store.kv.lookup(request).num_tokens == length
    assert store.board(request)
    assert (request.num_computed, request.host_table, request.num_swapped) == (length, [], 0)
    store.commit(request)
    store.append(request, 2, 3)
    store.check()
    assert store.places[0].num_free == 4


def test_rule_8_a_full_host_goes_on_to_disk_and_then_refuses(make_request: MakeRequest, make_store: MakeStore) -> None:
    """M6: False, and nothing has changed, when both are full."""
    store = make_store(10, host_blocks=2, disk_blocks=2)
    first, second, third = (store.compute(make_request(id, 9)) for id in "abc")
    assert store.swap_out(first)
    assert sorted(first.host_table) == [0, 1, 2], "two in memory, one on disk"
    before = store.state()
    assert not store.swap_out(second)
    assert store.state() == before
    store.kv.release(third)
    store.live.remove(third)
    store.release(first)
    assert store.swap_out(second)
    store.check()


def test_a_request_without_kv_cannot_be_swapped_out(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(host_blocks=2)
    request = make_request("a", 9)
    assert store.board(request)
    before = store.state()
    assert not store.kv.swap_out(request)
    assert store.state() == before


def test_only_what_is_computed_is_swapped_out(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(host_blocks=2)
    request = make_request("a", 20)
    assert store.board(request, 12)
    store.commit(request, 6)
    request.num_planned = 6
    assert store.swap_out(request)
    assert request.num_swapped == 6 and len(request.host_table) == 2
    assert store.board(request, 14)
    store.commit(request)
    store.check()


def test_a_full_block_is_kept_once(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Two requests with the same beginning: of both the ends are copied, of the beginning one copy serves both. It is
    copied no second time either when one comes back and leaves again."""
    store = make_store(20, host_blocks=10)
    first = store.compute(make_request("a", [*range(8), 100]))
    second = store.compute(make_request("b", [*range(8), 200]))
    assert store.swap_out(first) and store.swap_out(second)
    assert swaps(store, BlockOpKind.SWAP_OUT) == 4
    assert first.host_table[:2] == second.host_table[:2] and first.host_table[2] != second.host_table[2]
    store.check()
    for request in (first, second):
        request.token_ids.append(1)
        store.compute(request)
    assert swaps(store, BlockOpKind.SWAP_IN) == 2, "the two ends; the full blocks are still on the device"
    assert store.swap_out(first)
    assert swaps(store, BlockOpKind.SWAP_OUT) == 5, "only its end"
    store.check()


def test_what_is_on_the_device_still_need_not_be_swapped_in(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(4, host_blocks=4)
    request = store.compute(make_request("a", range(9)))
    first, second, _ = request.block_table
    assert store.swap_out(request)
    store.release(store.compute(make_request("b", 8)))  # takes the blank ones
    assert store.kv.pool.find(request.block_hashes[1]) == second
    request.token_ids.append(1)
    hit = store.kv.lookup(request)
    assert list(hit.table) == [first, second, NO_BLOCK] and [at for at, _, _ in hit.swaps] == [2]
    store.compute(request)
    assert request.block_table[:2] == [first, second]
    store.check()


def test_a_block_that_was_swapped_half_full_stays_its_own(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Somebody computed the rest of that block meanwhile; the request will write into it, so it cannot share it."""
    store = make_store(10, host_blocks=4)
    request = make_request("a", range(8))
    store.kv.lookup(make_request("x", range(8)))
    store.kv._hashes.hash(request, 1)  # as lookups of longer prompts do
    assert store.board(request, 6)
    store.commit(request)
    assert store.swap_out(request)
    other = store.compute(make_request("b", range(9)))
    assert store.board(request, 2)
    assert request.block_table[0] == other.block_table[0] and request.block_table[1] != other.block_table[1]
    store.commit(request)
    store.check()


def test_a_swapped_request_can_end(make_request: MakeRequest, make_store: MakeStore) -> None:
    """M5: what it had elsewhere is free, and still known."""
    store = make_store(4, host_blocks=4)
    request = store.compute(make_request("a", range(12)))
    assert store.swap_out(request)
    store.release(request)
    assert (request.host_table, request.num_swapped) == ([], 0)
    assert store.places[0].num_free == 4
    store.check()
    store.compute(make_request("b", 16))
    assert store.known(range(12)) == 8


def test_samples_are_swapped_each_for_itself(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(10, host_blocks=4)
    parent = store.compute(make_request("a", range(6)))
    child = store.fork(parent)
    store.append(parent, 1)
    assert store.swap_out(parent)
    store.append(child, 2)
    assert store.swap_out(child)
    assert parent.host_table[0] == child.host_table[0] and parent.host_table[1] != child.host_table[1]
    for request in (child, parent):
        request.token_ids.append(3)
        store.compute(request)
        store.check()


def test_a_promise_ends_with_swapping_out_and_is_made_again(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(10, host_blocks=4)
    request = store.compute(make_request("a", 6), total=8)
    request.max_len = 32
    assert store.kv.reserved == 6
    assert store.swap_out(request)
    assert store.kv.reserved == 0
    store.check()
    request.token_ids.append(1)
    assert not store.kv.admit(request, store.kv.lookup(request), 1, total=11, promise=True)
    assert store.board(request, total=8, promise=True)
    assert store.kv.reserved == 6
    store.check()


@pytest.mark.parametrize("demand", [{"total": 11, "promise": True}, {"headroom": 8}, {"n": 33}])
def test_admit_of_a_swapped_request_is_all_or_nothing(
    make_request: MakeRequest, make_store: MakeStore, demand: dict[str, Any]
) -> None:
    store = make_store(10, host_blocks=4)
    request = store.compute(make_request("a", range(10)))
    assert store.swap_out(request)
    request.token_ids += range(40)
    before = store.state()
    hit = store.kv.lookup(request)
    assert not store.kv.admit(request, hit, **{"n": 1} | demand)
    assert store.state() == before
    assert store.board(request, 1)
    store.check()


# -- cached prefixes that the device has no room for


@pytest.mark.parametrize(("host", "disk"), [(4, 0), (0, 4), (2, 4)])
def test_a_prefix_pushed_off_the_device_is_found_again(
    make_request: MakeRequest, make_store: MakeStore, host: int, disk: int
) -> None:
    """In the last tier there is, and before as well as after the move was executed."""
    store = make_store(4, host_blocks=host, disk_blocks=disk)
    store.release(store.compute(make_request("a", range(12))))
    other = make_request("b", 16)
    assert store.board(other)
    assert store.known(range(12)) == 8, "planned"
    store.commit(other)
    assert swaps(store, BlockOpKind.SWAP_OUT) == 3
    assert all(op.dst >= (host if disk else 0) and op.content for op in store.ops), "the last tier, by their contents"
    assert store.places[-1].num_free == store.places[-1].num_blocks, "kept, and free all the same"
    assert store.known(range(12)) == 8
    store.release(other)
    again = store.compute(make_request("c", range(12)))
    assert swaps(store, BlockOpKind.SWAP_IN) == 2
    store.check()
    assert store.kv.pool.find(again.block_hashes[0]) == again.block_table[0], "and on the device"


def test_a_prefix_that_comes_and_goes_is_copied_out_once(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(3, host_blocks=6)
    for round in range(3):
        store.release(store.compute(make_request(f"a{round}", range(9))))
        store.release(store.compute(make_request(f"b{round}", range(100, 109))))
        store.check()
    assert swaps(store, BlockOpKind.SWAP_OUT) == 4
    assert swaps(store, BlockOpKind.SWAP_IN) == 4 * 2


def test_a_prefix_that_host_memory_has_is_not_copied_to_disk(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(4, host_blocks=4, disk_blocks=4)
    request = store.compute(make_request("a", range(8)))
    assert store.swap_out(request)
    store.release(request)
    store.release(store.compute(make_request("b", 16)))
    assert swaps(store, BlockOpKind.SWAP_OUT) == 2, "those of the swapped request"
    assert store.known(range(9)) == 8


def test_prefixes_never_take_the_place_of_requests(make_request: MakeRequest, make_store: MakeStore) -> None:
    """A tier full of swapped requests keeps no prefixes; swapped requests push prefixes out, oldest first."""
    store = make_store(6, host_blocks=3)
    swapped = store.compute(make_request("a", 9))
    assert store.swap_out(swapped)
    store.release(store.compute(make_request("b", range(16))))
    store.release(store.compute(make_request("c", 24)))
    assert swaps(store, BlockOpKind.SWAP_OUT) == 3
    assert store.known(range(16)) == 0
    store.release(swapped)
    store.release(store.compute(make_request("d", 24)))
    assert store.places[0].num_free == 3
    second = store.compute(make_request("e", 9))
    assert store.swap_out(second)
    store.check()


def test_a_tier_forgets_the_oldest_first(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Two prefixes of two blocks each, pushed out one after the other to a tier of three."""
    store = make_store(4, host_blocks=3)
    for id, first in (("a", 100), ("b", 200)):
        store.release(store.compute(make_request(id, range(first, first + 8))))
    store.compute(make_request("c", 16))
    assert store.known(range(100, 109)) == 4, "its beginning went last"
    assert store.known(range(200, 209)) == 8


def test_admitting_does_not_push_out_what_it_swaps_in(make_request: MakeRequest, make_store: MakeStore) -> None:
    """The device is full of other prefixes, which go to the tier as the request takes their blocks; and the tier is
    full, of what the request is about to need. The least recently used there are its own blocks."""
    store = make_store(2, host_blocks=2)
    store.release(store.compute(make_request("a", range(8))))
    store.release(store.compute(make_request("b", range(100, 108))))
    assert swaps(store, BlockOpKind.SWAP_OUT) == 2
    assert store.known(range(8)) == 4
    request = store.compute(make_request("c", range(8)))
    assert request.num_computed == 8, "what it read was right"
    store.check()


def test_a_swapped_request_is_not_pushed_out_by_its_own_return(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store(3, host_blocks=3)
    request = store.compute(make_request("a", 9))
    assert store.swap_out(request)
    store.release(store.compute(make_request("b", range(12))))
    request.token_ids.append(1)
    store.compute(request)
    store.check()


def test_blocks_on_the_device_are_preferred(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(4, host_blocks=4)
    first = store.compute(make_request("a", range(9)))
    assert store.swap_out(first)
    hit = store.kv.lookup(make_request("b", range(9)))
    assert hit.num_tokens == 8 and hit.swaps == [] and NO_BLOCK not in hit.table


def test_part_on_the_device_and_part_elsewhere(make_request: MakeRequest, make_store: MakeStore) -> None:
    """The end of the chain went first. What is swapped in is found by others only when the step is done."""
    store = make_store(4, host_blocks=4)
    store.release(store.compute(make_request("a", range(16))))
    store.release(store.compute(make_request("b", 8)))
    request = make_request("c", range(17))
    hit = store.kv.lookup(request)
    assert hit.num_tokens == 16 and [at for at, _, _ in hit.swaps] == [2, 3]
    store.kv.tiers.forget([hit.swaps[1][1]])
    request = make_request("d", range(16))
    assert store.board(request)
    assert request.num_computed == 12 and request.num_indexed == 2
    assert store.kv.pool.find(request.block_hashes[2]) is None
    store.commit(request)
    assert store.kv.pool.find(request.block_hashes[2]) == request.block_table[2]
    store.check()


def test_what_was_swapped_in_is_found_after_one_step(make_request: MakeRequest, make_store: MakeStore) -> None:
    """However few tokens that step computes."""
    store = make_store(4, host_blocks=4)
    store.release(store.compute(make_request("a", range(8))))
    store.release(store.compute(make_request("b", 16)))
    request = store.compute(make_request("c", range(9)))
    assert swaps(store, BlockOpKind.SWAP_IN) == 2
    assert store.kv.lookup(make_request("d", range(9))).table == request.block_table[:2]


def test_a_pinned_beginning_that_is_swapped_in_stays(make_request: MakeRequest, make_store: MakeStore) -> None:
    """After a restart, its KV comes from the disk."""
    store = make_store(4, host_blocks=4)
    store.kv.pin(range(8))
    store.release(store.compute(make_request("a", range(9))))
    store.kv.save()
    store.apply()
    store.kv.forget_all()
    store.check()
    assert store.known(range(9)) == 0, "host memory is lost too"

    store = make_store(4, disk_blocks=4)
    store.kv.pin(range(8))
    store.release(store.compute(make_request("a", range(9))))
    store.kv.save()
    store.apply()
    store.kv.forget_all()
    assert store.known(range(9)) == 8, "the disk keeps it"
    store.release(store.compute(make_request("b", range(9))))
    assert swaps(store, BlockOpKind.SWAP_IN) == 2
    assert store.kv.pool.num_free == 2
    store.check()


# -- over restarts


def test_contents_from_an_earlier_run_are_found(make_request: MakeRequest, make_store: MakeStore) -> None:
    """By the same secret only, and not without a prefix cache. Host blocks are numbered before those of the disk."""
    first = make_store(4, disk_blocks=6, secret=b"s")
    first.release(first.compute(make_request("a", range(16))))
    first.kv.save()
    first.apply()
    contents = [(op.dst, op.content) for op in first.ops]
    for secret, caching, known in ((b"s", True, 8), (b"other", True, 0), (b"s", False, 0)):
        store = make_store(4, host_blocks=3, disk_blocks=6, secret=secret, caching=caching, disk_contents=contents)
        store.elsewhere[3:] = first.elsewhere
        assert store.known(range(10)) == known
        request = store.compute(make_request("b", range(10)))
        assert swaps(store, BlockOpKind.SWAP_IN) == known // 4
        assert all(op.src >= 3 for op in store.ops)
        store.check()
        store.release(request)
        assert store.places[1].num_free == 6


def test_saving_keeps_the_most_recent_and_the_beginnings(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Three prefixes of two blocks, and a disk of three: the last one, and the beginning of the one before."""
    store = make_store(8, disk_blocks=3, secret=b"s")
    for first in (100, 200, 300):
        store.release(store.compute(make_request("a", range(first, first + 8))))
    store.kv.save()
    store.apply()
    contents = {op.dst: op.content for op in store.ops}
    later = make_store(8, disk_blocks=3, secret=b"s", disk_contents=contents.items())
    assert [later.known(range(first, first + 9)) for first in (100, 200, 300)] == [0, 4, 8]
    store.check()


def test_saving_goes_to_the_disk_also_what_host_memory_has(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Host memory does not outlast the engine."""
    store = make_store(8, host_blocks=4, disk_blocks=4)
    request = store.compute(make_request("a", range(8)))
    assert store.swap_out(request)
    assert sorted(request.host_table) == [0, 1]
    store.kv.save()
    store.kv.save()
    store.apply()
    assert len({op.dst for op in store.ops if op.dst >= 4}) == 2
    assert swaps(store, BlockOpKind.SWAP_OUT) == 4
    store.check()


def test_saving_without_a_place_to_save_to_does_nothing(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    store.release(store.compute(make_request("a", range(8))))
    store.kv.save()
    assert store.kv.take_ops() == ()


# -- what is lost


def test_damaged_blocks_are_not_found_again(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(4, host_blocks=4, disk_blocks=4)
    store.release(store.compute(make_request("a", range(12))))
    store.release(store.compute(make_request("b", 16)))
    hit = store.kv.lookup(make_request("c", range(13)))
    assert hit.num_tokens == 12 and all(address >= 4 for _, address, _ in hit.swaps)
    store.kv.tiers.forget([hit.swaps[1][1]])
    store.check()
    assert store.known(range(13)) == 4


def test_a_damaged_block_that_a_request_still_has_is_free_after_it(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store(4, host_blocks=2)
    request = store.compute(make_request("a", range(8)))
    assert store.swap_out(request)
    store.kv.tiers.forget(request.host_table)
    store.check()
    store.release(request)
    assert store.places[0].take()[1] is None and store.places[0].num_free == 1


def test_after_a_failure_only_the_disk_is_known(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Ops that were not executed yet never will be."""
    for tiers, known in (({"host_blocks": 4}, 0), ({"disk_blocks": 4}, 8), ({"host_blocks": 2, "disk_blocks": 4}, 8)):
        store = make_store(4, **tiers)
        store.release(store.compute(make_request("a", range(8))))
        store.release(store.compute(make_request("b", 16)))
        assert store.known(range(9)) == 8
        store.kv.forget_all()
        assert store.kv.take_ops() == ()
        assert store.known(range(9)) == known
        assert store.kv.pool.num_free == 4
        store.check()


def test_what_was_never_written_to_disk_is_not_found_there(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Its op was planned, and then a step before it failed."""
    store = make_store(4, disk_blocks=4)
    store.release(store.compute(make_request("a", range(8))))
    other = make_request("b", 16)
    assert store.board(other)
    assert store.known(range(9)) == 8
    store.release(other)
    store.kv.forget_all()
    assert store.known(range(9)) == 0
    store.check()


def test_without_a_prefix_cache_requests_are_swapped_and_nothing_is_kept(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store(4, host_blocks=8, caching=False)
    first, second = (store.compute(make_request(id, range(8))) for id in "ab")
    assert store.swap_out(first) and store.swap_out(second)
    assert len({*first.host_table, *second.host_table}) == 4 and all(op.content == b"" for op in store.kv.take_ops())
    store.release(first)
    store.release(second)
    store.compute(make_request("c", 16))
    assert store.kv.take_ops() == () and store.known(range(8)) == 0
    store.kv.save()
    assert store.kv.take_ops() == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda store, request: request.host_table.pop(),
        lambda store, request: request.host_table.append(request.host_table[0]),
        lambda store, request: store.places[0].share(0),
        lambda store, request: store.places[1].take(),
    ],
)
def test_check_counts_the_blocks_elsewhere(
    make_request: MakeRequest, make_store: MakeStore, damage: Callable[[Any, Request], object]
) -> None:
    store = make_store(4, host_blocks=2, disk_blocks=2)
    request = store.compute(make_request("a", 12))
    assert store.swap_out(request)
    store.check()
    damage(store, request)
    with pytest.raises(AssertionError):
        store.check()


# -- over whole lives


@pytest.mark.parametrize("seed", range(60))
def test_contents_are_never_mixed_up(make_request: MakeRequest, make_store: MakeStore, seed: int) -> None:
    """Requests with common beginnings board, grow, are swapped out, come back and end; `Store` checks all they read."""
    rng = Random(seed)
    store = make_store(
        rng.randint(3, 8),
        rng.choice((1, 2, 4)),
        host_blocks=rng.choice((0, 1, 3, 6)),
        disk_blocks=rng.choice((0, 1, 3, 6)),
        windows=rng.choice(((0,), (0,), (4,), (0, 3))),
        caching=rng.random() < 0.8,
    )
    kv = store.kv
    waiting: list[Request] = []
    for number in range(150):
        move = rng.random()
        if move < 0.3 and len(store.live) < 4:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 10))]
            request = make_request(str(number), tokens)
            if store.board(request, rng.randint(1, len(tokens) - kv.lookup(request).num_tokens)):
                store.commit(request)
        elif waiting and move < 0.5:
            request = rng.choice(waiting)
            if store.board(request, 1):
                waiting.remove(request)
                store.commit(request)
        elif [request for request in store.live if request not in waiting]:
            request = rng.choice([request for request in store.live if request not in waiting])
            if move < 0.8:
                if request.num_computed == len(request.token_ids):
                    request.token_ids.append(rng.randrange(2))
                if store.grow(request):
                    store.commit(request)
            elif move < 0.92:
                if request.num_computed == len(request.token_ids):
                    request.token_ids.append(rng.randrange(2))
                if store.swap_out(request):
                    waiting.append(request)
            else:
                store.release(request)
        store.check()
        if number % 3 == 0:
            store.apply()
    for request in list(store.live):
        store.release(request)
    assert kv.pool.num_free == kv.pool.num_blocks
    assert all(tier.pool.num_free == tier.pool.num_blocks for tier in kv.tiers)
    store.check()


def test_lookup_of_a_swapped_request_changes_nothing(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(4, host_blocks=4)
    request = store.compute(make_request("a", 9))
    assert store.swap_out(request)
    before = store.state()
    assert store.kv.lookup(request) != NO_HIT
    assert store.state() == before
