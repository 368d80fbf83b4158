"""A small engine on the shadow executor, with all checks on, for tests that look at single steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift.core.kv import Hit, KVManager
from chairlift.core.order import make_order
from chairlift.core.plan import BlockOp, BlockOpKind, Capacity, Output, StepPlan
from chairlift.core.policy import make_policy
from chairlift.core.pool import BlockPool
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.core.scheduler import Scheduler, Settings
from chairlift.core.shares import Shares
from chairlift.sim.shadow import ShadowExecutor


def make_request(
    id: str = "a",
    prompt: int | Sequence[int] = 4,
    *,
    stop_ids: Sequence[int] = (),
    index: int = 0,
    tenant: str = "",
    priority: int = 0,
    arrival: float = 0.0,
    **params: Any,
) -> Request:
    """A request; an int as prompt means that many tokens, which no other request shares."""
    if isinstance(prompt, int):
        first = 1000 + 1000 * sum(id.encode())
        prompt = range(first, first + prompt)
    sampling = SamplingParams(**params)
    return Request(
        id=id,
        token_ids=list(prompt),
        num_prompt=len(prompt),
        params=sampling,
        seed=sampling.seed or 0,
        stop_ids=frozenset(stop_ids),
        index=index,
        num_samples=sampling.width,
        tenant=tenant,
        priority=priority,
        arrival=arrival,
    )


class Rig:
    """Scheduler and shadow executor, driven step by step. Keeps all plans and outputs."""

    def __init__(
        self,
        policy: str = "chunked",
        *,
        admission: str = "optimistic",
        order: str = "fcfs",
        fair: bool = False,
        num_blocks: int = 100,
        block_size: int = 4,
        max_model_len: int = 64,
        max_num_seqs: int = 8,
        budget: int = 256,
        caching: bool = True,
        stop_rate: float = 0.0,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
        executor: type[ShadowExecutor] = ShadowExecutor,
        **settings: Any,
    ) -> None:
        self.capacity = Capacity(num_blocks, block_size, max_model_len, host_blocks, disk_blocks, windows)
        self.executor = executor(self.capacity, stop_rate=stop_rate)
        self.scheduler = Scheduler(
            self.capacity,
            make_policy(policy, admission=admission, order=make_order(order)),
            Settings(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                enable_prefix_caching=caching,
                check=True,
                **settings,
            ),
            shares=Shares() if fair else None,
        )
        self.kv = self.scheduler.kv
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.outputs: list[Output] = []

    def add(self, *args: Any, **kwargs: Any) -> Request:
        """Queues a request made of the same arguments as `make_request`'s."""
        request = make_request(*args, **kwargs)
        self.executor.expect(request)
        self.scheduler.add(request, self.now)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now)
        assert plan is not None, "no plan"
        self.outputs += self.scheduler.commit(plan, self.executor.result(self.executor.submit(plan)), self.now)
        self.plans.append(plan)
        return plan

    def run(self, most_steps: int = 1000) -> None:
        """Until nobody is left; then nothing may be."""
        while self.scheduler.has_work:
            assert len(self.plans) < most_steps, "no progress"
            self.step()
        self.check_empty()

    def abort(self, request_id: str, index: int | None = None) -> list[Output]:
        outputs = self.scheduler.abort(request_id, index)
        self.outputs += outputs
        return outputs

    def check_empty(self) -> None:
        """Nothing is held by anybody."""
        assert not self.scheduler.has_work
        assert self.kv.pool.num_free == self.capacity.num_blocks
        assert self.kv.reserved == 0
        assert all(tier.pool.num_free == tier.pool.num_blocks for tier in self.kv.tiers)
        self.kv.check([])

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [token for output in self._of(request_id, index) for token in output.new_token_ids]

    def ends(self, request_id: str, index: int = 0) -> list[FinishReason]:
        return [output.finish_reason for output in self._of(request_id, index) if output.finish_reason]

    def _of(self, request_id: str, index: int) -> list[Output]:
        return [output for output in self.outputs if (output.request_id, output.index) == (request_id, index)]


def share(plan: StepPlan) -> dict[str, int]:
    """How many tokens of each request a step computes, in order; discarded ones are left out."""
    shares: dict[str, int] = {}
    for item in plan.items:
        if not item.discard:
            shares[item.request_id] = shares.get(item.request_id, 0) + len(item.token_ids)
    return shares


class Store:
    """A KV manager, and what a runner would have in its blocks: in each slot the whole context up to that token, on
    which keys and values depend, and the group of layers. ``live`` are the requests that were boarded."""

    def __init__(
        self,
        num_blocks: int = 10,
        block_size: int = 4,
        *,
        host_blocks: int = 0,
        disk_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
        max_chunk: int = 64,
        caching: bool = True,
        **kwargs: Any,
    ) -> None:
        capacity = Capacity(num_blocks, block_size, 64, host_blocks, disk_blocks, windows)
        self.kv = KVManager(capacity, max_chunk=max_chunk, enable_prefix_caching=caching, **kwargs)
        self.windows = windows
        self.num_host = host_blocks
        self.live: list[Request] = []
        self.ops: list[BlockOp] = []
        self.device: list[list[object]] = [[None] * block_size for _ in range(num_blocks)]
        self.elsewhere: list[list[object]] = [[None] * block_size for _ in range(host_blocks + disk_blocks)]

    @property
    def places(self) -> list[BlockPool]:
        """Where it can swap to, the fastest first."""
        return [tier.pool for tier in self.kv.tiers]

    def board(self, request: Request, n: int | None = None, hit: Hit | None = None, **demand: Any) -> bool:
        """Admits a request and plans its next ``n`` tokens, or all."""
        hit = self.kv.lookup(request) if hit is None else hit
        n = len(request.token_ids) - hit.num_tokens if n is None else n
        request.max_len = request.max_len or len(request.token_ids)
        if not self.kv.admit(request, hit, n, **demand):
            return False
        request.num_planned = hit.num_tokens + n
        if request not in self.live:
            self.live.append(request)
        return True

    def grow(self, request: Request, n: int = 1) -> bool:
        if not self.kv.grow(request, n):
            return False
        request.num_planned += n
        return True

    def apply(self) -> None:
        """Executes the block ops, and keeps them."""
        for op in self.kv.take_ops():
            source = self.elsewhere if op.kind is BlockOpKind.SWAP_IN else self.device
            target = self.elsewhere if op.kind is BlockOpKind.SWAP_OUT else self.device
            target[op.dst] = list(source[op.src])
            self.ops.append(op)

    def commit(self, request: Request, n: int | None = None) -> None:
        """The next ``n`` tokens of those planned, or all of these, are computed, reading all that is in view."""
        n = request.num_planned - request.num_computed if n is None else n
        self.apply()
        start = request.num_computed
        for g in range(len(self.windows)):
            for p in range(start, start + n):
                block, slot = self._place(request, g, p)
                self.device[block][slot] = (g, tuple(request.token_ids[: p + 1]))
        self.verify(request)
        self.kv.commit(request, n)

    def compute(self, request: Request, **demand: Any) -> Request:
        """Boards a request, with what it may need promised, and computes all its tokens."""
        assert self.board(request, promise=True, **demand)
        self.commit(request)
        return request

    def append(self, request: Request, *tokens: int) -> None:
        """Generates tokens and computes each."""
        for token in tokens:
            request.token_ids.append(token)
            assert self.grow(request)
            self.commit(request)

    def fork(self, parent: Request, index: int = 1) -> Request:
        child = make_request(parent.id, parent.token_ids, index=index, tenant=parent.tenant)
        child.num_prompt, child.max_len = parent.num_prompt, parent.max_len
        parent.num_samples = child.num_samples = 1
        self.kv.fork(parent, child)
        self.live.append(child)
        return child

    def swap_out(self, request: Request) -> bool:
        if not self.kv.swap_out(request):
            return False
        request.num_planned = 0
        return True

    def release(self, request: Request) -> None:
        self.kv.release(request)
        request.num_planned = 0
        self.live.remove(request)

    def known(self, tokens: Sequence[int], **kwargs: Any) -> int:
        """How many tokens of a prompt need not be computed."""
        return self.kv.lookup(make_request("known", tokens, **kwargs)).num_tokens

    def verify(self, request: Request) -> None:
        """All that a query at the next position reads is there."""
        for g, window in enumerate(self.windows):
            for p in range(max(0, request.num_computed - window + 1) if window else 0, request.num_computed):
                block, slot = self._place(request, g, p)
                found, wanted = self.device[block][slot], (g, tuple(request.token_ids[: p + 1]))
                assert found == wanted, f"{request.key}: group {g}, position {p} holds {found}"

    def check(self) -> None:
        self.kv.check(self.live)

    def state(self) -> tuple[object, ...]:
        """All that may change, copied."""
        pools = [self.kv.pool, *self.places]
        return copy.deepcopy(
            (
                [(pool._refs, pool._blank, list(pool._cached), pool._by_hash) for pool in pools],
                [self.kv.reserved, self.kv._ops, self.kv._pins],
                [
                    (
                        r.block_table,
                        r.num_computed,
                        r.writable_end,
                        r.num_indexed,
                        r.num_slid,
                        r.host_table,
                        r.num_swapped,
                    )
                    for r in self.live
                ],
                [r.reservation.left for r in self.live if r.reservation],
            )
        )

    def _place(self, request: Request, g: int, position: int) -> tuple[int, int]:
        i, slot = divmod(position, self.kv.block_size)
        block = request.block_table[i * len(self.windows) + g]
        assert block >= 0, f"{request.key}: nothing left of group {g} at position {position}"
        return block, slot


@pytest.fixture(name="make_request")
def make_request_fixture() -> Callable[..., Request]:
    return make_request


@pytest.fixture(name="make_rig")
def make_rig_fixture() -> type[Rig]:
    return Rig


@pytest.fixture(name="share")
def share_fixture() -> Callable[[StepPlan], dict[str, int]]:
    return share


@pytest.fixture(name="make_store")
def make_store_fixture() -> type[Store]:
    return Store
