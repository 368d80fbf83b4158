"""Paged KV memory: which blocks exist, who owns them, and what they hold.

Two classes. `BlockPool` knows blocks: reference counts, the free list, the index of cached contents. `KVManager` knows
requests: it is the only writer of their block tables, hashes, reservations and ``num_computed``.

A free block may still hold the KV of a cached prefix. It is free all the same: whoever needs a block takes it, the
least recently freed first, and its contents are forgotten at that moment.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from chairlift.core.plan import BlockOp, BlockOpKind, Capacity
from chairlift.core.request import Request


class BlockPool:
    """``num_blocks`` blocks with reference counts. A block with count 0 is free, and in exactly one of two lists:
    ``_blank`` (no known contents, reused first) or ``_cached`` (contents indexed by hash, oldest first)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def find(self, content: bytes) -> int | None:
        """The block that holds this content, free or owned."""
        return self._by_hash.get(content)

    def take(self) -> int:
        """A free block, now owned once. The caller has checked that there is one."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            content = self._hashes[block]
            assert content is not None
            del self._by_hash[content]
            self._hashes[block] = None
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner; a cached block without any leaves the free list."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def drop(self, block: int) -> None:
        """One owner less. This is the only place where a block becomes free."""
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def index(self, block: int, content: bytes) -> None:
        """From now on this block can be found by its content, unless another holds the same."""
        if self._hashes[block] is None and content not in self._by_hash:
            self._hashes[block] = content
            self._by_hash[content] = block

    def check(self, owners: Counter[int]) -> None:
        """Compares every count and list with the truth, given how often each block is owned."""
        free = set(self._blank) | set(self._cached)
        assert len(free) == self.num_free, "a block is in the free lists twice"
        for block, refs in enumerate(self._refs):
            count, content = owners[block], self._hashes[block]
            assert refs == count, f"block {block}: refs {refs}, owners {count}"
            assert (block in free) == (count == 0), f"block {block} is owned and free, or neither"
            assert content is None or self._by_hash.get(content) == block, f"block {block} is indexed wrongly"
            assert (block in self._cached) == (count == 0 and content is not None), f"block {block}: wrong list"
        assert len(self._by_hash) == sum(content is not None for content in self._hashes), "stale hash in the index"


class KVManager:
    """Gives requests their blocks. Every method either does all it says or changes nothing.

    ``reserved`` counts blocks promised to running requests and not yet taken; they are in the free list, but only
    their owners may take them. Invariant: ``reserved <= pool.num_free``.
    """

    def __init__(self, capacity: Capacity, *, enable_prefix_caching: bool = True, secret: bytes | None = None) -> None:
        """``secret`` keys the prefix hashes, so that no client can craft a collision; random unless given."""
        self.block_size = capacity.block_size
        self.pool = BlockPool(capacity.num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self.reserved = 0
        self._secret = os.urandom(32) if secret is None else secret
        self._ops: list[BlockOp] = []

    @property
    def num_available(self) -> int:
        """Blocks that anybody may take."""
        return self.pool.num_free - self.reserved

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def full_blocks(self, request: Request) -> int:
        """Blocks that all samples of a request need together when each reaches its greatest length.

        Whole prompt blocks are shared by the n samples; the rest each sample has to itself. A prompt that ends within
        a block costs one more, since any of the samples may be the first to write there.
        """
        shared = request.num_prompt // self.block_size
        private = self.blocks_for(request.max_len) - shared
        copied = request.num_samples > 1 and request.num_prompt % self.block_size != 0
        return shared + request.num_samples * private + copied

    # -- prefix cache

    def lookup(self, request: Request) -> list[int]:
        """The cached blocks that hold the longest known beginning of the request's tokens; changes no block.

        Never the last token's block: logits need one query. None at all while prompt logprobs are wanted, since those
        need every prompt token to be computed.
        """
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        hit: list[int] = []
        for i in range((len(request.token_ids) - 1) // self.block_size):
            block = self.pool.find(self._hash(request, i))
            if block is None:
                break
            hit.append(block)
        return hit

    def _hash(self, request: Request, i: int) -> bytes:
        """Hash of the request's i-th full block and all before it, computed once. Salted by tenant."""
        hashes = request.block_hashes
        while len(hashes) <= i:
            start = len(hashes) * self.block_size
            before = hashes[-1] if hashes else self._digest(request.tenant.encode())
            tokens = array("q", request.token_ids[start : start + self.block_size]).tobytes()
            hashes.append(self._digest(before + tokens))
        return hashes[i]

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=16, key=self._secret).digest()

    # -- a request's life

    def admit(
        self,
        request: Request,
        hit: Sequence[int],
        n: int,
        *,
        total: int = 0,
        promise: bool = False,
        headroom: int = 0,
    ) -> bool:
        """Boards a request: takes its hit blocks and room for ``n`` tokens after them.

        Args:
            hit: what `lookup` returned just now.
            total: blocks that must be there for the request altogether, those taken now included.
            promise: keep those of ``total`` that are not taken now for this request.
            headroom: blocks that must stay available to others.
        Returns:
            False, and nothing has changed, if the blocks are not there.
        """
        start = len(hit) * self.block_size
        new = self.blocks_for(start + n) - len(hit)
        later = max(0, total - len(hit) - new)
        revived = sum(self.pool.refs(block) == 0 for block in hit)  # they sit in the free list, but are not for taking
        if new + revived + later + headroom > self.num_available:
            return False
        for block in hit:
            self.pool.share(block)
        request.block_table = [*hit, *(self.pool.take() for _ in range(new))]
        request.num_computed = start
        request.num_reserved = later if promise else 0
        self.reserved += request.num_reserved
        return True

    def grow(self, request: Request, n: int) -> bool:
        """Makes the next ``n`` positions writable: appends blocks, and copies the first one if others share it."""
        table, first = request.block_table, request.num_computed // self.block_size
        copy = first < len(table) and self.pool.refs(table[first]) > 1
        new = max(0, self.blocks_for(request.num_computed + n) - len(table))
        own = min(new + copy, request.num_reserved)
        if new + copy - own > self.num_available:
            return False
        request.num_reserved -= own
        self.reserved -= own
        if copy:
            shared, table[first] = table[first], self.pool.take()
            self._ops.append(BlockOp(BlockOpKind.COPY, shared, table[first]))
            self.pool.drop(shared)
        table.extend(self.pool.take() for _ in range(new))
        return True

    def commit(self, request: Request, n: int) -> None:
        """The KV of the next ``n`` tokens exists now; blocks that became full can be found by others from here on."""
        before = request.num_computed // self.block_size
        request.num_computed += n
        if self.enable_prefix_caching:
            for i in range(before, request.num_computed // self.block_size):
                self.pool.index(request.block_table[i], self._hash(request, i))

    def fork(self, parent: Request, child: Request) -> None:
        """The child shares the parent's computed tokens, and gets its part of the parent's reservation."""
        child.block_table = parent.block_table[: self.blocks_for(parent.num_computed)]
        for block in child.block_table:
            self.pool.share(block)
        child.num_computed = parent.num_computed
        child.block_hashes = list(parent.block_hashes)
        if parent.num_reserved:
            shared = parent.num_computed // self.block_size
            child.num_reserved = self.blocks_for(child.max_len) - shared
            parent.num_reserved -= child.num_reserved

    def release(self, request: Request) -> None:
        """Frees all a request holds; its KV is gone. The end of the chain goes first, so that it is reused first."""
        for block in reversed(request.block_table):
            self.pool.drop(block)
        request.block_table = []
        request.num_computed = 0
        self.reserved -= request.num_reserved
        request.num_reserved = 0

    def take_ops(self) -> tuple[BlockOp, ...]:
        """The block operations since the last call, in order."""
        ops, self._ops = tuple(self._ops), []
        return ops

    def check(self, live: Iterable[Request]) -> None:
        """Recomputes from all live requests what this class keeps, and raises AssertionError on any difference."""
        owners: Counter[int] = Counter()
        reserved = 0
        for request in live:
            owners.update(request.block_table)
            reserved += request.num_reserved
            room = len(request.block_table) * self.block_size
            assert request.num_computed <= min(room, len(request.token_ids)), (
                f"{request.key}: KV without a token or block"
            )
            assert len(set(request.block_table)) == len(request.block_table), f"{request.key}: a block twice"
        self.pool.check(owners)
        assert reserved == self.reserved, f"{self.reserved} blocks reserved, requests hold {reserved}"
        assert 0 <= self.reserved <= self.pool.num_free, "more blocks promised than free"
