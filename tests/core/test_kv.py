"""The rules of the KV manager (DESIGN, section 5), one by one. Blocks hold four tokens unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chairlift.core.kv import NO_HIT, KVManager
from chairlift.core.layout import NO_BLOCK
from chairlift.core.plan import BlockOp, BlockOpKind
from chairlift.core.request import Request, Reservation

MakeRequest = Callable[..., Request]
MakeStore = Callable[..., Any]


# -- rule 1


def test_rule_1_lookup_changes_nothing(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    store.release(store.compute(make_request("a", range(12))))
    again = make_request("b", range(12))
    before = store.state()
    assert store.kv.lookup(again).num_tokens == 8
    assert store.state() == before


@pytest.mark.parametrize(
    ("too_much", "all_there_is"),
    [
        ({"n": 25}, {"n": 24}),
        ({"n": 12, "total": 9}, {"n": 12, "total": 8}),
        ({"n": 20, "headroom": 2}, {"n": 20, "headroom": 1}),
    ],
)
def test_rule_1_admit_is_all_or_nothing(
    make_request: MakeRequest, make_store: MakeStore, too_much: dict[str, int], all_there_is: dict[str, int]
) -> None:
    """Of ten blocks two are taken, and the hit is for two of the eight free ones."""
    store = make_store()
    store.compute(make_request("other", 8))
    store.release(store.compute(make_request("a", range(8))))
    request = make_request("b", range(60))
    hit = store.kv.lookup(request)
    before = store.state()
    assert not store.kv.admit(request, hit, **too_much, promise=True)
    assert store.state() == before
    assert store.board(request, **all_there_is, promise=True)
    assert request.num_computed == 8 and request.writable_end == 8 + all_there_is["n"]
    store.check()


def test_rule_1_grow_is_all_or_nothing(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(3)
    request = store.compute(make_request("a", 8))
    before = store.state()
    assert not store.kv.grow(request, 5)
    assert store.state() == before
    assert store.kv.grow(request, 4)
    assert request.writable_end == 12


def test_grow_goes_on_from_what_is_planned(make_request: MakeRequest, make_store: MakeStore) -> None:
    """A step in flight has its blocks already; the next one comes after it."""
    store = make_store()
    request = make_request("a", 20)
    assert store.board(request, n=7)
    assert store.kv.grow(request, 1) and len(request.block_table) == 2
    request.num_planned = 8
    assert store.kv.grow(request, 1) and len(request.block_table) == 3
    request.num_planned = 9
    assert store.kv.grow(request, 11) and len(request.block_table) == 5


def test_the_tables_that_plans_carry_are_made_anew_when_blocks_change(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store()
    request = store.compute(make_request("a", 3))
    for change in (
        lambda: store.append(request, 1, 2),
        lambda: store.fork(request),
        lambda: store.release(request),
    ):
        request.table = tuple(request.block_table)
        change()
        assert request.table is None


# -- rule 2


@pytest.mark.parametrize(("length", "known"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_rule_2_a_hit_leaves_the_last_token(
    make_request: MakeRequest, make_store: MakeStore, length: int, known: int
) -> None:
    store = make_store()
    store.compute(make_request("a", range(16)))
    assert store.known(range(length)) == known


def test_lookup_ends_at_the_first_difference(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    first = store.compute(make_request("a", range(16)))
    hit = store.kv.lookup(make_request("b", [*range(8), 99, *range(9, 16)]))
    assert (hit.num_tokens, hit.table, hit.swaps) == (8, first.block_table[:2], [])


def test_equal_blocks_after_different_beginnings_are_different(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store()
    store.compute(make_request("a", [9, 9, 9, 9, 1, 2, 3, 4, 5]))
    store.release(store.compute(make_request("c", [8, 8, 8, 8])))
    assert store.known([8, 8, 8, 8, 1, 2, 3, 4, 5]) == 4


def test_no_hits_when_off_or_when_prompt_logprobs_are_wanted(make_request: MakeRequest, make_store: MakeStore) -> None:
    """C6: prompt logprobs need every prompt token to be computed."""
    for caching, params in ((False, {}), (True, {"prompt_logprobs": 0})):
        store = make_store(caching=caching)
        store.compute(make_request("a", range(12)))
        assert store.known(range(12), **params) == 0


# -- rule 3


def test_rule_3_a_block_is_found_only_once_it_is_computed(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    first, second = make_request("a", range(9)), make_request("b", range(9))
    assert store.board(first)
    assert store.kv.lookup(second) == NO_HIT
    for n, known in ((4, 4), (3, 4), (1, 8)):
        store.kv.commit(first, n)
        hit = store.kv.lookup(second)
        assert (hit.num_tokens, hit.table) == (known, first.block_table[: known // 4])


def test_rule_3_a_long_piece_fills_several_blocks(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    first = store.compute(make_request("a", range(15)))
    assert store.kv.lookup(make_request("b", range(16))).table == first.block_table[:3]


def test_generated_tokens_are_cached_too(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    first = store.compute(make_request("a", range(6)))
    store.append(first, 6, 7)
    assert store.kv.lookup(make_request("b", range(9))).table == first.block_table


# -- rule 4


def test_rule_4_blank_blocks_are_reused_first_then_the_oldest_end_of_chain(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store(7)
    old = store.compute(make_request("old", range(100, 108)))
    new = store.compute(make_request("new", range(200, 210)))  # two full blocks and one of two tokens
    (o1, o2), (n1, n2, partial) = old.block_table, new.block_table
    store.release(old)
    store.release(new)
    taken = [store.kv.pool.take()[0] for _ in range(7)]
    assert partial in taken[:3], "blocks without known contents come first"
    assert taken[3:] == [o2, o1, n2, n1]


def test_rule_4_a_freed_block_can_still_be_hit_until_it_is_taken(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store(2)
    store.release(store.compute(make_request("a", range(8))))
    again = make_request("b", range(8))
    assert store.kv.lookup(again).num_tokens == 4
    store.release(store.compute(make_request("c", 8)))
    assert store.kv.lookup(again) == NO_HIT


def test_a_hit_block_becomes_the_most_recent(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(4)
    for id, first in (("a", 100), ("b", 200)):
        store.release(store.compute(make_request(id, range(first, first + 8))))
    store.release(store.compute(make_request("again", range(100, 108))))
    store.compute(make_request("c", 8))
    assert store.known(range(100, 109)) == 8
    assert store.known(range(200, 209)) == 0


def test_what_nobody_can_find_is_blank_and_its_content_can_be_found_elsewhere(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    """Two requests that computed the same at the same time; the second's blocks are simply not found."""
    store = make_store(4)
    first, second = make_request("a", range(8)), make_request("b", range(8))
    for request in (first, second):
        assert store.board(request)
    for request in (first, second):
        store.kv.commit(request, 8)
    assert store.kv.lookup(make_request("c", range(8))).table == first.block_table[:1]
    store.release(second)
    store.check()
    store.release(first)
    store.check()


# -- rule 5


def test_rule_5_hit_blocks_without_owner_are_not_free_for_the_rest(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store(3)
    store.release(store.compute(make_request("a", range(8))))
    request = make_request("b", range(16))
    hit = store.kv.lookup(request)
    assert hit.num_tokens == 8 and store.kv.pool.num_free == 3
    assert not store.kv.admit(request, hit, 5), "two more blocks, of which only one is there"
    assert store.board(request, 4)
    assert request.block_table[:2] == hit.table and len(set(request.block_table)) == 3
    assert store.kv.pool.num_free == 0
    store.check()


def test_a_hit_on_an_owned_block_costs_nothing(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(3)
    first = store.compute(make_request("a", range(8)))
    second = make_request("b", range(9))
    assert store.board(second)
    assert [store.kv.pool.refs(block) for block in first.block_table] == [2, 2]
    store.release(first)
    store.check()


# -- rules 6 and 7


def test_rule_6_writing_into_a_shared_block_copies_it_first(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    parent = store.compute(make_request("a", 6))
    whole, partial = parent.block_table
    child = store.fork(parent)
    store.append(parent, 1)
    assert parent.block_table[0] == whole and parent.block_table[1] != partial
    assert child.block_table == [whole, partial]
    assert store.ops == [BlockOp(BlockOpKind.COPY, partial, parent.block_table[1])]
    store.append(child, 2)
    assert child.block_table == [whole, partial], "the last owner need not copy"
    assert len(store.ops) == 1
    store.check()


def test_rule_6_full_shared_blocks_are_not_copied(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    parent = store.compute(make_request("a", 8))
    child = store.fork(parent)
    store.append(parent, 1)
    store.append(child, 2)
    assert store.ops == []
    assert parent.block_table[:2] == child.block_table[:2] and parent.block_table[2] != child.block_table[2]


def test_rule_6_a_fork_shares_only_computed_tokens(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    parent = make_request("a", 6)
    assert store.board(parent, n=14)  # padded
    store.kv.commit(parent, 6)
    child = store.fork(parent)
    assert child.block_table == parent.block_table[:2]
    assert child.num_computed == child.num_planned == 6 and child.writable_end == parent.writable_end == 6


def test_rule_6_a_fork_knows_what_its_parent_knows(
    make_request: MakeRequest, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child does not hash its parent's blocks again, and what it fills itself is found."""
    store = make_store()
    parent = store.compute(make_request("a", range(6)))
    child = store.fork(parent)
    assert child.num_indexed == 1 and child.block_hashes == parent.block_hashes
    assert child.block_hashes is not parent.block_hashes
    store.append(parent, 6, 7)
    store.append(child, 16, 17)
    for tokens, owner in (((6, 7), parent), ((16, 17), child)):
        assert store.kv.lookup(make_request("b", [*range(6), *tokens, 0])).table == owner.block_table


def test_rule_7_ops_come_in_the_order_they_were_made_and_once(make_request: MakeRequest, make_store: MakeStore) -> None:
    """A block that was copied away may be overwritten by the next copy, so the order matters."""
    store = make_store(4, 4)
    parent = store.compute(make_request("a", 3))
    samples = [parent, *(store.fork(parent, index=i) for i in (1, 2))]
    source = parent.block_table[0]
    for i, sample in enumerate(samples):
        store.append(sample, i)
    assert store.ops == [BlockOp(BlockOpKind.COPY, source, sample.block_table[0]) for sample in samples[:2]]
    assert store.kv.take_ops() == ()


def test_a_copy_that_does_not_fit_changes_nothing(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(1)
    parent = store.compute(make_request("a", 3))
    child = store.fork(parent)
    parent.token_ids.append(1)
    before = store.state()
    assert not store.kv.grow(parent, 1)
    assert store.state() == before
    store.release(child)
    assert store.kv.grow(parent, 1), "alone, it needs no copy"
    assert store.kv.take_ops() == ()


# -- rule 9


def test_rule_9_release_gives_back_everything(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    request = store.compute(make_request("a", 10), total=5)
    child = store.fork(request)
    for holder in (request, child):
        store.release(holder)
        assert (holder.block_table, holder.num_computed, holder.writable_end, holder.num_indexed) == ([], 0, 0, 0)
        assert holder.reservation is None
    assert store.kv.pool.num_free == 10 and store.kv.reserved == 0
    store.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda kv, request: request.block_table.pop(),
        lambda kv, request: request.block_table.append(request.block_table[0]),
        lambda kv, request: request.block_table.__setitem__(0, NO_BLOCK),
        lambda kv, request: kv.pool.share(request.block_table[0]),
        lambda kv, request: kv.pool.drop(request.block_table[0]),
        lambda kv, request: kv.pool.take(),
        lambda kv, request: kv.pool._by_hash.clear(),
        lambda kv, request: setattr(request, "num_computed", 13),
        lambda kv, request: request.token_ids.pop(),
        lambda kv, request: setattr(request, "num_planned", 11),
        lambda kv, request: setattr(request, "writable_end", 13),
        lambda kv, request: setattr(request, "table", (0,)),
        lambda kv, request: setattr(request, "host_table", [0]),
        lambda kv, request: setattr(request, "reservation", None),
        lambda kv, request: setattr(request, "reservation", Reservation(2)),
        lambda kv, request: setattr(request.reservation, "left", 1),
        lambda kv, request: setattr(kv, "reserved", 1),
        lambda kv, request: (setattr(kv, "reserved", 8), setattr(request.reservation, "left", 8)),
        lambda kv, request: kv.tiers.take(),
    ],
)
def test_rule_9_check_finds_damage(
    make_request: MakeRequest, make_store: MakeStore, damage: Callable[[KVManager, Request], object]
) -> None:
    store = make_store(host_blocks=1)
    request = store.compute(make_request("a", 12), total=5)
    store.check()
    damage(store.kv, request)
    with pytest.raises(AssertionError):
        store.check()


# -- rules 13 and 14


def test_rule_13_tenants_do_not_share(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store()
    store.compute(make_request("a", range(12), tenant="red"))
    assert store.known(range(12), tenant="blue") == 0
    assert store.known(range(12)) == 0
    assert store.known(range(12), tenant="red") == 8


def test_rule_13_hashes_are_keyed(make_request: MakeRequest, make_store: MakeStore) -> None:
    """No client can compute the hash of a block and search for a collision; with the same secret they are the same."""
    hashes = [
        tuple(store.compute(make_request("a", range(4))).block_hashes)
        for store in (make_store(), make_store(), make_store(secret=b"s"), make_store(secret=b"s"))
    ]
    assert len(set(hashes)) == 3 and hashes[2] == hashes[3]


def test_rule_14_each_block_is_hashed_once(
    make_request: MakeRequest, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    digests: list[bytes] = []
    digest = store.kv._hashes._digest
    monkeypatch.setattr(store.kv._hashes, "_digest", lambda data: digests.append(data) or digest(data))
    request = make_request("a", 15)
    for _ in range(5):
        store.kv.lookup(request)
    store.compute(request)
    store.append(request, 1)
    store.release(request)
    store.compute(request)
    assert len(digests) == 1 + 4, "one a block, and one to see whether the first is public"


def test_rule_14_each_block_is_indexed_once(
    make_request: MakeRequest, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store()
    indexed: list[int] = []
    index = store.kv.pool.index
    monkeypatch.setattr(store.kv.pool, "index", lambda block, content: indexed.append(block) or index(block, content))
    request = store.compute(make_request("a", 9))
    store.append(request, *range(12))
    assert indexed == request.block_table[:5]


def test_rule_14_what_is_taken_is_writable_to_its_end(make_request: MakeRequest, make_store: MakeStore) -> None:
    """So that a decode asks for memory once a block."""
    store = make_store()
    request = make_request("a", 20)
    assert store.board(request, 5) and request.writable_end == 8
    assert store.grow(request, 4) and request.writable_end == 12


def test_rule_14_a_token_within_a_block_costs_nothing(
    make_request: MakeRequest, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are looked at only when one fills up."""
    store = make_store(block_size=16)
    request = store.compute(make_request("a", 5))
    calls: list[Request] = []
    monkeypatch.setattr(store.kv, "_filled", calls.append)
    store.append(request, *range(10))
    assert calls == []
    store.append(request, 10)
    assert calls == [request]
