"""Any sequence of the KV manager's operations keeps its invariants, and no block's contents are ever mixed up."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chairlift.core.kv import KVManager
from chairlift.core.plan import Capacity
from chairlift.core.request import Request, SamplingParams

BLOCK_SIZE = 2
picks = st.integers(min_value=0, max_value=1000)


class KVMachine(RuleBasedStateMachine):
    """Drives a `KVManager` as a scheduler could. ``content`` is what a runner would have in each slot: the whole
    context up to that token, on which keys and values depend."""

    @initialize(num_blocks=st.integers(min_value=1, max_value=12), caching=st.booleans())
    def start(self, num_blocks: int, caching: bool) -> None:
        self.kv = KVManager(Capacity(num_blocks, BLOCK_SIZE, 64), enable_prefix_caching=caching)
        self.content: list[list[tuple[int, ...] | None]] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]
        self.live: list[Request] = []
        self.count = 0

    def make(self, tokens: list[int]) -> Request:
        self.count += 1
        params = SamplingParams()
        return Request(id=str(self.count), token_ids=tokens, num_prompt=len(tokens), params=params, seed=0)

    def pick(self, number: int) -> Request:
        return self.live[number % len(self.live)]

    def compute(self, request: Request, n: int) -> None:
        for op in self.kv.take_ops():
            self.content[op.dst] = list(self.content[op.src])
        for p in range(request.num_computed, request.num_computed + n):
            block, slot = request.block_table[p // BLOCK_SIZE], p % BLOCK_SIZE
            self.content[block][slot] = tuple(request.token_ids[: p + 1])
        self.kv.commit(request, n)

    @rule(
        tokens=st.lists(st.integers(min_value=0, max_value=1), min_size=1, max_size=10),
        n=picks,
        extra=st.integers(min_value=0, max_value=4),
        promise=st.booleans(),
        headroom=st.integers(min_value=0, max_value=2),
    )
    def admit(self, tokens: list[int], n: int, extra: int, promise: bool, headroom: int) -> None:
        request = self.make(tokens)
        hit = self.kv.lookup(request)
        need = len(tokens) - len(hit) * BLOCK_SIZE
        n = 1 + n % need
        total = self.kv.blocks_for(len(tokens)) + extra if extra else 0
        available = self.kv.num_available
        if self.kv.admit(request, hit, n, total=total, promise=promise, headroom=headroom):
            assert self.kv.num_available >= headroom
            assert promise or not request.num_reserved
            self.live.append(request)
            self.compute(request, n)
        else:
            assert self.kv.num_available == available

    @precondition(lambda self: self.live)
    @rule(which=picks, n=picks)
    def grow(self, which: int, n: int) -> None:
        """Computes some of what is left, or one more token."""
        request = self.pick(which)
        if not request.num_remaining:
            request.token_ids.append(n % 2)
        n = 1 + n % request.num_remaining
        if self.kv.grow(request, n):
            self.compute(request, n)
        else:
            assert self.kv.take_ops() == ()

    @precondition(lambda self: self.live)
    @rule(which=picks)
    def fork(self, which: int) -> None:
        parent = self.pick(which)
        if parent.num_reserved:  # only a request that was promised its samples' blocks may share them
            return
        child = self.make(list(parent.token_ids))
        self.kv.fork(parent, child)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(which=picks)
    def release(self, which: int) -> None:
        request = self.pick(which)
        self.kv.release(request)
        self.live.remove(request)

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check(self.live)
        for request in self.live:
            for p in range(request.num_computed):
                block, slot = request.block_table[p // BLOCK_SIZE], p % BLOCK_SIZE
                assert self.content[block][slot] == tuple(request.token_ids[: p + 1])


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
