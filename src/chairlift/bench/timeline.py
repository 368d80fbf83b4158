"""A run as a drawing: a row per slot, a strip of those who wait below, time from left to right.

Every request is a group `<g class="stay">` per visit to a slot and `<g class="wait">` per time in the queue, with its
numbers as a hover title and in data attributes. The colours are the report's style classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from chairlift.bench.trace import RequestTrace, State, Stay, Trace

WIDTH = 1180
LEFT, RIGHT, TOP, BOTTOM = 62, 26, 26, 30
STRIP_GAP = 14  # between the slots and the waiting strip
MIN_WIDTH = 0.05  # a narrower stretch of a bar is not drawn
MIN_WAIT = 1.0  # nor a shorter wait: who boards at once would fill the strip


@dataclass(frozen=True, slots=True)
class Lanes:
    """Rows of equal height, from ``top`` down."""

    top: float
    count: int
    height: float
    gap: float

    def y(self, lane: int) -> float:
        return self.top + lane * (self.height + self.gap)

    @property
    def bottom(self) -> float:
        return self.y(self.count)


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment worth a line across the drawing: the beginning of a phase."""

    seconds: float
    label: str


def draw(trace: Trace, span: float, marks: Sequence[Mark] = ()) -> str:
    """The drawing as an `<svg>` element. ``span`` is the time at its right edge, in seconds; drawings with the same
    span can be compared by eye."""
    few = trace.max_num_seqs <= 8
    slots = Lanes(TOP, trace.max_num_seqs, 24 if few else 10, 6 if few else 2)
    waits = _pack_waits(trace, shortest=span * MIN_WAIT / (WIDTH - LEFT - RIGHT))
    lanes = max((lane for lane, _, _, _ in waits), default=-1) + 1
    strip = Lanes(slots.bottom + STRIP_GAP, lanes, *((14, 4) if lanes <= 8 else (3, 1)))
    floor = strip.bottom if lanes else slots.bottom
    x = _Axis(span)
    parts = [
        *_grid(x, span, floor),
        *_gutter(slots, strip),
        *(_stay(request, stay, x, slots) for request in trace.requests.values() for stay in request.stays),
        *(_wait(request, start, end, x, strip, lane) for lane, request, start, end in waits),
        *_marks(marks, x, floor),
        _end(max(request.finish for request in trace.requests.values()), x, floor),
    ]
    height = floor + BOTTOM
    return (
        f'<svg class="timeline" viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="Timeline of the slots">{"".join(parts)}</svg>'
    )


class _Axis:
    def __init__(self, span: float) -> None:
        self._scale = (WIDTH - LEFT - RIGHT) / span

    def __call__(self, seconds: float) -> float:
        return LEFT + seconds * self._scale


def _stay(request: RequestTrace, stay: Stay, x: _Axis, slots: Lanes) -> str:
    y, height = slots.y(stay.slot), slots.height
    busy_until = max(segment.end for segment in stay.segments if segment.state is not State.HELD)
    paths: dict[State, list[str]] = {}
    for segment in stay.segments:
        left, width = x(segment.start), x(segment.end) - x(segment.start)
        if width >= MIN_WIDTH:
            paths.setdefault(segment.state, []).append(f"M{left:.2f} {y:g}h{width:.2f}v{height:g}h-{width:.2f}z")
    drawn = "".join(f'<path class="{state.value}" d="{"".join(path)}"/>' for state, path in paths.items())
    return (
        f'<g class="stay" data-request="{escape(request.id)}" data-slot="{stay.slot}" '
        f'data-board="{stay.board:.6f}" data-leave="{stay.leave:.6f}">'
        f"<title>{escape(_describe(request, stay))}</title>{drawn}"
        f"{_label(request, x(stay.board), x(busy_until), y, height)}</g>"
    )


def _describe(request: RequestTrace, stay: Stay) -> str:
    last = request.token_times[-1]
    lines = [
        f"{request.id} in slot {stay.slot + 1}",
        f"prompt {request.prompt_tokens} tokens, output {len(request.token_ids)} tokens",
        f"sent {request.arrival:.3f} s, boarded {stay.board:.3f} s",
        f"first token {request.token_times[0]:.3f} s, last token {last:.3f} s",
        f"answered {request.finish:.3f} s, {request.finish - request.arrival:.3f} s after it was sent",
    ]
    if request.finish > last:
        lines.append(f"held {request.finish - last:.3f} s after its last token")
    return "\n".join(lines)


def _label(request: RequestTrace, left: float, right: float, y: float, height: float) -> str:
    """The request's name at the start of its bar, with its length if there is room; none in thin rows."""
    tokens = len(request.token_ids)
    for text in (f"{request.id} · {tokens} tokens", f"{request.id} · {tokens}", request.id) if height > 12 else ():
        if len(text) * 7.4 + 12 <= right - left:
            return f'<text class="label" x="{left + 5:.2f}" y="{y + height / 2:g}">{escape(text)}</text>'
    return ""


Wait = tuple[int, RequestTrace, float, float]  # lane, who, from, to


def _pack_waits(trace: Trace, shortest: float) -> list[Wait]:
    """Each time in the queue, in the lowest lane that is free then."""
    spans = sorted(
        (
            (start, end, request)
            for request in trace.requests.values()
            for start, end in request.waits
            if end - start > shortest
        ),
        key=lambda span: span[:2],
    )
    free_from: list[float] = []
    waits: list[Wait] = []
    for start, end, request in spans:
        lane = next((i for i, free in enumerate(free_from) if free <= start), len(free_from))
        if lane == len(free_from):
            free_from.append(end)
        free_from[lane] = end
        waits.append((lane, request, start, end))
    return waits


def _wait(request: RequestTrace, start: float, end: float, x: _Axis, strip: Lanes, lane: int) -> str:
    left, width, y = x(start), x(end) - x(start), strip.y(lane)
    title = f"{request.id} waits {end - start:.3f} s, from {start:.3f} s to {end:.3f} s"
    label = ""
    if strip.height > 12 and len(request.id) * 7 + 8 <= width:
        label = f'<text class="label" x="{left + 5:.2f}" y="{y + strip.height / 2:g}">{escape(request.id)}</text>'
    return (
        f'<g class="wait" data-request="{escape(request.id)}" data-from="{start:.6f}" data-to="{end:.6f}">'
        f"<title>{escape(title)}</title>"
        f'<rect class="waiting" x="{left:.2f}" y="{y:g}" width="{width:.2f}" height="{strip.height:g}"/>{label}</g>'
    )


def _gutter(slots: Lanes, strip: Lanes) -> list[str]:
    """The names of the rows, and the grey tracks that show an empty slot."""
    parts = []
    for slot in range(slots.count):
        y = slots.y(slot)
        parts.append(
            f'<rect class="idle" x="{LEFT}" y="{y:g}" width="{WIDTH - LEFT - RIGHT}" height="{slots.height:g}"/>'
        )
        name = f"slot {slot + 1}" if slots.height > 12 else str(slot + 1)
        if slots.height > 12 or slot == 0 or (slot + 1) % 4 == 0:
            parts.append(f'<text class="row" x="{LEFT - 8}" y="{y + slots.height / 2:g}">{name}</text>')
    if slots.height <= 12:
        parts.append(_upright("slots", (slots.top + slots.bottom) / 2))
    if strip.count:
        middle = (strip.top + strip.bottom - strip.gap) / 2
        upright = strip.bottom - strip.top > 60
        parts.append(
            _upright("waiting", middle) if upright else f'<text class="row" x="{LEFT - 8}" y="{middle:g}">queue</text>'
        )
    return parts


def _upright(text: str, y: float) -> str:
    return f'<text class="side" transform="translate(14 {y:g}) rotate(-90)">{text}</text>'


def _grid(x: _Axis, span: float, floor: float) -> list[str]:
    step = _tick(span)
    parts = []
    for i in range(math.floor(span / step + 1e-9) + 1):
        at = x(i * step)
        parts.append(f'<line class="grid" x1="{at:.2f}" x2="{at:.2f}" y1="{TOP - 4}" y2="{floor + 4:g}"/>')
        parts.append(f'<text class="tick" x="{at:.2f}" y="{floor + 18:g}">{i * step:g} s</text>')
    return parts


def _tick(span: float) -> float:
    """A round step of 1, 2 or 5 times a power of ten that gives 5 to 12 ticks."""
    power = 10.0 ** math.floor(math.log10(span / 12))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= 12)


def _marks(marks: Sequence[Mark], x: _Axis, floor: float) -> list[str]:
    return [
        f'<line class="mark" x1="{x(mark.seconds):.2f}" x2="{x(mark.seconds):.2f}" y1="{TOP - 14}" y2="{floor + 4:g}"/>'
        f'<text class="mark" x="{x(mark.seconds) + 5:.2f}" y="{TOP - 10}">{escape(mark.label)}</text>'
        for mark in marks
    ]


def _end(seconds: float, x: _Axis, floor: float) -> str:
    """A line where the last answer was complete."""
    at = x(seconds)
    left = at > WIDTH * 0.8
    anchor, shift = ("end", -5) if left else ("start", 5)
    return (
        f'<line class="end" x1="{at:.2f}" x2="{at:.2f}" y1="{TOP - 14}" y2="{floor + 4:g}"/>'
        f'<text class="end" x="{at + shift:.2f}" y="{TOP - 10}" text-anchor="{anchor}">'
        f"all answered: {seconds:.2f} s</text>"
    )
