"""Blocks of one memory: who counts as free, which is reused first, and what can be found by its contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from chairlift.core.pool import BlockPool


def known(pool: BlockPool, content: bytes) -> int:
    """A block in use whose content is known."""
    block, _ = pool.take()
    pool.index(block, content)
    return block


def test_each_block_is_given_once() -> None:
    pool = BlockPool(3)
    assert pool.num_free == 3
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [(0, None), (1, None), (2, None)]
    assert pool.num_free == 0 and [pool.refs(block) for block in range(3)] == [1, 1, 1]
    pool.check(Counter(block for block, _ in taken))


def test_a_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(1)
    block, _ = pool.take()
    pool.share(block)
    pool.drop(block)
    assert (pool.refs(block), pool.num_free) == (1, 0)
    pool.drop(block)
    assert (pool.refs(block), pool.num_free) == (0, 1)
    pool.check(Counter())


def test_take_forgets_the_contents_and_tells_them() -> None:
    pool = BlockPool(1)
    block = known(pool, b"x")
    pool.drop(block)
    assert pool.find(b"x") == block
    assert pool.take() == (block, b"x")
    assert pool.find(b"x") is None
    pool.check(Counter({block: 1}))
    pool.drop(block)
    assert pool.take() == (block, None), "what it held before is not told again"


def test_blank_blocks_are_taken_first_then_the_least_recently_freed() -> None:
    pool = BlockPool(4)
    a, b, c = (known(pool, content) for content in (b"a", b"b", b"c"))
    for block in (b, a, c):
        pool.drop(block)
    assert [pool.take()[1] for _ in range(4)] == [None, b"b", b"a", b"c"]


def test_a_shared_block_leaves_the_free_list_and_comes_back_as_the_most_recent() -> None:
    pool = BlockPool(2)
    a, b = known(pool, b"a"), known(pool, b"b")
    pool.drop(a)
    pool.drop(b)
    pool.share(a)
    assert pool.num_free == 1 and pool.find(b"a") == a
    pool.check(Counter({a: 1}))
    pool.drop(a)
    assert [pool.take()[1] for _ in range(2)] == [b"b", b"a"]


def test_the_same_content_twice_is_found_once() -> None:
    """Of two blocks that hold the same, the first is found; the second is free to be taken, blank, when it is left."""
    pool = BlockPool(2)
    first, second = known(pool, b"x"), known(pool, b"x")
    assert pool.find(b"x") == first
    pool.drop(second)
    pool.check(Counter({first: 1}))
    assert pool.take() == (second, None)
    assert pool.find(b"x") == first


def test_a_known_block_keeps_its_content() -> None:
    pool = BlockPool(1)
    block = known(pool, b"x")
    pool.index(block, b"y")
    assert pool.find(b"x") == block and pool.find(b"y") is None
    pool.check(Counter({block: 1}))


def test_forgotten_blocks_are_blank_whether_in_use_or_not() -> None:
    pool = BlockPool(4)
    used, idle, other = known(pool, b"used"), known(pool, b"idle"), known(pool, b"other")
    pool.drop(other)
    pool.drop(idle)
    pool.forget([used, idle, 3])
    assert [pool.find(content) for content in (b"used", b"idle", b"other")] == [None, None, other]
    pool.check(Counter({used: 1}))
    pool.drop(used)
    assert [pool.take()[1] for _ in range(4)] == [None, None, None, b"other"]


def test_contents_from_before_are_known_and_free() -> None:
    """The first of two equal contents counts, and blocks not named are blank."""
    pool = BlockPool(4, [(2, b"c"), (0, b"a"), (3, b"a")])
    assert pool.num_free == 4 and (pool.find(b"a"), pool.find(b"c")) == (0, 2)
    pool.check(Counter())
    assert [pool.take() for _ in range(4)] == [(1, None), (3, None), (2, b"c"), (0, b"a")]


def test_contents_come_in_the_order_in_which_they_were_last_used() -> None:
    pool = BlockPool(4)
    a, b, c = (known(pool, content) for content in (b"a", b"b", b"c"))
    pool.take()
    pool.drop(c)
    pool.drop(a)
    assert pool.contents() == [(b, b"b"), (c, b"c"), (a, b"a")]


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool, used, idle: pool.share(used),
        lambda pool, used, idle: pool.share(idle),
        lambda pool, used, idle: pool.drop(used),
        lambda pool, used, idle: pool.take(),
        lambda pool, used, idle: pool._blank.append(used),
        lambda pool, used, idle: pool._blank.append(idle),
        lambda pool, used, idle: pool._blank.append(pool._blank[0]),
        lambda pool, used, idle: pool._blank.pop(),
        lambda pool, used, idle: pool._cached.pop(idle),
        lambda pool, used, idle: pool._cached.__setitem__(used, None),
        lambda pool, used, idle: pool._hashes.__setitem__(used, None),
        lambda pool, used, idle: pool._hashes.__setitem__(idle, None),
        lambda pool, used, idle: pool._hashes.__setitem__(pool._blank[0], b"z"),
        lambda pool, used, idle: pool._by_hash.pop(b"used"),
        lambda pool, used, idle: pool._by_hash.__setitem__(b"z", used),
        lambda pool, used, idle: pool._by_hash.__setitem__(b"used", idle),
    ],
)
def test_check_finds_damage(damage: Callable[[BlockPool, int, int], object]) -> None:
    pool = BlockPool(4)
    used, idle = known(pool, b"used"), known(pool, b"idle")
    pool.drop(idle)
    pool.check(Counter({used: 1}))
    damage(pool, used, idle)
    with pytest.raises(AssertionError):
        pool.check(Counter({used: 1}))
