"""The HTML report, read back with a parser."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser

import pytest

from chairlift.bench.compare import POLICIES, Bench, Comparison
from chairlift.bench.report import LEGEND, to_html
from chairlift.bench.results import Setting, to_json
from chairlift.bench.timeline import LEFT, RIGHT, WIDTH
from chairlift.sim.workloads import Phase, Workload, WorkRequest, peak

VOID = {"meta", "br", "hr", "img", "input", "link"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str, css: str | None = None) -> list[Element]:
        found = [self] if self.tag == tag and (css is None or css in self.attributes.get("class", "").split()) else []
        return found + [element for child in self.children for element in child.all(tag, css)]

    def all_text(self) -> str:
        return self.text + "".join(child.all_text() for child in self.children)


class Reader(HTMLParser):
    """Builds a tree, and fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self._open[-1].text += data


def read(html: str) -> Element:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader._open == [reader.root], "a tag is not closed"
    return reader.root


def runs(page: Element) -> dict[str, Element]:
    return {section.attributes["data-policy"]: section for section in page.all("section", "run")}


def extent(paths: list[Element]) -> tuple[float, float]:
    """Leftmost and rightmost x of rectangles drawn as M x y h width ..."""
    boxes = [
        (float(left), float(left) + float(width))
        for path in paths
        for left, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", path.attributes["d"])
    ]
    return min(left for left, _ in boxes), max(right for _, right in boxes)


@pytest.fixture
def page(four: Comparison, setting: Setting) -> Element:
    return read(to_html(four, setting))


def test_every_request_boards_waits_and_leaves_where_the_json_says(
    page: Element, four: Comparison, setting: Setting
) -> None:
    numbers = to_json(four, setting)["policies"]
    span = max(request["finish_s"] for policy in numbers.values() for request in policy["requests"])
    scale = (WIDTH - LEFT - RIGHT) / span
    for policy in POLICIES:
        section = runs(page)[policy]
        stays = {stay.attributes["data-request"]: stay for stay in section.all("g", "stay")}
        waits = {wait.attributes["data-request"]: wait for wait in section.all("g", "wait")}
        assert stays.keys() == {"A", "B", "C", "D", "E", "F"}
        assert waits.keys() == {"E", "F"}
        for request in numbers[policy]["requests"]:
            stay = stays[request["id"]]
            assert float(stay.attributes["data-board"]) == pytest.approx(request["board_s"])
            assert float(stay.attributes["data-leave"]) == pytest.approx(request["finish_s"])
            assert int(stay.attributes["data-slot"]) == request["slot"]
            left, right = extent(stay.all("path"))
            assert left == pytest.approx(LEFT + request["board_s"] * scale, abs=0.02)
            assert right == pytest.approx(LEFT + request["finish_s"] * scale, abs=0.02)
            (prefill,) = stay.all("path", "prefill")
            assert extent([prefill])[1] == pytest.approx(LEFT + request["first_token_s"] * scale, abs=0.02)
            assert stay.all("title")[0].text.startswith(request["id"])
            if request["id"] in waits:
                (bar,) = waits[request["id"]].all("rect", "waiting")
                left = float(bar.attributes["x"])
                assert left == pytest.approx(LEFT + request["arrival_s"] * scale, abs=0.02)
                assert left + float(bar.attributes["width"]) == pytest.approx(
                    LEFT + request["board_s"] * scale, abs=0.02
                )


def test_held_rows_are_drawn_only_under_static(page: Element) -> None:
    held = {
        policy: {stay.attributes["data-request"] for stay in section.all("g", "stay") if stay.all("path", "held")}
        for policy, section in runs(page).items()
    }
    assert held == {"static": {"B", "C", "D", "F"}, "continuous": set(), "chunked": set()}


def test_every_slot_has_a_row_and_every_bar_a_label(page: Element) -> None:
    for section in runs(page).values():
        assert len(section.all("rect", "idle")) == 4
        labels = [label.text for stay in section.all("g", "stay") for label in stay.all("text", "label")]
        assert sorted(label[0] for label in labels) == ["A", "B", "C", "D", "E", "F"]


def test_the_legend_names_every_colour_in_use(page: Element) -> None:
    (legend,) = page.all("ul", "legend")
    named = {name for name, _ in LEGEND}
    assert {swatch.attributes["class"] for swatch in legend.all("rect")} == named
    drawn = {
        shape.attributes["class"]
        for section in runs(page).values()
        for group in section.all("g")
        for shape in group.all("path") + group.all("rect")
    }
    assert drawn <= named
    style = page.all("style")[0].text
    assert all(f".{name} {{" in style for name in named)


def test_the_tables_hold_the_numbers(page: Element, four: Comparison) -> None:
    first, each = page.all("table")
    cells = {row.children[0].all_text(): [cell.all_text() for cell in row.children[1:]] for row in first.all("tr")}
    assert cells["Slot utilisation, %"][0] == "36.25"
    assert len(cells["KV waste, %"]) == 5
    answered = {row.children[0].all_text(): row.children[3].all_text() for row in each.all("tr")[1:]}
    static = four.traces["static"][0].requests
    assert answered == {name: f"{request.finish:.2f}" for name, request in static.items()}


def test_it_needs_nothing_from_outside(four: Comparison, setting: Setting) -> None:
    html = to_html(four, setting)
    page = read(html)
    assert not page.all("script") and not page.all("link") and not page.all("img")
    assert "http" not in html and "@import" not in html
    assert set(re.findall(r"url\(([^)]*)\)", html)) == {"#hatch-held"}


HOSTILE = """<script>alert("&')"""


def test_names_are_escaped(bench_of: Callable[..., Bench], setting: Setting) -> None:
    requests = (WorkRequest(HOSTILE, 8, 40), WorkRequest("'\" onload=x", 8, 40), WorkRequest("z", 8, 4))
    load = Workload(HOSTILE, (Phase(HOSTILE, requests), Phase("</svg>", (WorkRequest("w", 4, 4),))), max_num_seqs=2)
    html = to_html(bench_of(load).compare(), replace(setting, model=HOSTILE, version=HOSTILE, machine={"cpu": HOSTILE}))
    assert "<script" not in html
    page = read(html)
    assert not page.all("script")
    for section in runs(page).values():
        assert {stay.attributes["data-request"] for stay in section.all("g", "stay")} == {
            HOSTILE, "'\" onload=x", "z", "w",
        }  # fmt: skip
        assert not any("onload" in element.attributes for element in section.all("g"))


def test_many_requests_and_phases_fit(bench_of: Callable[..., Bench], setting: Setting) -> None:
    load = peak(0, 0.1)
    page = read(to_html(bench_of(load, chunk_tokens=64).compare(), setting))
    assert [table.all("caption")[0].text for table in page.all("table")] == ["50 clients", "80 clients", "whole run"]
    for section in runs(page).values():
        stays = section.all("g", "stay")
        assert {stay.attributes["data-request"] for stay in stays} == {request.id for request in load.requests}
        assert [mark.text for mark in section.all("text", "mark")] == ["50 clients", "80 clients"]
        (drawing,) = section.all("svg")
        width, height = map(float, drawing.attributes["viewbox"].split()[2:])
        for wait in section.all("g", "wait"):
            bar = wait.all("rect")[0].attributes
            assert float(bar["x"]) >= LEFT and float(bar["x"]) + float(bar["width"]) <= width - RIGHT + 0.02
            assert float(bar["y"]) + float(bar["height"]) < height


def test_a_changed_answer_is_told(bench_of: Callable[..., Bench], setting: Setting) -> None:
    comparison = bench_of(Workload("one", (Phase("", (WorkRequest("x", 8, 4),)),), max_num_seqs=2)).compare()
    assert "the same tokens under all three" in to_html(comparison, setting)
    comparison.traces["static"][0].requests["x"].token_ids[0] += 1
    assert "which must not happen" in to_html(comparison, setting)
