"""The mutation check itself, and its short version: the gravest faults must be caught, each within seconds.

All faults are run by ``python tests/mutation/run.py``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).with_name("run.py")

GRAVEST = (
    "kv: no copy on write",
    "kv: KV is known before it is computed",
    "kv: a hit is not owned",
    "layout: a window is freed a block early",
    "kv: the last block is not swapped out",
    "batch: a draw is known by the number of the next",
    "planner: who was just pushed out is planned",
    "beams: the worst go on",
)
"""Each gives a client a wrong answer."""

HARMLESS = """
@ another name for what is popped
-            block, _ = self._cached.popitem(last=False)
+            block, _nothing = self._cached.popitem(last=False)
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RUN, *arguments], capture_output=True, text=True, check=False)


def test_each_fault_fits_and_compiles() -> None:
    listed = run("--list")
    assert listed.returncode == 0, listed.stderr
    names = listed.stdout.splitlines()
    assert len(names) > 300 and set(GRAVEST) <= set(names)


def test_the_gravest_faults_are_caught() -> None:
    done = run("--quick", "--only", *GRAVEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(GRAVEST)} of {len(GRAVEST)} caught" in done.stdout


def test_a_fault_that_changes_nothing_survives(tmp_path: Path) -> None:
    (tmp_path / "pool.diff").write_text(HARMLESS)
    done = run("--quick", "--faults", tmp_path)
    assert done.returncode == 1
    assert "survived: pool: another name for what is popped" in done.stdout


def test_a_fault_that_fits_no_more_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pool.diff").write_text(HARMLESS.replace("_cached", "_gone"))
    done = run("--list", "--faults", tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert "its old lines occur 0 times; bring pool.diff up to date" in done.stderr


def test_a_fault_that_does_not_compile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pool.diff").write_text(HARMLESS.replace("_nothing = ", "_nothing = ("))
    done = run("--list", "--faults", tmp_path)
    assert done.returncode == 2 and "does not compile" in done.stderr


def test_unknown_names_are_an_error() -> None:
    done = run("--list", "--only", "no such fault")
    assert done.returncode == 2 and "no such fault" in done.stderr
