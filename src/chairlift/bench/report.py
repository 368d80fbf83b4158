"""The comparison as one HTML file that needs nothing else: style inside, drawings as inline SVG, no scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files

from chairlift.bench.compare import Comparison
from chairlift.bench.results import BASELINE, Part, Row, Setting, parts, rows, typical
from chairlift.bench.timeline import Mark, draw
from chairlift.bench.trace import Trace

FEW_REQUESTS = 12  # up to so many, each has its own line in a table

EXPLANATIONS = {
    "static": "A batch boards together and leaves together. A request that has its last token keeps its slot, and is "
    "computed on, until the longest of its batch has ended. Nobody boards meanwhile.",
    "continuous": "A request leaves at the step that gives its last token, and whoever waits boards at the next. A new "
    "prompt is computed whole, in a step of its own, so those who run pause for that long.",
    "chunked": "A request leaves at the step that gives its last token, and whoever waits boards at the next. New "
    "prompts are computed in pieces beside the requests that run, so those keep going.",
}

LEGEND = (
    ("prefill", "computes its prompt"),
    ("decode", "yields a token each step"),
    ("paused", "pauses while prompts of others are computed"),
    ("held", "has ended, kept until its batch ends"),
    ("idle", "empty slot"),
    ("waiting", "waits in the queue"),
)


def to_html(comparison: Comparison, setting: Setting) -> str:
    """The whole report. Names are escaped, whoever chose them."""
    title = f"Static, continuous and chunked batching: {comparison.workload.name}"
    measured = parts(comparison)
    traces = {policy: typical(runs) for policy, runs in comparison.traces.items()}
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{escape(_lead(comparison, setting))}</p>',
        _cards(measured[-1]),
        "<h2>The numbers</h2>",
        *(_table(part) for part in measured),
        f'<p class="note">{escape(_note(comparison))}</p>',
        *_requests(traces),
        "<h2>What happened in the slots</h2>",
        legend(),
        *_timelines(comparison, traces, measured[-1]),
        _definitions(),
        _settings(comparison, setting),
    ]
    return page(title, body)


def page(title: str, body: Iterable[str]) -> str:
    """A whole HTML file. ``title`` is plain text, ``body`` holds elements."""
    style = files("chairlift.bench").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body>{_PATTERNS}<main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


_PATTERNS = """<svg class="patterns" width="0" height="0" aria-hidden="true"><defs>
<pattern id="hatch-held" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" class="held-ground"/><rect width="2" height="6" class="held-line"/></pattern>
</defs></svg>"""


def _lead(comparison: Comparison, setting: Setting) -> str:
    workload, machine = comparison.workload, setting.machine
    return (
        f"The same {len(workload.requests)} requests, {workload.output_tokens:,} tokens of output, through three "
        f"schedulers on one runner: {setting.model}, {workload.max_num_seqs} slots, {machine.get('threads')} threads "
        f"on {machine.get('cpu')}."
    )


def _note(comparison: Comparison) -> str:
    same = (
        "Every request got the same tokens under all three."
        if comparison.identical
        else "WARNING: some requests got other tokens under another policy, which must not happen."
    )
    return f"Changes are against static batching. {same}"


def _cards(part: Part) -> str:
    """The headline: what continuous batching changes."""
    static, other = part.metrics[BASELINE], part.metrics["continuous"]
    facts = (
        (f"{other.output_tokens_per_s / static.output_tokens_per_s:.2f}×", "the output throughput of static"),
        (f"{other.mean_e2e_s / static.mean_e2e_s * 100:.0f} %", "of its mean response time"),
        (f"{other.p99_e2e_s / static.p99_e2e_s * 100:.0f} %", "of its P99 response time"),
        (
            f"{static.slot_utilization * 100:.0f} → {other.slot_utilization * 100:.0f} %",
            "of the slots' steps give a wanted token",
        ),
    )
    cards = "".join(f'<div class="card"><b>{escape(fact)}</b><span>{escape(text)}</span></div>' for fact, text in facts)
    return f'<p class="kicker">Continuous against static batching</p><div class="cards">{cards}</div>'


def _table(part: Part) -> str:
    others = [policy for policy in part.metrics if policy != BASELINE]
    head = [*part.metrics, *(f"{policy} vs {BASELINE}" for policy in others)]
    return html_table(part.label, ["", *head], (_table_row(row) for row in rows(part)))


def _table_row(row: Row) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
    kinds = {True: "gain", False: "loss", None: "same"}
    changes = "".join(f'<td class="{kinds[gain]}">{escape(text)}</td>' for text, gain in row.changes)
    return f'<th scope="row">{escape(row.label)}</th>{cells}{changes}'


def html_table(caption: str, head: Iterable[str], lines: Iterable[str]) -> str:
    """``lines`` hold the cells of each row, as elements."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _requests(traces: dict[str, Trace]) -> list[str]:
    """When each request was answered, if there are few."""
    some = next(iter(traces.values()))
    if len(some.requests) > FEW_REQUESTS:
        return []
    lines = []
    for request_id, request in some.requests.items():
        times = "".join(
            f"<td>{trace.requests[request_id].token_times[0]:.2f}</td><td>{trace.requests[request_id].finish:.2f}</td>"
            for trace in traces.values()
        )
        lines.append(f'<th scope="row">{escape(request_id)}</th><td>{len(request.token_ids)}</td>{times}')
    head = [
        "Request",
        "output tokens",
        *(f"{policy}: {what}" for policy in traces for what in ("first token", "answered")),
    ]
    return [html_table("Each request, in seconds since the run began", head, lines)]


def legend() -> str:
    """What the colours of the drawings mean."""
    items = "".join(
        f'<li><svg width="26" height="14" aria-hidden="true"><rect class="{name}" width="26" height="14" rx="2"/></svg>'
        f"<b>{name}</b> {escape(text)}</li>"
        for name, text in LEGEND
    )
    return f'<ul class="legend">{items}</ul>'


def _timelines(comparison: Comparison, traces: dict[str, Trace], whole: Part) -> Iterable[str]:
    span = max(request.finish for trace in traces.values() for request in trace.requests.values())
    for policy, trace in traces.items():
        metrics = whole.metrics[policy]
        summary = (
            f"{metrics.output_tokens_per_s:,.0f} token/s of output, mean response {metrics.mean_e2e_s:.2f} s, "
            f"slots used {metrics.slot_utilization * 100:.2f} %, {metrics.steps} steps"
        )
        yield (
            f'<section class="run" data-policy="{escape(policy)}">'
            f"<h3>{escape(policy)} <span>{escape(summary)}</span></h3>"
            f"<p>{escape(EXPLANATIONS[policy])}</p>{draw(trace, span, _phase_marks(comparison, trace))}</section>"
        )
    yield '<p class="note">All three drawings have the same time scale. Point at a bar for its numbers.</p>'


def _phase_marks(comparison: Comparison, trace: Trace) -> list[Mark]:
    phases = comparison.workload.phases
    if len(phases) == 1:
        return []
    return [
        Mark(min(trace.requests[request.id].arrival for request in phase.requests), phase.label) for phase in phases
    ]


def _definitions() -> str:
    terms = (
        (
            "Output throughput",
            "tokens of all answers, divided by the time from the first request sent to the last answer.",
        ),
        (
            "Response time",
            "from sending a request to its complete answer. Under static batching an answer is complete "
            "when its batch ends.",
        ),
        ("TTFT, time to first token", "from sending a request to the end of the step that gave its first token."),
        ("ITL, inter-token latency", "time between two consecutive tokens of a request, over all such pairs."),
        (
            "Slot utilisation",
            "tokens that requests gained, divided by slots times steps. A slot that is empty, holds a "
            "finished request, pauses, or computes a prompt without its end, gives no token in that step.",
        ),
        (
            "KV waste",
            "share of the KV memory that requests hold, or are promised, without tokens of an unfinished "
            "request in it; added up over time.",
        ),
    )
    return f"<h2>What the numbers mean</h2>{definitions(dict(terms))}"


def _settings(comparison: Comparison, setting: Setting) -> str:
    workload, capacity = comparison.workload, comparison.capacity
    traces = [trace for runs in comparison.traces.values() for trace in runs]
    facts = {
        "Chairlift": setting.version,
        "Model": setting.model,
        "Machine": ", ".join(f"{name} {value}" for name, value in setting.machine.items()),
        "Load": f"{workload.name}, seed {setting.seed}, scale {setting.scale:g}; "
        + "; ".join(f"{phase.label}: {len(phase.requests)} requests" for phase in workload.phases),
        "Slots": str(workload.max_num_seqs),
        "Token budget of a step": ", ".join(f"{policy} {budget}" for policy, budget in comparison.budgets.items()),
        "KV cache": f"{capacity.num_blocks} blocks of {capacity.block_size} tokens; prefix cache off, "
        f"{sum(trace.num_cached_tokens for trace in traces)} tokens found in it",
        "Longest request allowed": f"{capacity.max_model_len} tokens",
        "Preemptions": str(sum(trace.num_preemptions for trace in traces)),
        "Repetitions": f"{len(next(iter(comparison.traces.values())))}, after a warm-up; medians of the numbers, the "
        "drawing of the run of middle duration",
        "Sampling": "greedy, to the exact length",
    }
    return f"<h2>How it was measured</h2>{definitions(facts)}"


def definitions(facts: Mapping[str, str]) -> str:
    """Terms and what is said of them."""
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{items}</dl>"
