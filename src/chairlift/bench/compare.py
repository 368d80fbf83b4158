"""The same load through each policy, on one runner, in one process.

All policies get the same requests, slots, KV pool and workspace. They differ in the token budget of a step alone:
static and continuous compute prompts whole, so their budget must hold the longest; chunked uses a smaller one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from chairlift.bench.clients import Clients, Prompts
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig
from chairlift.core.clock import WallClock
from chairlift.core.engine import Engine
from chairlift.core.plan import Capacity, StepRecord
from chairlift.core.policy import make_policy
from chairlift.core.ports import Clock, Executor
from chairlift.core.scheduler import Scheduler
from chairlift.errors import ChairliftError, ParameterError
from chairlift.sim.workloads import Phase, Workload, four_requests, peak

POLICIES = ("static", "continuous", "chunked")
CASES = ("four-requests", "peak")
MAX_REPS = 100
WARM_UP_REQUESTS = 8
WARM_UP_TOKENS = 8

Progress = Callable[[str, int, int], None]
"""Told of each step: which run this is, its tokens so far, and how many it will have."""


def make_workload(case: str, *, seed: int, scale: float) -> Workload:
    """The load of a case. Raises ParameterError for an unknown case, or a scale that it does not use."""
    match case:
        case "four-requests":
            if scale != 1:
                raise ParameterError("scale", f"--scale {scale:g} has no effect on four-requests; leave it out")
            return four_requests()
        case "peak":
            return peak(seed, scale)
    raise ParameterError("case", f"--case must be one of {', '.join(CASES)}, got {case!r}")


def check_reps(reps: int) -> None:
    if not 1 <= reps <= MAX_REPS:
        raise ParameterError("reps", f"--reps must be a whole number from 1 to {MAX_REPS}, got {reps}")


def engine_config(workload: Workload, base: EngineConfig, *, chunk_tokens: int) -> EngineConfig:
    """The settings of the runner that all policies share: sizes from the load, the rest from ``base``.

    Raises ParameterError for a chunk budget that could not serve every slot in one step.
    """
    if chunk_tokens < workload.max_num_seqs:
        raise ParameterError(
            "max_num_batched_tokens",
            f"--max-num-batched-tokens must be at least {workload.max_num_seqs}, a token for each slot of "
            f"{workload.name}, got {chunk_tokens}",
        )
    max_model_len = -(-workload.longest // base.block_size) * base.block_size
    return replace(
        base,
        max_model_len=max_model_len,
        max_num_seqs=workload.max_num_seqs,
        max_num_batched_tokens=max(max_model_len, chunk_tokens),
        enable_prefix_caching=False,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of a load: per policy, one trace a repetition."""

    workload: Workload
    capacity: Capacity
    budgets: Mapping[str, int]
    traces: Mapping[str, tuple[Trace, ...]]

    @property
    def identical(self) -> bool:
        """Whether every request got the same tokens each time: scheduling must not change an answer."""
        answers = [
            {request.id: request.token_ids for request in trace.requests.values()}
            for traces in self.traces.values()
            for trace in traces
        ]
        return all(answer == answers[0] for answer in answers)


@dataclass(frozen=True, slots=True)
class Bench:
    """A load and a started executor to run it on.

    Fields:
        budgets: tokens of a step at most, by policy.
        sleep: passes time while no request is there: time.sleep, or a virtual clock's advance.
    """

    executor: Executor
    capacity: Capacity
    workload: Workload
    prompts: Prompts
    budgets: Mapping[str, int]
    clock: Clock
    sleep: Callable[[float], None]

    def warm_up(self) -> None:
        """A few short requests, so that no policy pays for what is slow only once."""
        requests = tuple(
            replace(request, id=f"warm-up-{i}", output_tokens=min(request.output_tokens, WARM_UP_TOKENS), arrival_s=0.0)
            for i, request in enumerate(self.workload.requests[:WARM_UP_REQUESTS])
        )
        load = replace(self.workload, phases=(Phase("warm-up", requests),))
        replace(self, workload=load).run("continuous")

    def run(self, policy: str, on_tokens: Callable[[int], None] = lambda count: None) -> Trace:
        """The whole load under one policy, on a new scheduler. ``on_tokens`` is told the tokens of each step."""
        workload = self.workload
        scheduler = Scheduler(
            self.capacity,
            make_policy(policy),
            max_num_seqs=workload.max_num_seqs,
            max_num_batched_tokens=self.budgets[policy],
            enable_prefix_caching=False,
        )
        trace = Trace(self.clock.now(), workload.max_num_seqs, self.capacity.block_size)

        def record(step: StepRecord) -> None:
            trace.add(step, scheduler.running)
            on_tokens(trace.steps[-1].sampled)

        for phase in workload.phases:
            clients = Clients(phase, self.prompts, self.clock, self.sleep, trace.sent)
            engine = Engine(scheduler, self.executor, clients, clients, self.clock, record)
            while engine.step() or not clients.done:
                pass
        self._check_lengths(trace)
        return trace

    def _check_lengths(self, trace: Trace) -> None:
        for request in self.workload.requests:
            got = len(trace.requests[request.id].token_ids)
            if got != request.output_tokens:
                raise ChairliftError(f"request {request.id} of the load got {got} tokens, not {request.output_tokens}")

    def compare(self, *, reps: int = 1, progress: Progress = lambda run, done, total: None) -> Comparison:
        """Every policy in turn, ``reps`` times over, so that a slow minute of the machine does not hit only one."""
        check_reps(reps)
        self.warm_up()
        traces: dict[str, list[Trace]] = {policy: [] for policy in self.budgets}
        for rep in range(reps):
            for policy in self.budgets:
                name = policy if reps == 1 else f"{policy}, {rep + 1} of {reps}"
                traces[policy].append(self.run(policy, self._counter(name, progress)))
        return Comparison(
            self.workload, self.capacity, self.budgets, {policy: tuple(runs) for policy, runs in traces.items()}
        )

    def _counter(self, name: str, progress: Progress) -> Callable[[int], None]:
        total, done = self.workload.output_tokens, 0
        progress(name, 0, total)

        def count(tokens: int) -> None:
            nonlocal done
            done += tokens
            progress(name, done, total)

        return count


def make_bench(
    executor: Executor,
    capacity: Capacity,
    workload: Workload,
    *,
    vocab_size: int,
    seed: int,
    whole_tokens: int,
    chunk_tokens: int,
    clock: Clock | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Bench:
    """A comparison of all policies on a started executor, with ``whole_tokens`` or ``chunk_tokens`` a step."""
    budgets = {policy: chunk_tokens if policy == "chunked" else whole_tokens for policy in POLICIES}
    return Bench(executor, capacity, workload, Prompts(vocab_size, seed), budgets, clock or WallClock(), sleep)
