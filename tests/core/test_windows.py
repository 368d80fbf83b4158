"""Sliding windows: a group's blocks are given back when their window has passed, and no earlier."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from chairlift.core.layout import NO_BLOCK
from chairlift.core.plan import BlockOpKind
from chairlift.core.request import Request

MakeRequest = Callable[..., Request]
MakeRig = Callable[..., Any]
MakeStore = Callable[..., Any]

WINDOWS = ((0,), (4,), (0, 1), (0, 4, 4), (3, 0), (2, 9))


def rows(request: Request, num_groups: int, g: int) -> list[int]:
    """The indexes of the blocks that a request holds for a group."""
    return [i for i, block in enumerate(request.block_table[g::num_groups]) if block != NO_BLOCK]


def last_seen(position: int, window: int) -> int:
    """The first position that a query at ``position`` reads."""
    return max(0, position - window + 1) if window else 0


# -- when blocks are given back


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("step", [1, 3, 4, 7])
def test_blocks_live_exactly_as_long_as_somebody_reads_them(
    make_request: MakeRequest, make_store: MakeStore, window: int, step: int
) -> None:
    """Nothing that the next query, or a later one, reads is given back; and of the rest at most one block, for less
    than a block's time, is still there."""
    store = make_store(40, windows=(0, window), max_chunk=step)
    request = make_request("a", 60)
    assert store.board(request, step)
    while True:
        store.commit(request)
        at = request.num_computed
        assert rows(request, 2, 0) == list(range(-(-at // 4)))
        held = rows(request, 2, 1)
        needed = list(range(last_seen(at, window) // 4, -(-at // 4)))
        assert held[-len(needed) :] == needed if needed else True
        boundary = at - at % 4  # when it was last looked at, or later
        assert all(i >= last_seen(boundary, window) // 4 for i in held)
        store.check()
        if at == 60:
            break
        assert store.grow(request, min(step, 60 - at))
    store.release(request)
    assert store.kv.pool.num_free == 40


def test_a_long_request_needs_little_memory_when_all_layers_slide(
    make_request: MakeRequest, make_store: MakeStore
) -> None:
    store = make_store(4, windows=(4,), max_chunk=4)
    request = make_request("a", range(60))
    assert store.board(request, 4)
    store.commit(request)
    while request.num_computed < 60:
        assert store.grow(request, 4)
        store.commit(request)
        assert len(rows(request, 1, 0)) <= 3 <= store.kv.layout.held(60, prefilling=True) <= 4
    store.append(request, *range(100))
    assert len(rows(request, 1, 0)) <= 2 <= store.kv.layout.held(160) <= 3
    assert request.num_slid >= 38


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_nobody_ever_holds_more_than_is_said(
    make_request: MakeRequest, make_store: MakeStore, windows: tuple[int, ...], depth: int, seed: int
) -> None:
    """`held` bounds what a sequence has at a time, while pieces of up to ``max_chunk`` tokens are computed, and after.
    With two steps in flight, one is planned before the other is done."""
    rng = Random(seed)
    block_size, max_chunk = rng.choice((1, 2, 4)), rng.randint(1, 9)
    store = make_store(300, block_size, windows=windows, max_chunk=max_chunk * depth)
    kv, prompt = store.kv, rng.randint(1, 40)
    request = make_request("a", prompt)
    assert store.board(request, min(prompt, rng.randint(1, max_chunk)))
    flight = [request.num_planned]
    while request.num_computed < 60:
        for _ in range(depth - len(flight)):
            left = len(request.token_ids) - request.num_planned
            if left <= 0:  # the token being drawn
                request.token_ids.append(1)
                left = 1
            n = min(left, rng.randint(1, max_chunk))
            assert store.grow(request, n)
            flight.append(n)
            length = len(request.token_ids)
            assert sum(block != NO_BLOCK for block in request.block_table) <= kv.layout.held(length, prefilling=True)
            if depth == 1 and request.num_planned > prompt + block_size:
                assert sum(block != NO_BLOCK for block in request.block_table) <= kv.layout.held(length)
        store.commit(request, flight.pop(0))
        store.check()


def test_a_single_group_of_the_whole_context_never_slides(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(20)
    request = store.compute(make_request("a", 60))
    assert len(rows(request, 1, 0)) == 15 and request.num_slid == 0


def test_blocks_that_slid_are_known_until_they_are_taken(make_request: MakeRequest, make_store: MakeStore) -> None:
    """A request with the same beginning, or a part of it, finds them."""
    store = make_store(20, windows=(4,), max_chunk=4)
    request = make_request("a", range(24))
    assert store.board(request, 4)
    store.commit(request)
    while request.num_computed < 24:
        assert store.grow(request, 4)
        store.commit(request)
    assert len(rows(request, 1, 0)) == 1
    assert [store.known(range(n)) for n in (9, 24, 30)] == [8, 20, 24]


def test_windows_slide_apart(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Of each group its own part is left, whichever comes first in the table."""
    for windows in ((9, 2), (2, 9)):
        store = make_store(40, windows=windows)
        request = store.compute(make_request("a", 10))
        store.append(request, *range(14))
        held = {window: rows(request, 2, g) for g, window in enumerate(windows)}
        assert held == {9: [4, 5], 2: [5]}
        assert request.num_slid == 4


def test_a_fork_slides_by_itself(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(40, windows=(0, 4))
    parent = store.compute(make_request("a", 10))
    child = store.fork(parent)
    assert child.num_slid == parent.num_slid
    store.append(parent, *range(10))
    store.check()
    store.append(child, *range(10))
    store.check()
    assert rows(parent, 2, 1) == rows(child, 2, 1) == [4]


# -- what can be found


@pytest.mark.parametrize(
    ("windows", "missing", "known"),
    [
        ((4,), (), 16),
        ((4,), ((0, 0), (1, 0), (2, 0)), 16),  # only the last window is needed
        ((4,), ((3, 0),), 12),
        ((4,), ((3, 0), (1, 0)), 12),
        ((4,), ((3, 0), (2, 0)), 8),
        ((5,), ((2, 0),), 16),  # the query at 16 reads from 12
        ((6,), ((2, 0),), 8),
        ((6,), ((2, 0), (0, 0)), 0),
        ((6,), ((3, 0), (0, 0)), 12),
        ((0, 4), ((1, 0),), 4),
        ((0, 4), ((1, 1), (2, 1)), 16),
        ((0, 4), ((3, 1),), 12),
        ((0, 4), ((2, 0), (1, 1)), 4),
        ((3, 0, 9), ((1, 2),), 16),
        ((3, 0, 9), ((2, 2),), 8),
        ((3, 0, 9), ((1, 0),), 16),
        ((0, 1), ((0, 1), (1, 1), (2, 1), (3, 1)), 16),  # a query reads nothing but its own position
    ],
)
def test_what_a_hit_needs(
    make_request: MakeRequest,
    make_store: MakeStore,
    windows: tuple[int, ...],
    missing: tuple[tuple[int, int], ...],
    known: int,
) -> None:
    """A full group needs every block, a sliding one those in its last window: (block, group) are missing of four."""
    store = make_store(40, windows=windows, max_chunk=4)
    first = make_request("a", range(17))
    assert store.board(first, 4)
    blocks: dict[tuple[int, int], int] = {}
    while True:
        blocks |= {divmod(at, len(windows)): block for at, block in enumerate(first.block_table) if block != NO_BLOCK}
        store.commit(first)
        if first.num_computed >= 16:
            break
        assert store.grow(first, 4)
    store.release(first)
    store.kv.pool.forget([blocks[place] for place in missing])
    second = make_request("b", range(17))
    hit = store.kv.lookup(second)
    assert hit.num_tokens == known
    for g, window in enumerate(windows):
        held = [i for i, block in enumerate(hit.table[g :: len(windows)]) if block != NO_BLOCK]
        assert held == list(range(last_seen(known, window) // 4, known // 4)), "no more than is read"
    store.compute(second)
    store.check()


def test_groups_do_not_find_each_others_blocks(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(20, windows=(0, 0, 8))
    first = store.compute(make_request("a", range(9)))
    second = make_request("b", range(9))
    hit = store.kv.lookup(second)
    assert [hit.table[at] for at in (0, 1, 3, 4)] == [first.block_table[at] for at in (0, 1, 3, 4)]
    assert list(hit.copies) == [(2, first.block_table[2]), (5, first.block_table[5])]
    assert len(set(first.block_table[:6])) == 6


def test_a_block_in_use_is_copied_when_it_will_slide(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Its owner may count on it when the window has passed. One that nobody has is simply taken; a full group's is
    shared."""
    store = make_store(20, windows=(0, 8))
    first = store.compute(make_request("a", range(9)))
    second = store.compute(make_request("b", range(9)))
    assert first.block_table[0:4:2] == second.block_table[0:4:2]
    assert not set(first.block_table[1::2]) & set(second.block_table[1::2])
    assert [op.kind for op in store.ops] == [BlockOpKind.COPY] * 2
    store.release(first)
    third = make_request("c", range(9))
    assert store.kv.lookup(third).copies == [] and NO_BLOCK not in store.kv.lookup(third).table
    store.check()


def test_copies_count_as_blocks_to_take(make_request: MakeRequest, make_store: MakeStore) -> None:
    store = make_store(7, windows=(8,))
    store.compute(make_request("a", range(9)))
    second = make_request("b", range(13))
    before = store.state()
    assert not store.kv.admit(second, store.kv.lookup(second), 9)
    assert store.state() == before
    assert store.board(second, 5)
    store.commit(second)
    store.check()


def test_a_pinned_beginning_keeps_of_each_group_what_is_read(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Of eight tokens with windows of the whole context and of four: two blocks and one."""
    store = make_store(20, windows=(0, 4))
    store.kv.pin(range(8))
    assert store.kv.num_pinned == 3
    store.release(store.compute(make_request("a", range(30))))
    assert store.kv.pool.num_free == 17
    store.check()
    store.release(store.compute(make_request("b", 32)))
    assert store.known(range(9)) == 8


# -- swapping


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("length", [3, 4, 10, 16])
def test_swapped_out_and_in_again(
    make_request: MakeRequest, make_store: MakeStore, windows: tuple[int, ...], length: int
) -> None:
    """Only what is still read is moved."""
    store = make_store(40, windows=windows, host_blocks=40)
    request = store.compute(make_request("a", length))
    held = [block != NO_BLOCK for block in request.block_table]
    swapped = store.swap_out(request)
    assert [address != NO_BLOCK for address in request.host_table] == held
    assert swapped
    store.check()
    for _ in range(3):
        store.release(store.compute(make_request("b", 40)))
    request.token_ids.append(1)
    store.compute(request)
    store.append(request, *range(12))
    store.check()
    store.apply()
    moved = [op for op in store.ops if op.kind is BlockOpKind.SWAP_IN]
    assert len(moved) <= sum(held)
    store.release(request)
    assert store.places[0].num_free == 40


def test_who_comes_back_shares_nothing_that_slides(make_request: MakeRequest, make_store: MakeStore) -> None:
    """Its copy comes from host memory although somebody has the same on the device; a full group is shared."""
    store = make_store(20, windows=(0, 8), host_blocks=10)
    parent = store.compute(make_request("a", range(9)))
    child = store.fork(parent)
    assert store.swap_out(child)
    child.token_ids.append(1)
    store.compute(child)
    assert child.block_table[0:4:2] == parent.block_table[0:4:2]
    assert not set(child.block_table[1::2]) & set(parent.block_table)
    store.check()


# -- promises


@pytest.mark.parametrize("first_moves", [True, False])
@pytest.mark.parametrize("windows", [(20,), (0, 20), (20, 9)])
def test_a_promise_holds_when_others_still_have_blocks_that_slid(
    make_request: MakeRequest, make_store: MakeStore, windows: tuple[int, ...], first_moves: bool
) -> None:
    """Two requests have the same 20 tokens at their beginning, and a third takes all that nobody was promised. Then one
    of the two slides over what the other stands on."""
    store = make_store(80, windows=windows, max_chunk=4)
    kv = store.kv
    pair = [make_request("a", range(21)), make_request("b", range(21))]
    for request in pair:
        request.max_len = 60
        assert store.board(request, 1, total=kv.layout.full_blocks(request), promise=True)
        store.commit(request)
        while request.num_computed < 21:
            assert store.grow(request, min(4, 21 - request.num_computed))
            store.commit(request)
    taken = [kv.pool.take()[0] for _ in range(kv.num_available)]
    for request in pair if first_moves else reversed(pair):
        for token in range(39):
            store.append(request, token)
    for block in taken:
        kv.pool.drop(block)
    store.check()


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_promise_holds_when_its_blocks_are_pinned(
    make_request: MakeRequest, make_store: MakeStore, spare: int
) -> None:
    """They do not come back when the window has passed. Where there are no others, they are not pinned."""
    request = make_request("a", range(13))
    request.max_len = 60
    needed = make_store(windows=(8,), max_chunk=8).kv.layout.full_blocks(request)
    store = make_store(needed + spare, windows=(8,), max_chunk=8)
    store.kv.pin(range(8))
    assert store.board(request, 8, total=needed, promise=True)
    store.commit(request)
    store.check()
    assert store.kv.num_available == 0
    assert store.grow(request, 5)
    store.commit(request)
    taken = [store.kv.pool.take()[0] for _ in range(store.kv.num_available)]
    store.append(request, *range(47))
    for block in taken:
        store.kv.pool.drop(block)
    store.release(request)
    store.check()
    assert store.kv.pool.num_free == needed


@pytest.mark.parametrize("windows", [(4,), (20,), (0, 14)])
def test_samples_slide_apart_within_their_promise(
    make_request: MakeRequest, make_store: MakeStore, windows: tuple[int, ...]
) -> None:
    """Three samples share their prompt's last window, in a pool of exactly what was promised to them."""
    request = make_request("a", 18, n=3)
    request.max_len = 60
    needed = make_store(windows=windows, max_chunk=18).kv.layout.full_blocks(request)
    store = make_store(needed, windows=windows, max_chunk=18)
    store.compute(request, total=needed)
    samples = [request, store.fork(request, 1), store.fork(request, 2)]
    store.kv.settle(request)
    store.check()
    for sample in samples:
        store.append(sample, *range(42))
        store.check()


@pytest.mark.parametrize("windows", [(0,), (4,), (0, 4, 4), (2, 9), (20,), (0, 14)])
@pytest.mark.parametrize("seed", range(25))
def test_promised_blocks_are_there_whatever_others_do(
    make_request: MakeRequest, make_store: MakeStore, windows: tuple[int, ...], seed: int
) -> None:
    """Everybody boards with his greatest length promised, shares prefixes and forks samples; then nobody ever lacks a
    block, although blocks that slid may still be others'."""
    rng = Random(seed)
    block_size, max_chunk = rng.choice((2, 4)), rng.choice((1, 2, 5))
    store = make_store(rng.randint(12, 30), block_size, windows=windows, max_chunk=max_chunk)
    kv = store.kv
    common = [rng.randrange(2) for _ in range(30)]
    goals: dict[Request, int] = {}
    for number in range(250):
        if rng.random() < 0.3:
            shared = rng.randint(0, 20)
            tokens = [*common[:shared], *(rng.randrange(2) for _ in range(rng.randint(1, 6)))]
            request = make_request(str(number), tokens, n=rng.choice((1, 1, 2, 3)))
            request.max_len = len(tokens) + rng.randint(1, 12)
            n = min(max_chunk, len(tokens) - kv.lookup(request).num_tokens)
            if store.board(request, n, total=kv.layout.full_blocks(request), promise=True):
                store.commit(request)
                goals[request] = request.max_len
        for request in [request for request in store.live if rng.random() < 0.7]:
            if request.num_computed == len(request.token_ids):
                if len(request.token_ids) == goals[request]:
                    store.release(request)
                    continue
                if request.num_samples > 1:
                    indexes = range(1, request.num_samples)
                    children = [store.fork(request, index) for index in indexes]
                    kv.settle(request)
                    goals.update(dict.fromkeys(children, goals[request]))
                    for child in children:
                        child.token_ids.append(rng.randrange(2))
                request.token_ids.append(rng.randrange(2))
            n = min(max_chunk, len(request.token_ids) - request.num_computed)
            assert store.grow(request, n), f"{request.key} was promised blocks and has none"
            store.commit(request)
        store.check()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(4,), (0, 4, 4), (20,), (0, 14)])
@pytest.mark.parametrize("seed", range(8))
def test_reserving_never_preempts(make_rig: MakeRig, windows: tuple[int, ...], depth: int, seed: int) -> None:
    """With the gate that promises everything, also while one step is planned during another."""
    rng = Random(seed)
    common = [rng.randrange(50) for _ in range(40)]
    jobs: list[tuple[list[int], dict[str, int]]] = []
    for _ in range(12):
        prompt = [*common[: rng.choice((0, 8, 30))], *(rng.randrange(50) for _ in range(rng.randint(1, 20)))]
        jobs.append((prompt, {"max_tokens": rng.randint(1, 12), "n": rng.choice((1, 1, 2))}))
    budget = rng.choice((4, 7, 16, 24))

    def make(num_blocks: int) -> Any:
        rig = make_rig(admission="reserve", windows=windows, num_blocks=num_blocks, max_num_seqs=4, budget=budget)
        for number, (prompt, params) in enumerate(jobs):
            rig.add(f"r{number}", prompt, **params)
        return rig

    roomy = make(1000)
    rig = make(
        max(roomy.kv.layout.full_blocks(request) for request in roomy.scheduler.sequences) + rng.choice((0, 2, 5))
    )
    flights: list[Any] = []
    while rig.scheduler.has_work or flights:
        plan = rig.scheduler.schedule(0.0)
        if plan is not None:
            flights.append((plan, rig.executor.submit(plan)))
        if plan is None or len(flights) == depth:
            plan, handle = flights.pop(0)
            rig.outputs += rig.scheduler.commit(plan, rig.executor.result(handle), 0.0)
    rig.check_empty()
    assert rig.scheduler.stats().total_preemptions == 0


def test_reserving_never_preempts_for_a_piece_planned_during_another(make_rig: MakeRig) -> None:
    """With two steps in flight the first piece's blocks are still there when the second's are taken. That one waits,
    rather than push out somebody who was promised his blocks as well."""
    rig = make_rig(
        admission="reserve",
        order="shortest-prefill",
        windows=(4,),
        block_size=1,
        num_blocks=42,
        budget=16,
        max_num_seqs=2,
    )
    rig.add("long", 62, max_tokens=2)
    flights = [rig.scheduler.schedule(0.0)]
    rig.add("short", 45, max_tokens=2)
    handles = [rig.executor.submit(flights[0])]
    while rig.scheduler.has_work or flights:
        plan = rig.scheduler.schedule(0.0)
        if plan is not None:
            flights.append(plan)
            handles.append(rig.executor.submit(plan))
        if plan is None or len(flights) == 2:
            rig.outputs += rig.scheduler.commit(flights.pop(0), rig.executor.result(handles.pop(0)), 0.0)
    rig.check_empty()
    assert rig.scheduler.stats().total_preemptions == 0
