"""`chairlift doctor`: what it says is what a runner finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from chairlift import _native
from chairlift.models import KNOWN
from chairlift.runners.memory import available_cpus


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chairlift.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def test_names_what_the_engine_uses_here() -> None:
    result = run()
    assert result.returncode == 0 and not result.stderr
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    assert lines["chairlift"].strip().startswith(version("chairlift"))
    assert lines["instruction set"].strip().split(";")[0] == _native.available_isas()[0]
    assert lines["threads"].strip().startswith(f"{available_cpus()} of {os.cpu_count()} ")
    for package in ("numpy", "tokenizers"):
        assert f"{package} {version(package)}" in lines["libraries"]


def test_json_has_the_same() -> None:
    found = json.loads(run("--json").stdout)
    assert found["isas"] == _native.available_isas() and found["isa"] == found["isas"][0]
    assert 0 < found["memory_usable"] < found["memory_free"] <= found["memory"]
    assert found["problems"] == []
    assert set(found["models"]) == set(KNOWN)


def test_a_model_that_is_not_whole_is_not_here(tmp_path: Path) -> None:
    known = KNOWN["smollm2-135m"]
    file = tmp_path / "models" / known.file
    file.parent.mkdir()
    file.write_bytes(b"half")
    for size, seen in ((4, None), (known.size, str(file))):
        os.truncate(file, size)
        assert json.loads(run("--json", CHAIRLIFT_HOME=str(tmp_path)).stdout)["models"][known.name] == seen


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_broken_extension_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """As when it was built for another Python: the rest is still shown."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['chairlift._native'] = None\n")
    result = run(*arguments, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert result.returncode == 1
    assert "python" in result.stdout.lower()
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: the C++ extension does not load (")
