"""The rules of the KV manager (DESIGN, section 5), one by one. Blocks hold four tokens unless a test says otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from chairlift.core.kv import BlockPool, KVManager
from chairlift.core.plan import BlockOp, BlockOpKind, Capacity
from chairlift.core.request import Request

MakeRequest = Callable[..., Request]


def make_kv(num_blocks: int = 10, block_size: int = 4, caching: bool = True) -> KVManager:
    return KVManager(Capacity(num_blocks, block_size, 64), enable_prefix_caching=caching)


def compute(kv: KVManager, request: Request, *, total: int = 0) -> Request:
    """Admits a request and computes all its tokens."""
    request.max_len = request.max_len or len(request.token_ids)
    hit = kv.lookup(request)
    n = len(request.token_ids) - len(hit) * kv.block_size
    assert kv.admit(request, hit, n, total=total, promise=True)
    kv.commit(request, n)
    return request


def append(kv: KVManager, request: Request, *tokens: int) -> None:
    """Generates tokens and computes each."""
    for token in tokens:
        request.token_ids.append(token)
        assert kv.grow(request, 1)
        kv.commit(request, 1)


def state(kv: KVManager, request: Request) -> tuple[object, ...]:
    pool = kv.pool
    return (
        pool.num_free,
        [pool.refs(block) for block in range(pool.num_blocks)],
        list(pool._blank),
        list(pool._cached),
        kv.reserved,
        list(request.block_table),
        request.num_computed,
        request.num_reserved,
    )


# -- rule 1


def test_rule_1_lookup_changes_nothing(make_request: MakeRequest) -> None:
    kv = make_kv()
    kv.release(compute(kv, make_request("a", range(12))))
    again = make_request("b", range(12))
    before = state(kv, again)
    assert len(kv.lookup(again)) == 2
    assert state(kv, again) == before


@pytest.mark.parametrize("demand", [{"n": 36}, {"n": 20, "total": 11}, {"n": 20, "headroom": 6}])
def test_rule_1_admit_is_all_or_nothing(make_request: MakeRequest, demand: dict[str, int]) -> None:
    """Of ten blocks two are taken, and the hit is for two of the free ones."""
    kv = make_kv()
    compute(kv, make_request("other", 8))
    kv.release(compute(kv, make_request("a", range(8))))
    request = make_request("b", range(60))
    hit = kv.lookup(request)
    assert len(hit) == 2
    before = state(kv, request)
    assert not kv.admit(request, hit, **demand)
    assert state(kv, request) == before
    assert kv.admit(request, hit, demand["n"] - 12)
    assert request.num_computed == 8


def test_rule_1_grow_is_all_or_nothing(make_request: MakeRequest) -> None:
    kv = make_kv(3)
    request = compute(kv, make_request("a", 8))
    before = state(kv, request)
    assert not kv.grow(request, 9)
    assert state(kv, request) == before
    assert kv.grow(request, 4)


# -- rule 2


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)])
def test_rule_2_a_hit_leaves_the_last_token(make_request: MakeRequest, length: int, blocks: int) -> None:
    kv = make_kv()
    compute(kv, make_request("a", range(16)))
    assert len(kv.lookup(make_request("b", range(length)))) == blocks


def test_lookup_ends_at_the_first_difference(make_request: MakeRequest) -> None:
    kv = make_kv()
    first = compute(kv, make_request("a", range(16)))
    assert kv.lookup(make_request("b", [*range(8), 99, *range(9, 16)])) == first.block_table[:2]


def test_equal_blocks_after_different_beginnings_are_different(make_request: MakeRequest) -> None:
    kv = make_kv()
    compute(kv, make_request("a", [9, 9, 9, 9, 1, 2, 3, 4, 5]))
    kv.release(compute(kv, make_request("c", [8, 8, 8, 8])))
    assert len(kv.lookup(make_request("b", [8, 8, 8, 8, 1, 2, 3, 4, 5]))) == 1


def test_no_hits_when_off_or_when_prompt_logprobs_are_wanted(make_request: MakeRequest) -> None:
    """C6: prompt logprobs need every prompt token to be computed."""
    for caching, params in ((False, {}), (True, {"prompt_logprobs": 0})):
        kv = make_kv(caching=caching)
        compute(kv, make_request("a", range(12)))
        assert kv.lookup(make_request("b", range(12), **params)) == []


# -- rule 3


def test_rule_3_a_block_is_found_only_once_it_is_computed(make_request: MakeRequest) -> None:
    kv = make_kv()
    first, second = make_request("a", range(9)), make_request("b", range(9))
    assert kv.admit(first, [], 9)
    assert kv.lookup(second) == []
    kv.commit(first, 4)
    assert kv.lookup(second) == first.block_table[:1]
    kv.commit(first, 3)
    assert kv.lookup(second) == first.block_table[:1], "a block of which three tokens are computed"
    kv.commit(first, 1)
    assert kv.lookup(second) == first.block_table[:2]


def test_generated_tokens_are_cached_too(make_request: MakeRequest) -> None:
    kv = make_kv()
    first = compute(kv, make_request("a", range(6)))
    append(kv, first, 6, 7)
    assert kv.lookup(make_request("b", range(9))) == first.block_table


# -- rule 4


def test_rule_4_blank_blocks_are_reused_first_then_the_oldest_end_of_chain(make_request: MakeRequest) -> None:
    kv = make_kv(7)
    old = compute(kv, make_request("old", range(100, 108)))
    new = compute(kv, make_request("new", range(200, 210)))  # two full blocks and one of two tokens
    (o1, o2), (n1, n2, partial) = old.block_table, new.block_table
    kv.release(old)
    kv.release(new)
    taken = [kv.pool.take() for _ in range(7)]
    assert partial in taken[:3], "blocks without known contents come first"
    assert taken[3:] == [o2, o1, n2, n1]


def test_rule_4_a_freed_block_can_still_be_hit_until_it_is_taken(make_request: MakeRequest) -> None:
    kv = make_kv(2)
    kv.release(compute(kv, make_request("a", range(8))))
    again = make_request("b", range(8))
    assert len(kv.lookup(again)) == 1
    kv.release(compute(kv, make_request("c", 8)))
    assert kv.lookup(again) == []


def test_a_hit_block_becomes_the_most_recent(make_request: MakeRequest) -> None:
    kv = make_kv(4)
    for id, first in (("a", 100), ("b", 200)):
        kv.release(compute(kv, make_request(id, range(first, first + 8))))
    kv.release(compute(kv, make_request("again", range(100, 108))))
    compute(kv, make_request("c", 8))
    assert len(kv.lookup(make_request("a2", range(100, 109)))) == 2
    assert len(kv.lookup(make_request("b2", range(200, 209)))) == 0


# -- rule 5


def test_rule_5_hit_blocks_without_owner_are_not_free_for_the_rest(make_request: MakeRequest) -> None:
    kv = make_kv(3)
    kv.release(compute(kv, make_request("a", range(8))))
    request = make_request("b", range(16))
    hit = kv.lookup(request)
    assert len(hit) == 2 and kv.pool.num_free == 3
    assert not kv.admit(request, hit, 8), "two more blocks, of which only one is there"
    assert kv.admit(request, hit, 4)
    assert request.block_table[:2] == hit and len(set(request.block_table)) == 3
    assert kv.pool.num_free == 0
    kv.check([request])


def test_a_hit_on_an_owned_block_costs_nothing(make_request: MakeRequest) -> None:
    kv = make_kv(3)
    first = compute(kv, make_request("a", range(8)))
    second = make_request("b", range(9))
    assert kv.admit(second, kv.lookup(second), 1)
    assert [kv.pool.refs(block) for block in first.block_table] == [2, 2]
    kv.release(first)
    kv.check([second])


# -- rules 6 and 7


def fork(kv: KVManager, parent: Request, make_request: MakeRequest, *, index: int = 1) -> Request:
    child = make_request(parent.id, parent.token_ids, index=index)
    child.max_len = parent.max_len
    kv.fork(parent, child)
    return child


def test_rule_6_writing_into_a_shared_block_copies_it_first(make_request: MakeRequest) -> None:
    kv = make_kv()
    parent = compute(kv, make_request("a", 6))
    whole, partial = parent.block_table
    child = fork(kv, parent, make_request)
    append(kv, parent, 1)
    assert parent.block_table[0] == whole and parent.block_table[1] != partial
    assert child.block_table == [whole, partial]
    assert kv.take_ops() == (BlockOp(BlockOpKind.COPY, partial, parent.block_table[1]),)
    append(kv, child, 2)
    assert child.block_table == [whole, partial], "the last owner need not copy"
    assert kv.take_ops() == ()
    kv.check([parent, child])


def test_rule_6_full_shared_blocks_are_not_copied(make_request: MakeRequest) -> None:
    kv = make_kv()
    parent = compute(kv, make_request("a", 8))
    child = fork(kv, parent, make_request)
    append(kv, parent, 1)
    append(kv, child, 2)
    assert kv.take_ops() == ()
    assert parent.block_table[:2] == child.block_table[:2] and parent.block_table[2] != child.block_table[2]


def test_rule_6_a_fork_shares_only_computed_tokens(make_request: MakeRequest) -> None:
    kv = make_kv()
    parent = make_request("a", 6)
    assert kv.admit(parent, [], 14)  # padded
    kv.commit(parent, 6)
    assert fork(kv, parent, make_request).block_table == parent.block_table[:2]


def test_rule_7_ops_come_in_the_order_they_were_made_and_once(make_request: MakeRequest) -> None:
    """A block that was copied away may be overwritten by the next copy, so the order matters."""
    kv = make_kv(4, 4)
    parent = compute(kv, make_request("a", 3))
    samples = [parent, *(fork(kv, parent, make_request, index=i) for i in (1, 2))]
    source = parent.block_table[0]
    for i, sample in enumerate(samples):
        append(kv, sample, i)
    assert kv.take_ops() == tuple(BlockOp(BlockOpKind.COPY, source, sample.block_table[0]) for sample in samples[:2])
    assert kv.take_ops() == ()


def test_a_copy_that_does_not_fit_changes_nothing(make_request: MakeRequest) -> None:
    kv = make_kv(1)
    parent = compute(kv, make_request("a", 3))
    child = fork(kv, parent, make_request)
    parent.token_ids.append(1)
    assert not kv.grow(parent, 1)
    assert kv.take_ops() == ()
    kv.release(child)
    assert kv.grow(parent, 1), "alone, it needs no copy"
    assert kv.take_ops() == ()


# -- reservations


def test_reserved_blocks_are_only_for_their_owner(make_request: MakeRequest) -> None:
    kv = make_kv(6)
    owner = compute(kv, make_request("a", 4), total=4)
    assert (kv.reserved, kv.pool.num_free, kv.num_available) == (3, 5, 2)
    assert not kv.admit(make_request("b", 12), [], 12)
    other = compute(kv, make_request("c", 8))
    owner.token_ids += range(12)
    assert kv.grow(owner, 12)
    assert kv.reserved == 0 and kv.pool.num_free == 0
    kv.release(owner)
    kv.release(other)
    kv.check([])


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("output", [1, 3, 4, 9])
def test_full_blocks_suffice_for_all_samples(make_request: MakeRequest, prompt: int, n: int, output: int) -> None:
    """In a pool of exactly that size, all samples grow side by side to their greatest length."""
    request = make_request("a", prompt, n=n)
    request.max_len = prompt + output
    kv = make_kv(make_kv().full_blocks(request))
    compute(kv, request, total=kv.full_blocks(request))
    assert kv.num_available == 0
    samples = [request, *(fork(kv, request, make_request, index=i) for i in range(1, n))]
    for token in range(output):
        for sample in samples:
            append(kv, sample, token)
            kv.check(samples)


# -- rule 9


def test_rule_9_release_gives_back_everything(make_request: MakeRequest) -> None:
    kv = make_kv()
    request = compute(kv, make_request("a", 10), total=5)
    child = fork(kv, request, make_request)
    for holder in (request, child):
        kv.release(holder)
        assert (holder.block_table, holder.num_computed, holder.num_reserved) == ([], 0, 0)
    assert kv.pool.num_free == 10 and kv.reserved == 0
    kv.check([])


@pytest.mark.parametrize(
    "damage",
    [
        lambda kv, request: request.block_table.pop(),
        lambda kv, request: request.block_table.append(request.block_table[0]),
        lambda kv, request: kv.pool.share(request.block_table[0]),
        lambda kv, request: kv.pool.drop(request.block_table[0]),
        lambda kv, request: kv.pool.take(),
        lambda kv, request: kv.pool._blank.append(request.block_table[0]),
        lambda kv, request: kv.pool._hashes.__setitem__(request.block_table[0], None),
        lambda kv, request: kv.pool._by_hash.clear(),
        lambda kv, request: setattr(request, "num_computed", 13),
        lambda kv, request: setattr(request, "num_reserved", 1),
        lambda kv, request: setattr(kv, "reserved", 1),
    ],
)
def test_rule_9_check_finds_damage(make_request: MakeRequest, damage: Callable[[KVManager, Request], object]) -> None:
    kv = make_kv()
    request = compute(kv, make_request("a", 12))
    kv.check([request])
    damage(kv, request)
    with pytest.raises(AssertionError):
        kv.check([request])


# -- rules 13 and 14


def test_rule_13_tenants_do_not_share(make_request: MakeRequest) -> None:
    kv = make_kv()
    compute(kv, make_request("a", range(12), tenant="red"))
    assert kv.lookup(make_request("b", range(12), tenant="blue")) == []
    assert len(kv.lookup(make_request("c", range(12), tenant="red"))) == 2


def test_rule_13_hashes_are_keyed(make_request: MakeRequest) -> None:
    """No client can compute the hash of a block and search for a collision."""
    hashes = []
    for kv in (make_kv(), make_kv()):
        hashes.append(compute(kv, make_request("a", range(4))).block_hashes)
    assert hashes[0] != hashes[1]


def test_rule_14_each_block_is_hashed_once(make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv()
    digests: list[bytes] = []
    digest = kv._digest
    monkeypatch.setattr(kv, "_digest", lambda data: digests.append(data) or digest(data))
    request = make_request("a", 15)
    for _ in range(5):
        kv.lookup(request)
    compute(kv, request)
    append(kv, request, 1)
    kv.release(request)
    compute(kv, request)
    assert len(digests) == 1 + 4, "the tenant's, and one a block"


# -- the pool


def test_two_blocks_of_the_same_content_are_indexed_once(make_request: MakeRequest) -> None:
    """Two requests that computed the same at the same time; the second block is simply not found."""
    kv = make_kv(4)
    first, second = make_request("a", range(8)), make_request("b", range(8))
    for request in (first, second):
        assert kv.admit(request, [], 8)
    for request in (first, second):
        kv.commit(request, 8)
    assert kv.lookup(make_request("c", range(8))) == first.block_table[:1]
    kv.release(second)
    kv.check([first])
    kv.release(first)
    kv.check([])


def test_take_forgets_the_contents() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.index(block, b"x")
    pool.drop(block)
    assert pool.find(b"x") == block
    assert pool.take() == block
    assert pool.find(b"x") is None
    pool.check(Counter({block: 1}))
