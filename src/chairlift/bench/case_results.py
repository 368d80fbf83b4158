"""The runs of a case as plain data for JSON, and as tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from chairlift.bench.case import Column, Target, Variant
from chairlift.bench.lab import WARM_UP_REQUESTS, WARM_UP_TOKENS
from chairlift.bench.measure import Measured
from chairlift.bench.results import Setting, raw_records
from chairlift.core.plan import Capacity


def to_json(measured: Measured, setting: Setting, capacity: Capacity) -> dict[str, Any]:
    """Everything, raw records included. Times in seconds since the run began, unless a name says otherwise."""
    return {
        "case": measured.case.name,
        "options": asdict(measured.case),  # type: ignore[call-overload]
        "model": setting.model,
        "machine": dict(setting.machine),
        "version": setting.version,
        "seed": setting.seed,
        "reps": measured.reps,
        "capacity": {
            "num_blocks": capacity.num_blocks,
            "block_size": capacity.block_size,
            "num_host_blocks": capacity.num_host_blocks,
            "max_model_len": capacity.max_model_len,
        },
        "warm_up": {"requests": WARM_UP_REQUESTS, "max_output_tokens": WARM_UP_TOKENS},
        "sampling": {"temperature": 0.0, "ignore_eos": True, "prompts": "random tokens"},
        "notes": measured.case.notes,
        "targets": [{**asdict(target), "met": target.met} for target in measured.targets],
        "variants": [_variant(measured, variant) for variant in measured.variants],
    }


def _variant(measured: Measured, variant: Variant) -> dict[str, Any]:
    return {
        "label": variant.label,
        "config": asdict(variant.config),
        "num_kv_blocks": variant.num_blocks,
        "slots": variant.config.max_num_seqs,
        **measured.medians[variant.label],
        "repetitions": [dict(numbers) for numbers in measured.numbers[variant.label]],
        **raw_records(measured.typical(variant.label)),
    }


def to_table(measured: Measured) -> Table:
    """The medians, for a terminal: a line per variant."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for column in measured.case.columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for label, cells in lines(measured):
        table.add_row(label, *cells)
    return table


def lines(measured: Measured) -> list[tuple[str, list[str]]]:
    """Of each variant its label and its numbers, written."""
    return [
        (label, [_cell(column, numbers[column.name]) for column in measured.case.columns])
        for label, numbers in measured.medians.items()
    ]


def target_lines(measured: Measured) -> list[tuple[str, bool]]:
    """What was expected, what it came to, and whether that is as it should be."""
    return [(_sentence(target), target.met) for target in measured.targets]


def to_text(measured: Measured) -> Text:
    """The targets, for a terminal."""
    text = Text()
    for sentence, met in target_lines(measured):
        text.append("met      " if met else "NOT MET  ", style="green" if met else "bold red")
        text.append(f"{sentence}\n")
    return text


def _sentence(target: Target) -> str:
    bound = "at most" if target.at_most else "at least"
    return f"{target.text}: {write(target.value, target.unit)} (target: {bound} {write(target.limit, target.unit)})"


def _cell(column: Column, value: float) -> str:
    """Without the unit where the heading has it."""
    text = write(value, column.unit)
    return text if column.unit == "%" else text.removesuffix(f" {column.unit}")


def write(value: float, unit: str) -> str:
    """A number with its unit: "" for counts and ratios, "1" for means of counts, "/s" for rates."""
    match unit:
        case "%":
            return f"{value * 100:.1f} %"
        case "ms":
            return f"{value * 1000:.1f} ms"
        case "s":
            return f"{value:.3f} s"
        case "1" | "/s":
            return f"{value:.1f}"
    return f"{value:.0f}" if value == round(value) else f"{value:.2f}"
