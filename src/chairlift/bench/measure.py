"""Runs a case: every variant in turn, several times over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from chairlift.bench.case import Case, Numbers, Target, Variant
from chairlift.bench.lab import Lab, Progress, check_reps, count_tokens
from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs of a case: of each variant, one a repetition."""

    case: Case
    variants: tuple[Variant, ...]
    traces: Mapping[str, tuple[Trace, ...]]
    numbers: Mapping[str, tuple[Numbers, ...]]

    @property
    def reps(self) -> int:
        return len(self.traces[self.variants[0].label])

    @property
    def medians(self) -> dict[str, Numbers]:
        """Of each variant, each number's median over the repetitions."""
        return {
            label: {name: median(run[name] for run in runs) for name in runs[0]} for label, runs in self.numbers.items()
        }

    @property
    def targets(self) -> list[Target]:
        """With the median of their values, each taken from the runs of one repetition: those had the same machine."""
        each = [self.case.targets({label: runs[i] for label, runs in self.numbers.items()}) for i in range(self.reps)]
        return [replace(same[0], value=median(target.value for target in same)) for same in zip(*each, strict=True)]

    def typical(self, label: str) -> Trace:
        """The run of middle duration, for what has no median: single requests and steps."""
        return sorted(self.traces[label], key=lambda trace: trace.steps[-1].end)[(self.reps - 1) // 2]


def measure(
    case: Case,
    lab: Lab,
    config: EngineConfig,
    *,
    seed: int,
    reps: int = 1,
    progress: Progress = lambda run, done, total: None,
) -> Measured:
    """Every variant in turn, ``reps`` times over, so that a slow minute of the machine does not hit only one."""
    check_reps(reps)
    variants = tuple(case.variants(lab, config, seed))
    lab.warm_up(variants[0].workload, variants[0].config)
    traces: dict[str, list[Trace]] = {variant.label: [] for variant in variants}
    for rep in range(reps):
        for variant in variants:
            name = variant.label if reps == 1 else f"{variant.label}, {rep + 1} of {reps}"
            count = count_tokens(name, variant.workload, progress)
            trace = lab.run(variant.workload, variant.config, num_blocks=variant.num_blocks, on_tokens=count)
            traces[variant.label].append(trace)
    return Measured(
        case,
        variants,
        {label: tuple(runs) for label, runs in traces.items()},
        {v.label: tuple(case.numbers(v, trace) for trace in traces[v.label]) for v in variants},
    )
