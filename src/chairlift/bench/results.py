"""A comparison as plain data for JSON, and as the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from chairlift.bench.compare import Comparison
from chairlift.bench.lab import WARM_UP_REQUESTS, WARM_UP_TOKENS
from chairlift.bench.metrics import Metrics, measure, middle
from chairlift.bench.trace import RequestTrace, Trace
from chairlift.sim.workloads import Phase

STEP_COLUMNS = ("start", "end", "tokens", "prefill", "sampled", "running", "waiting", "kv_held", "kv_useful")


@dataclass(frozen=True, slots=True)
class Setting:
    """How a comparison was made, for its report."""

    model: str
    seed: int
    scale: float
    version: str
    machine: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """The metrics of one phase, or of the whole run: one per policy, the median over repetitions."""

    label: str
    metrics: Mapping[str, Metrics]


def parts(comparison: Comparison) -> list[Part]:
    """Each phase by itself, if there are several, and at last the whole run."""
    phases = comparison.workload.phases
    found = [_part(comparison, phase.label, phase) for phase in phases] if len(phases) > 1 else []
    return [*found, _part(comparison, "whole run" if found else phases[0].label, None)]


def _part(comparison: Comparison, label: str, phase: Phase | None) -> Part:
    ids = {request.id for request in phase.requests} if phase else None
    return Part(
        label,
        {policy: middle([measure(trace, ids) for trace in runs]) for policy, runs in comparison.traces.items()},
    )


def typical(traces: tuple[Trace, ...]) -> Trace:
    """The repetition of middle duration, for what has no median: single requests and steps."""
    return sorted(traces, key=lambda trace: measure(trace).duration_s)[(len(traces) - 1) // 2]


def to_json(comparison: Comparison, setting: Setting) -> dict[str, Any]:
    """Everything, raw records included. Times in seconds since the run of that policy began."""
    workload, capacity = comparison.workload, comparison.capacity
    *phases, whole = parts(comparison)
    return {
        "case": workload.name,
        "model": setting.model,
        "machine": dict(setting.machine),
        "version": setting.version,
        "seed": setting.seed,
        "scale": setting.scale,
        "reps": len(next(iter(comparison.traces.values()))),
        "config": {
            "max_num_seqs": workload.max_num_seqs,
            "max_model_len": capacity.max_model_len,
            "max_num_batched_tokens": dict(comparison.budgets),
            "block_size": capacity.block_size,
            "num_kv_blocks": capacity.num_blocks,
            "enable_prefix_caching": False,
            "admission": "optimistic",
            "temperature": 0.0,
            "ignore_eos": True,
            "prompts": "random tokens, none shared",
        },
        "warm_up": {"requests": WARM_UP_REQUESTS, "max_output_tokens": WARM_UP_TOKENS},
        "identical_outputs": comparison.identical,
        "policies": {
            policy: {
                **asdict(whole.metrics[policy]),
                "phases": [{"label": phase.label, **asdict(phase.metrics[policy])} for phase in phases],
                "repetitions": [asdict(measure(trace)) for trace in traces],
                **raw_records(typical(traces)),
            }
            for policy, traces in comparison.traces.items()
        },
    }


def raw_records(trace: Trace) -> dict[str, Any]:
    """Every request and every step of a run."""
    return {
        "preemptions": trace.num_preemptions,
        "swaps": trace.num_swaps,
        "recomputed_tokens": trace.num_recomputed_tokens,
        "cached_tokens": trace.num_cached_tokens,
        "requests": [_request(request) for request in trace.requests.values()],
        "step_columns": list(STEP_COLUMNS),
        "step_records": [[_rounded(getattr(step, name)) for name in STEP_COLUMNS] for step in trace.steps],
    }


def _request(request: RequestTrace) -> dict[str, Any]:
    return {
        "id": request.id,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": len(request.token_ids),
        "arrival_s": _rounded(request.arrival),
        "board_s": _rounded(request.stays[0].board),
        "first_token_s": _rounded(request.token_times[0]),
        "last_token_s": _rounded(request.token_times[-1]),
        "finish_s": _rounded(request.finish),
        "slot": request.stays[-1].slot,
    }


def _rounded(value: float) -> float:
    """To the microsecond; whole numbers stay."""
    return round(value, 6)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: what it is, how to write it, and whether more is better."""

    label: str
    get: Callable[[Metrics], float]
    write: Callable[[float], str]
    more_is_better: bool


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _milliseconds(value: float) -> str:
    return _rate(value * 1000)


def _percent(value: float) -> str:
    return f"{value * 100:.2f}"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


# The columns must fit a terminal of 80 characters, so units stand in the label.
LINES = (
    Line("Output, token/s", lambda m: m.output_tokens_per_s, _rate, True),
    Line("In and out, token/s", lambda m: m.total_tokens_per_s, _rate, True),
    Line("Response mean, s", lambda m: m.mean_e2e_s, _seconds, False),
    Line("Response P99, s", lambda m: m.p99_e2e_s, _seconds, False),
    Line("TTFT mean, s", lambda m: m.mean_ttft_s, _seconds, False),
    Line("TTFT P99, s", lambda m: m.p99_ttft_s, _seconds, False),
    Line("ITL mean, ms", lambda m: m.mean_itl_s, _milliseconds, False),
    Line("ITL P99, ms", lambda m: m.p99_itl_s, _milliseconds, False),
    Line("Slot utilisation, %", lambda m: m.slot_utilization, _percent, True),
    Line("KV waste, %", lambda m: m.kv_waste, _percent, False),
    Line("Steps", lambda m: m.steps, lambda value: f"{value:.0f}", False),
    Line("Duration, s", lambda m: m.duration_s, _seconds, False),
)

BASELINE = "static"


@dataclass(frozen=True, slots=True)
class Row:
    """A written line: a cell per policy, and per other policy its change against static and whether it is a gain."""

    label: str
    cells: tuple[str, ...]
    changes: tuple[tuple[str, bool | None], ...]


def rows(part: Part) -> list[Row]:
    return [_row(line, part) for line in LINES]


def _row(line: Line, part: Part) -> Row:
    values = {policy: line.get(metrics) for policy, metrics in part.metrics.items()}
    base = values[BASELINE]
    changes = tuple(_change(value, base, line) for policy, value in values.items() if policy != BASELINE)
    return Row(line.label, tuple(line.write(value) for value in values.values()), changes)


def _change(value: float, base: float, line: Line) -> tuple[str, bool | None]:
    if base == 0:
        return "n/a", None
    percent = (value / base - 1) * 100
    text = f"{percent:+,.0f} %" if abs(percent) >= 100 else f"{percent:+.1f} %"
    if text in ("+0.0 %", "-0.0 %"):
        return "0 %", None
    return text.replace("-", "\N{MINUS SIGN}"), (percent > 0) == line.more_is_better


def to_table(part: Part) -> Table:
    """The table for a terminal."""
    table = Table(
        title=part.label,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("", no_wrap=True)
    for policy in part.metrics:
        table.add_column(policy, justify="right", no_wrap=True)
    for policy in part.metrics:
        if policy != BASELINE:
            table.add_column(f"{policy}\nvs {BASELINE}", justify="right", no_wrap=True)
    for row in rows(part):
        changes = [Text(text, style=_STYLES[gain]) for text, gain in row.changes]
        table.add_row(row.label, *row.cells, *changes)
    return table


_STYLES = {True: "green", False: "red", None: "dim"}
