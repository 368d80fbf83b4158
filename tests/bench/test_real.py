"""The commands on the real model and the C++ runner: the four-requests case, and each measured case, very small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chairlift.bench.case import Case
from chairlift.bench.cases import CASES
from chairlift.bench.compare import POLICIES
from chairlift.cli.bench import app
from chairlift.sim.workloads import FOUR_OUTPUTS


@pytest.fixture(scope="module")
def written(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, str]:
    """The JSON, the report and the output of one run of the command."""
    folder = tmp_path_factory.mktemp("compare")
    numbers, report = folder / "numbers.json", folder / "report.html"
    arguments = [
        "compare",
        str(smollm2_path),
        "--case",
        "four-requests",
        "--json",
        str(numbers),
        "--report",
        str(report),
    ]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(numbers.read_text()), report.read_text(), result.output


def finish_steps(policy: dict[str, Any]) -> dict[str, int]:
    """The step at whose end each request was answered, counted from 1."""
    ends = [record[policy["step_columns"].index("end")] for record in policy["step_records"]]
    return {request["id"]: ends.index(request["finish_s"]) + 1 for request in policy["requests"]}


def test_static_holds_and_the_others_do_not(written: tuple[dict[str, Any], str, str]) -> None:
    numbers, _, _ = written
    policies = numbers["policies"]
    assert finish_steps(policies["static"]) == {"A": 200, "B": 200, "C": 200, "D": 200, "E": 300, "F": 300}
    # continuous spends two steps on the prompts of E and F, who board after D and C have left
    assert finish_steps(policies["continuous"]) == {"A": 202, "B": 52, "C": 31, "D": 10, "E": 111, "F": 76}
    assert finish_steps(policies["chunked"]) == {"A": 200, "B": 50, "C": 30, "D": 10, "E": 110, "F": 75}


def test_static_s_utilization_is_exact(written: tuple[dict[str, Any], str, str]) -> None:
    policies = written[0]["policies"]
    assert policies["static"]["slot_utilization"] == 290 / 800
    assert policies["static"]["slot_utilization"] < policies["continuous"]["slot_utilization"]


def test_answers_are_the_same_and_of_their_exact_length(written: tuple[dict[str, Any], str, str]) -> None:
    numbers, _, _ = written
    assert numbers["identical_outputs"] is True
    for policy in POLICIES:
        found = {request["id"]: request["output_tokens"] for request in numbers["policies"][policy]["requests"]}
        assert found == FOUR_OUTPUTS


def test_the_machine_and_the_model_are_named(written: tuple[dict[str, Any], str, str], smollm2_path: Path) -> None:
    numbers, report, _ = written
    assert numbers["model"] == smollm2_path.name
    assert numbers["machine"]["threads"] >= 1
    assert numbers["machine"]["cpu"] and numbers["machine"]["cpu"] in report
    assert str(smollm2_path.parent) not in report


def test_the_table_is_printed(written: tuple[dict[str, Any], str, str]) -> None:
    _, _, output = written
    assert "36.25" in output
    assert "continuous" in output and "chunked" in output


SMALL = {
    "waste": ["--scale", "0.01"],
    "thrash": ["--requests", "2", "--scale", "0.1"],
    "prefix": ["--requests", "3", "--shared", "40", "--own", "8"],
    "long-prompt": ["--prompt", "64", "--output", "48", "--slo-itl", "500"],
    "slo": ["--requests", "2", "--clients", "2", "--slo-itl", "1000"],
    "fairness": ["--flood", "2", "--singles", "1", "--max-num-seqs", "2"],
    "delay": ["--bursts", "2", "--burst", "2", "--prompt", "8", "--output", "4"],
}


@pytest.mark.parametrize("kind", CASES)
def test_each_case_runs(kind: type[Case], smollm2_path: Path, tmp_path: Path) -> None:
    numbers, report = tmp_path / "numbers.json", tmp_path / "report.html"
    arguments = [kind.name, str(smollm2_path), *SMALL[kind.name], "--json", str(numbers), "--report", str(report)]
    arguments += ["--kv-cache-memory", "64MiB"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(numbers.read_text())
    assert found["case"] == kind.name and found["machine"]["threads"] >= 1
    for variant in found["variants"]:
        assert variant["label"] in result.output
        assert all(request["finish_s"] > request["arrival_s"] for request in variant["requests"])
    assert "target:" in " ".join(result.output.split())
    assert report.read_text().startswith("<!doctype html>")
