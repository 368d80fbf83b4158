"""A measured case as numbers, as a table and as a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from io import StringIO
from statistics import median

import pytest
from rich.console import Console

from chairlift.bench.case import Case, Target
from chairlift.bench.case_report import to_html
from chairlift.bench.case_results import target_lines, to_json, to_table, to_text, write
from chairlift.bench.cases import CASES
from chairlift.bench.cases.prefix import Prefix
from chairlift.bench.measure import Measured
from chairlift.bench.results import Setting
from chairlift.core.plan import Capacity

Run = Callable[..., Measured]
CAPACITY = Capacity(100, 16, 256)
NAMES = [kind.name for kind in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_json_has_all_that_was_promised(name: str, measured: Run, small: dict[str, Case], setting: Setting) -> None:
    """Q2: version, configuration, seed, warm-up and raw records are there. Q4: so are the cache hits."""
    run = measured(small[name])
    found = json.loads(json.dumps(to_json(run, setting, CAPACITY), allow_nan=False))
    assert {"version", "seed", "reps", "machine", "model", "capacity", "warm_up", "options", "targets"} <= found.keys()
    assert found["case"] == name
    assert found["options"] == asdict(small[name])  # type: ignore[call-overload]
    assert [variant["label"] for variant in found["variants"]] == [variant.label for variant in run.variants]
    for variant, measured_one in zip(found["variants"], run.variants, strict=True):
        assert variant["config"]["max_num_seqs"] == measured_one.config.max_num_seqs
        assert len(variant["requests"]) == len(measured_one.workload.requests)
        assert all("cached_tokens" in request for request in variant["requests"])
        assert {len(record) for record in variant["step_records"]} == {len(variant["step_columns"])}
        assert len(variant["repetitions"]) == 1
        for column in small[name].columns:
            assert variant[column.name] == variant["repetitions"][0][column.name]
    assert all(target.keys() >= {"text", "value", "limit", "met"} for target in found["targets"])


def test_variants_take_turns_and_numbers_are_medians(measured: Run, small: dict[str, Case]) -> None:
    runs: list[str] = []

    def progress(run: str, done: int, total: int) -> None:
        if run not in runs:
            runs.append(run)

    run = measured(small["prefix"], reps=3, progress=progress)
    labels = [variant.label for variant in run.variants]
    assert runs == [f"{label}, {rep} of 3" for rep in (1, 2, 3) for label in labels]
    for label, values in zip(labels, ([3, 1, 2], [5, 5, 1], [1, 1, 1], [2, 4, 6]), strict=True):
        for numbers, value in zip(run.numbers[label], values, strict=True):
            numbers["prefill_tokens"] = value  # type: ignore[index]
    assert [run.medians[label]["prefill_tokens"] for label in labels] == [2, 5, 1, 4]
    assert [target.value for target in run.targets] == [median([5 / 3, 5, 1 / 2]), 4], "ratios of the same repetition"


@pytest.mark.parametrize("value", [0.5, 1.0, 1.5])
def test_targets_are_limits_from_above_or_below(value: float) -> None:
    assert Target("", value, 1.0).met == (value <= 1)
    assert Target("", value, 1.0, at_most=False).met == (value >= 1)


def test_numbers_are_written_with_their_units() -> None:
    assert write(0.1234, "%") == "12.3 %"
    assert write(0.0123, "ms") == "12.3 ms"
    assert write(1.5, "s") == "1.500 s"
    assert write(123.456, "/s") == "123.5"
    assert write(7, "") == "7"
    assert write(2.345, "") == "2.35"


@pytest.mark.parametrize("name", NAMES)
def test_the_table_fits_80_columns(name: str, measured: Run, small: dict[str, Case]) -> None:
    run = measured(small[name])
    console = Console(width=80, record=True, file=StringIO())
    console.print(to_table(run))
    text = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    words = text.split()
    for column in small[name].columns:
        assert set(column.head.split()) <= set(words)


def test_what_was_missed_is_said(measured: Run) -> None:
    run = measured(Prefix(requests=3, shared=0, own=20))
    assert [met for _, met in target_lines(run)] == [False, False]
    console = Console(width=200, record=True, file=StringIO())
    console.print(to_text(run))
    lines = console.export_text().splitlines()
    assert lines[0].startswith("NOT MET") and "one by one: 100.0 % (target: at most 25.0 %)" in lines[0]


class Text(HTMLParser):
    """The text of a page, and its elements' names and classes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.elements: list[tuple[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs).get("class") or ""))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_tells_numbers_targets_and_settings(
    name: str, measured: Run, small: dict[str, Case], setting: Setting
) -> None:
    run = measured(small[name])
    html = to_html(run, replace(setting, model="<script>alert(1)</script>"), CAPACITY)
    page = Text(html)
    assert not any(tag in ("script", "link", "img") for tag, _ in page.elements) and "http" not in html
    text = " ".join("".join(page.text).split())
    for variant in run.variants:
        assert text.count(variant.label) >= 3, "in the table, above its drawing, and among the settings"
    for sentence, met in target_lines(run):
        assert f"{'met' if met else 'not met'} {sentence}" in text
    assert sum(tag == "svg" and kind == "timeline" for tag, kind in page.elements) == len(run.variants)
    for variant in run.variants:
        assert f"--max-model-len {variant.config.max_model_len}" in text
        assert ("--fair-tenants;" in text) == (name == "fairness")
        assert ("--no-enable-prefix-caching" in text) == (name in ("waste", "prefix"))
    assert "toy processor" in text and setting.version in text
