"""A small engine on the shadow executor, with all checks on, for tests that look at single steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from chairlift.core.plan import Capacity, Output, StepPlan
from chairlift.core.policy import make_policy
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.core.scheduler import Scheduler
from chairlift.sim.shadow import ShadowExecutor


def make_request(
    id: str = "a",
    prompt: int | Sequence[int] = 4,
    *,
    stop_ids: Sequence[int] = (),
    index: int = 0,
    tenant: str = "",
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
        num_samples=sampling.n,
        tenant=tenant,
    )


class Rig:
    """Scheduler and shadow executor, driven step by step. Keeps all plans and outputs."""

    def __init__(
        self,
        policy: str = "chunked",
        *,
        admission: str = "optimistic",
        num_blocks: int = 100,
        block_size: int = 4,
        max_model_len: int = 64,
        max_num_seqs: int = 8,
        budget: int = 256,
        caching: bool = True,
        stop_rate: float = 0.0,
    ) -> None:
        self.capacity = Capacity(num_blocks, block_size, max_model_len)
        self.executor = ShadowExecutor(self.capacity, stop_rate=stop_rate)
        self.scheduler = Scheduler(
            self.capacity,
            make_policy(policy, admission=admission),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            enable_prefix_caching=caching,
            check=True,
        )
        self.kv = self.scheduler.kv
        self.plans: list[StepPlan] = []
        self.outputs: list[Output] = []

    def add(self, *args: Any, **kwargs: Any) -> Request:
        """Queues a request made of the same arguments as `make_request`'s."""
        request = make_request(*args, **kwargs)
        self.executor.expect(request)
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(0.0)
        assert plan is not None, "no plan"
        self.outputs += self.scheduler.commit(plan, self.executor.submit(plan), 0.0)
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


@pytest.fixture(name="make_request")
def make_request_fixture() -> Callable[..., Request]:
    return make_request


@pytest.fixture(name="make_rig")
def make_rig_fixture() -> type[Rig]:
    return Rig


@pytest.fixture(name="share")
def share_fixture() -> Callable[[StepPlan], dict[str, int]]:
    return share
