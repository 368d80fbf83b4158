"""The runs of a case as one HTML file, in the same form as the comparison's report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from html import escape

from chairlift.bench.case import Variant
from chairlift.bench.case_results import lines, target_lines
from chairlift.bench.measure import Measured
from chairlift.bench.report import definitions, html_table, legend, page
from chairlift.bench.results import Setting
from chairlift.bench.timeline import draw
from chairlift.config import EngineConfig
from chairlift.core.plan import Capacity

MOST_SLOTS = 64  # a drawing with more rows tells nobody anything


def to_html(measured: Measured, setting: Setting, capacity: Capacity) -> str:
    """The whole report. Names are escaped, whoever chose them."""
    title = f"chairlift bench {measured.case.name}"
    question = (type(measured.case).__doc__ or "").strip()
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(question)}</p>',
        _targets(measured),
        _table(measured),
        f'<p class="note">{escape(measured.case.notes)}</p>',
        *_timelines(measured),
        f"<h2>How it was measured</h2>{definitions(_facts(measured, setting, capacity))}",
    ]
    return page(title, body)


def _targets(measured: Measured) -> str:
    items = "".join(
        f'<li><b class="{"gain" if met else "loss"}">{"met" if met else "not met"}</b> {escape(sentence)}</li>'
        for sentence, met in target_lines(measured)
    )
    return f"<ul>{items}</ul>"


def _table(measured: Measured) -> str:
    rows = (
        f'<th scope="row">{escape(label)}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        for label, cells in lines(measured)
    )
    return html_table("Medians", ["", *(column.head for column in measured.case.columns)], rows)


def _timelines(measured: Measured) -> Iterable[str]:
    if max(variant.config.max_num_seqs for variant in measured.variants) > MOST_SLOTS:
        return
    yield "<h2>What happened in the slots</h2>"
    yield legend()
    traces = {variant.label: measured.typical(variant.label) for variant in measured.variants}
    span = max(trace.steps[-1].end for trace in traces.values())
    for label, trace in traces.items():
        yield f'<section class="run"><h3 class="as-is">{escape(label)}</h3>{draw(trace, span)}</section>'
    yield '<p class="note">All drawings have the same time scale. Point at a bar for its numbers.</p>'


def _facts(measured: Measured, setting: Setting, capacity: Capacity) -> dict[str, str]:
    return {
        "Chairlift": setting.version,
        "Model": setting.model,
        "Machine": ", ".join(f"{name} {value}" for name, value in setting.machine.items()),
        "Options": ", ".join(f"{name} {value}" for name, value in asdict(measured.case).items()),  # type: ignore[call-overload]
        "Seed": str(setting.seed),
        "Repetitions": f"{measured.reps}, after a warm-up; medians of the numbers, drawings of runs of middle duration",
        "Sampling": "greedy, to the exact length; prompts are random tokens",
        **{variant.label: _settings(variant, capacity) for variant in measured.variants},
    }


def _settings(variant: Variant, capacity: Capacity) -> str:
    """What of the configuration is not the default, as the command line has it."""
    default = asdict(EngineConfig(model=variant.config.model))
    chosen = {name: value for name, value in asdict(variant.config).items() if value != default[name]}
    flags = " ".join(_flag(name.replace("_", "-"), value) for name, value in chosen.items())
    return f"{flags}; {variant.num_blocks or capacity.num_blocks} KV blocks of {capacity.block_size} tokens"


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"
