"""Any sequence of the KV manager's operations keeps its invariants, and no block's contents are ever mixed up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chairlift.core.layout import NO_BLOCK
from chairlift.core.plan import BlockOpKind
from chairlift.core.request import Request

MakeRequest = Callable[..., Request]
MakeStore = Callable[..., Any]

picks = st.integers(min_value=0, max_value=1000)
few = st.integers(min_value=0, max_value=4)
texts = st.lists(st.integers(min_value=0, max_value=1), min_size=1, max_size=10)


class KVMachine(RuleBasedStateMachine):
    """Drives a `KVManager` as a scheduler could; the store checks all that is read."""

    def __init__(self, make_store: MakeStore, make_request: MakeRequest) -> None:
        super().__init__()
        self.make_store, self.make_request = make_store, make_request
        self.store: Any = None
        self.running: list[Request] = []
        self.swapped: list[Request] = []
        self.damaged: set[int] = set()  # host and disk blocks
        self.count = 0

    @initialize(
        num_blocks=st.integers(min_value=1, max_value=14),
        caching=st.booleans(),
        windows=st.sampled_from(((0,), (0,), (4,), (0, 4, 4), (3, 0))),
        host=few,
        disk=few,
        max_chunk=st.integers(min_value=1, max_value=10),
    )
    def start(
        self, num_blocks: int, caching: bool, windows: tuple[int, ...], host: int, disk: int, max_chunk: int
    ) -> None:
        self.store = self.make_store(
            num_blocks,
            2,
            windows=windows,
            host_blocks=host,
            disk_blocks=disk,
            caching=caching,
            max_chunk=max_chunk,
        )
        self.kv, self.max_chunk = self.store.kv, max_chunk

    def one_of(self, requests: list[Request], number: int) -> Request:
        return requests[number % len(requests)]

    def changes_nothing_or(self, change: Callable[[], bool]) -> bool:
        """Whether it was done; if not, nothing may have changed."""
        before = self.store.state()
        done = change()
        assert done or self.store.state() == before
        return done

    def board(self, request: Request, n: int, total: int, promise: bool, headroom: int) -> bool:
        """Boards a request, and computes ``n`` tokens unless something that it swapped in is damaged: then it has to
        begin again."""
        hit = self.kv.lookup(request)
        n = 1 + n % min(self.max_chunk, len(request.token_ids) - hit.num_tokens)
        before, known = self.kv.num_available, len(self.store.ops)
        demand = {"total": total, "promise": promise, "headroom": headroom}
        if not self.changes_nothing_or(lambda: self.store.board(request, n, **demand)):
            return False
        assert headroom <= self.kv.num_available <= before
        assert bool(request.reservation) == promise
        self.store.apply()
        ops = self.store.ops[known:]
        self.damaged -= {op.dst for op in ops if op.kind is BlockOpKind.SWAP_OUT}
        bad = {op.src for op in ops if op.kind is BlockOpKind.SWAP_IN} & self.damaged
        if bad:
            self.kv.tiers.forget(bad)
            self.store.release(request)
        else:
            self.store.commit(request)
            self.running.append(request)
        return True

    @rule(
        tokens=texts,
        n=picks,
        extra=few,
        promise=st.booleans(),
        headroom=st.integers(min_value=0, max_value=2),
        tenant=st.sampled_from(("", "", "b")),
    )
    def admit(self, tokens: list[int], n: int, extra: int, promise: bool, headroom: int, tenant: str) -> None:
        self.count += 1
        request = self.make_request(str(self.count), tokens, tenant=tenant)
        request.max_len = len(tokens) + extra
        self.board(request, n, self.kv.layout.full_blocks(request) if promise or extra else 0, promise, headroom)

    @precondition(lambda self: self.swapped)
    @rule(which=picks, n=picks, promise=st.booleans())
    def resume(self, which: int, n: int, promise: bool) -> None:
        request = self.one_of(self.swapped, which)
        if request.num_swapped == len(request.token_ids):
            request.token_ids.append(1)
        request.max_len = max(request.max_len, len(request.token_ids))
        if self.board(request, n, self.kv.layout.full_blocks(request) if promise else 0, promise, 0):
            self.swapped.remove(request)
            assert not any(address != NO_BLOCK for address in request.host_table)

    @precondition(lambda self: self.running)
    @rule(which=picks, n=picks)
    def grow(self, which: int, n: int) -> None:
        """Computes some of what is left, or one more token. Who was promised blocks does not lack them."""
        request = self.one_of(self.running, which)
        promised = request.reservation is not None
        if request.num_computed == len(request.token_ids):
            if promised and request.num_computed == request.max_len:
                return
            request.token_ids.append(n % 2)
        n = 1 + n % min(self.max_chunk, len(request.token_ids) - request.num_computed)
        if self.changes_nothing_or(lambda: self.store.grow(request, n)):
            self.damaged -= {op.dst for op in self.kv._ops if op.kind is BlockOpKind.SWAP_OUT}
            self.store.commit(request)
        else:
            assert not promised

    @precondition(lambda self: self.running)
    @rule(which=picks)
    def fork(self, which: int) -> None:
        """A sample of a request that was promised enough for it, or of one that was promised nothing."""
        parent = self.one_of(self.running, which)
        if parent.reservation is None:
            child = self.store.fork(parent, index=len(self.running))
            self.running.append(child)

    @rule(tokens=texts, n=st.integers(min_value=2, max_value=3), extra=few)
    def admit_samples(self, tokens: list[int], n: int, extra: int) -> None:
        """Those of a prompt that is computed in one step."""
        self.count += 1
        request = self.make_request(str(self.count), tokens, n=n)
        request.max_len = len(tokens) + extra
        left = len(tokens) - self.kv.lookup(request).num_tokens
        if left <= self.max_chunk:
            self.board(request, left - 1, self.kv.layout.full_blocks(request), True, 0)
        if request in self.running:
            self.running += [self.store.fork(request, index=index) for index in range(1, n)]
            self.kv.settle(request)

    @precondition(lambda self: self.running)
    @rule(which=picks)
    def release(self, which: int) -> None:
        request = self.one_of(self.running, which)
        self.store.release(request)
        self.running.remove(request)

    @precondition(lambda self: self.running)
    @rule(which=picks)
    def swap_out(self, which: int) -> None:
        request = self.one_of(self.running, which)
        if self.changes_nothing_or(lambda: self.store.swap_out(request)):
            assert request.reservation is None
            self.running.remove(request)
            self.swapped.append(request)
            self.damaged -= {op.dst for op in self.kv._ops if op.kind is BlockOpKind.SWAP_OUT}

    @precondition(lambda self: self.swapped)
    @rule(which=picks)
    def release_swapped(self, which: int) -> None:
        request = self.one_of(self.swapped, which)
        self.store.release(request)
        self.swapped.remove(request)

    @precondition(lambda self: self.store and self.store.elsewhere)
    @rule(which=picks)
    def damage(self, which: int) -> None:
        """Nobody knows of it until it is read."""
        self.store.apply()
        address = which % len(self.store.elsewhere)
        self.store.elsewhere[address] = ["damaged"] * 2
        self.damaged.add(address)

    @rule(tokens=texts)
    def pin(self, tokens: list[int]) -> None:
        if self.kv.num_pinned < 3:
            self.kv.pin(tokens)

    @rule()
    def save(self) -> None:
        self.kv.save()
        self.damaged -= {op.dst for op in self.kv._ops if op.kind is BlockOpKind.SWAP_OUT}

    @rule()
    def fail(self) -> None:
        """A step fails: all is given up, and what device and host hold is lost; so are the ops not executed yet."""
        for request in [*self.running, *self.swapped]:
            self.store.release(request)
        self.running, self.swapped = [], []
        self.kv.forget_all()
        assert self.kv.take_ops() == ()
        assert not self.kv.pool.contents()
        for memory in (self.store.device, self.store.elsewhere[: self.store.num_host]):
            for block in range(len(memory)):
                memory[block] = ["lost"] * 2

    @invariant()
    def everything_is_where_it_should_be(self) -> None:
        if self.store is None:
            return
        self.store.check()
        for request in self.running:
            self.store.verify(request)
        assert len(self.store.live) == len(self.running) + len(self.swapped)

    def teardown(self) -> None:
        if self.store is not None:
            self.fail()
            self.store.check()
            assert self.kv.pool.num_free == self.kv.pool.num_blocks and self.kv.reserved == 0


def test_any_sequence_of_operations(make_store: MakeStore, make_request: MakeRequest) -> None:
    run_state_machine_as_test(
        lambda: KVMachine(make_store, make_request),
        settings=settings(max_examples=120, stateful_step_count=40, deadline=None),
    )
