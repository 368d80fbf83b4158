"""``chairlift bench``: what its commands refuse before they measure anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chairlift.bench.case import Case
from chairlift.bench.cases import CASES
from chairlift.cli.bench import app
from chairlift.errors import ChairliftError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "five"], "--case must be one of"),
        (["--scale", "2"], "--scale 2 has no effect on four-requests"),
        (["--report", "report.png"], "--report writes HTML, so its name must end in .html, got report.png"),
        (["--json", "no/such/folder/x.json"], "--json must name a file in a folder that exists"),
        (["--json", "."], "--json must name a file in a folder that exists"),
        (["--reps", "0"], "--reps must be a whole number from 1 to 100"),
        (["--max-num-batched-tokens", "2"], "--max-num-batched-tokens must be at least 4"),
    ],
)
def test_compare_refuses(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert isinstance(result.exception, ChairliftError)
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "report.png"], "--report writes HTML, so its name must end in .html, got report.png"),
        (["--json", "no/such/folder/x.json"], "--json must name a file in a folder that exists"),
        (["--reps", "101"], "--reps must be a whole number from 1 to 100"),
        (["--isa", "x", "no-such-file.gguf"], "no-such-file.gguf"),
        (["--kv-cache-memory", "much"], "--kv-cache-memory must be a size"),
    ],
)
def test_cases_refuse(
    kind: type[Case], arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [kind.name, *arguments])
    assert isinstance(result.exception, ChairliftError)
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_every_case_is_a_command_that_says_what_it_measures() -> None:
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    for kind in CASES:
        assert kind.name in listed and (kind.__doc__ or "")[:40] in listed
    shown = CliRunner().invoke(app, ["long-prompt", "--help"], env={"COLUMNS": "200"}).output
    for flag in ("--prompt", "--slo-itl", "--max-num-batched-tokens", "--reps", "--json", "--report", "--seed"):
        assert flag in shown


def test_the_command_line_does_not_load_the_engine() -> None:
    code = "import sys, chairlift.cli.bench; print('chairlift.core.scheduler' in sys.modules, 'numpy' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == ["False", "False"]
