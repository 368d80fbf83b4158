"""The same load through each policy, on one runner, in one process.

All policies get the same requests, slots, KV pool and workspace. They differ in the token budget of a step alone:
static and continuous compute prompts whole, so their budget must hold the longest; chunked uses a smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from chairlift.bench.lab import Lab, Progress, check_reps, count_tokens
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig
from chairlift.core.plan import Capacity
from chairlift.errors import ParameterError
from chairlift.sim.workloads import Workload, four_requests, peak

POLICIES = ("static", "continuous", "chunked")
CASES = ("four-requests", "peak")


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
    """A load, where to run it, and the configuration of each policy."""

    lab: Lab
    workload: Workload
    configs: Mapping[str, EngineConfig]

    def run(self, policy: str, on_tokens: Callable[[int], None] = lambda count: None) -> Trace:
        """The whole load under one policy. ``on_tokens`` is told the tokens of each step."""
        return self.lab.run(self.workload, self.configs[policy], on_tokens=on_tokens)

    def compare(self, *, reps: int = 1, progress: Progress = lambda run, done, total: None) -> Comparison:
        """Every policy in turn, ``reps`` times over, so that a slow minute of the machine does not hit only one."""
        check_reps(reps)
        self.lab.warm_up(self.workload, self.configs["continuous"])
        traces: dict[str, list[Trace]] = {policy: [] for policy in self.configs}
        for rep in range(reps):
            for policy in self.configs:
                name = policy if reps == 1 else f"{policy}, {rep + 1} of {reps}"
                traces[policy].append(self.run(policy, count_tokens(name, self.workload, progress)))
        return Comparison(
            self.workload,
            self.lab.capacity,
            {policy: config.max_num_batched_tokens or 0 for policy, config in self.configs.items()},
            {policy: tuple(runs) for policy, runs in traces.items()},
        )


def make_bench(lab: Lab, workload: Workload, config: EngineConfig, *, chunk_tokens: int) -> Bench:
    """A comparison of all policies: with the budget of ``config`` for whole prompts, or ``chunk_tokens`` a step."""
    configs = {policy: replace(config, scheduler_policy=policy) for policy in POLICIES}
    configs["chunked"] = replace(configs["chunked"], max_num_batched_tokens=chunk_tokens)
    return Bench(lab, workload, configs)
