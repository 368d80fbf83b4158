"""A started executor on which loads are run, each on a new scheduler, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from chairlift.bench.clients import Clients, Prompts
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig
from chairlift.core.clock import WallClock
from chairlift.core.engine import Engine
from chairlift.core.plan import Capacity, StepRecord
from chairlift.core.ports import Clock, Executor
from chairlift.core.scheduler import Scheduler
from chairlift.errors import ChairliftError, ConfigError, ParameterError
from chairlift.sim.workloads import Phase, Workload

MAX_REPS = 100
WARM_UP_REQUESTS = 8
WARM_UP_TOKENS = 8

MakeScheduler = Callable[[EngineConfig, Capacity], Scheduler]
"""The scheduler that a configuration describes. (It is given, since the engine's own way also knows the runners.)"""

Progress = Callable[[str, int, int], None]
"""Told of each step: which run this is, its tokens so far, and how many it will have."""


def check_reps(reps: int) -> None:
    if not 1 <= reps <= MAX_REPS:
        raise ParameterError("reps", f"--reps must be a whole number from 1 to {MAX_REPS}, got {reps}")


@dataclass(frozen=True, slots=True)
class Lab:
    """Where loads are run.

    Fields:
        capacity: what the executor reserved. A run may use less of it.
        sleep: passes time while no request is there: time.sleep, or a virtual clock's advance.
    """

    executor: Executor
    capacity: Capacity
    prompts: Prompts
    make_scheduler: MakeScheduler
    clock: Clock
    sleep: Callable[[float], None]

    def run(
        self,
        workload: Workload,
        config: EngineConfig,
        *,
        num_blocks: int | None = None,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> Trace:
        """The whole load, under the configuration.

        Args:
            num_blocks: size of the KV pool, if it is not to be all there is.
            on_tokens: told the tokens of each step.
        """
        scheduler = self.make_scheduler(config, self._capacity(config, num_blocks))
        trace = Trace(self.clock.now(), config.max_num_seqs, self.capacity.block_size)

        def record(step: StepRecord) -> None:
            trace.add(step, scheduler.running)
            on_tokens(trace.steps[-1].sampled)

        for phase in workload.phases:
            clients = Clients(phase, self.prompts, self.clock, self.sleep, trace.sent)
            engine = Engine(scheduler, self.executor, clients, clients, self.clock, record)
            while engine.step() or not clients.done:
                pass
        check_lengths(trace, workload)
        return trace

    def _capacity(self, config: EngineConfig, num_blocks: int | None) -> Capacity:
        """The part of the executor's memory that a run uses."""
        there = self.capacity
        if num_blocks is not None and num_blocks > there.num_blocks:
            raise ConfigError(
                f"the load needs a cache of {num_blocks} KV blocks of {there.block_size} tokens, and there are "
                f"{there.num_blocks}; raise --kv-cache-memory"
            )
        return replace(
            there,
            num_blocks=there.num_blocks if num_blocks is None else num_blocks,
            num_host_blocks=there.num_host_blocks if config.swap_space else 0,
        )

    def warm_up(self, workload: Workload, config: EngineConfig) -> None:
        """A few short requests of the load, so that nobody pays for what is slow only once."""
        requests = tuple(
            replace(request, id=f"warm-up-{i}", output_tokens=min(request.output_tokens, WARM_UP_TOKENS), arrival_s=0.0)
            for i, request in enumerate(workload.requests[:WARM_UP_REQUESTS])
        )
        self.run(replace(workload, phases=(Phase("warm-up", requests),)), config)


def check_lengths(trace: Trace, workload: Workload) -> None:
    """Raises ChairliftError unless each request of the load got exactly the tokens that it asked for."""
    for request in workload.requests:
        got = len(trace.requests[request.id].token_ids)
        if got != request.output_tokens:
            raise ChairliftError(f"request {request.id} of the load got {got} tokens, not {request.output_tokens}")


def count_tokens(name: str, workload: Workload, progress: Progress) -> Callable[[int], None]:
    """Adds up the tokens of a run for the progress that is shown."""
    total, done = workload.output_tokens, 0
    progress(name, 0, total)

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        progress(name, done, total)

    return count


def make_lab(
    executor: Executor,
    capacity: Capacity,
    make_scheduler: MakeScheduler,
    *,
    vocab_size: int,
    seed: int,
    clock: Clock | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Lab:
    """A lab on an executor that was started."""
    return Lab(executor, capacity, Prompts(vocab_size, seed), make_scheduler, clock or WallClock(), sleep)
