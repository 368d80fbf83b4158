"""``chairlift bench compare``: what it refuses before it measures anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

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
def test_refusals(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert isinstance(result.exception, ChairliftError)
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())
