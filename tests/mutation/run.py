"""Mutation check: puts each fault of ``faults/`` into a copy of the engine's core, and sees whether the tests notice.

    python tests/mutation/run.py [--only TEXT ...] [--quick] [--jobs N] [--list] [--faults FOLDER]

Nothing in the repository is changed. A fault is caught when a test fails, or does not end in time. Exit code: 0 if all
were caught, 1 if one survived, 2 if nothing can be said (a fault that fits no more, tests that fail without any).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutants import FAULTS, Mutant, OutOfDate, read_mutants

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "src" / "chairlift" / "core"
TESTS = ROOT / "tests" / "core"
LAUNCH = Path(__file__).with_name("launch.py")
WORKLOADS = TESTS / "test_invariance.py"
WORLDS = ROOT / "tests" / "simulation" / "test_worlds.py"
NEAR = {
    "batch": ("policy", "scheduler", "depth"),
    "boarding": ("shares", "order", "preemption", "policy", "pace", "recorder", "own_policy", "gates"),
    "gates": ("policy", "promises", "gates"),
    "kv": ("kv", "tiers", "windows", "promises", "preemption"),
    "own_policy": ("own_policy",),
    "layout": ("kv", "windows", "promises", "beams"),
    "planner": ("scheduler", "policy", "pace", "preemption", "shares"),
    "prefix": ("kv",),
    "request": ("request", "scheduler", "deadlines"),
    "scheduler": ("scheduler", "policy", "deadlines", "delay", "failures", "beams"),
    "searches": ("beams",),
    "sequences": ("scheduler", "shares", "beams", "failures"),
}
"""Where the tests of a module are, if not in the one file of its name."""

FOUND = ("mutants_found", "found")
"""Tests of faults that others once missed."""

SLOW = ("windows", "beams", "failures", "depth", "progress", "kv_machine", "gates")
SECONDS_A_TEST = 60  # each takes a few at most


@dataclass(frozen=True, slots=True)
class Stage:
    """Something that may catch a fault. ``command`` is what `launch` runs, ``limit`` its time in seconds."""

    command: Sequence[str]
    limit: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a fault; ``by`` caught it, or is empty."""

    mutant: Mutant
    by: str
    seconds: float


def unit_tests(names: Sequence[str]) -> list[Stage]:
    """Tests of the core. Without what a report is good for: it takes longer than most of them."""
    options = ["-x", "-q", "--no-header", "--tb=no", "--assert=plain", "-p", "no:cacheprovider"]
    options += [f"--confcutdir={TESTS}", f"--timeout={SECONDS_A_TEST}"]
    files = [str(path) for name in names if (path := TESTS / f"test_{name}.py").exists()]
    return [Stage(["pytest", *options, *files], 900)] if files else []


def random_runs(script: Path, count: int) -> Stage:
    """The first seeds of a campaign."""
    return Stage([str(script), *map(str, range(count))], 120 + count)


def stages(modules: Sequence[str], quick: bool) -> list[Stage]:
    """What may catch a fault of these modules: the tests near them, random workloads, all other tests, and
    random worlds."""
    if quick:
        return [random_runs(WORKLOADS, 60), *unit_tests(modules)]
    near = list(dict.fromkeys([name for module in modules for name in NEAR.get(module, (module,))] + [*FOUND]))
    names = sorted(path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py") if path != WORKLOADS)
    others = sorted((name for name in names if name not in near), key=lambda name: name in SLOW)
    return [*unit_tests(near), random_runs(WORKLOADS, 200), *unit_tests(others), random_runs(WORLDS, 100)]


def caught_by(stage: Stage, core: Path) -> str:
    """Which of the stage's tests fails with this core; empty if none does."""
    command = [sys.executable, str(LAUNCH), str(core), *stage.command]
    what = Path(stage.command[0]).stem
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=stage.limit, check=False)
    except subprocess.TimeoutExpired:
        return f"{what}: not done after {stage.limit:.0f} s"
    if done.returncode == 0:
        return ""
    if what == "pytest":
        name = (done.stdout.splitlines() or [""])[-1]
        return name.removeprefix("tests/core/") or f"pytest: exit code {done.returncode}"
    seeds = re.findall(r"^(?:seed )?(\d+)", done.stdout, re.MULTILINE)  # of runs that went well
    error = (done.stderr.strip().splitlines() or ["killed"])[-1]
    return f"{what}, seed {int(seeds[-1]) + 1 if seeds else 0}: {error[:60]}"


def judge(mutant: Mutant, core: Path, quick: bool) -> Verdict:
    """Puts the fault into a copy of the core, and lets one stage after the other try to catch it."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "core"
        shutil.copytree(core, copy)
        path = copy / f"{mutant.module}.py"
        path.write_text(mutant.apply(path.read_text()))
        by = next(filter(None, (caught_by(stage, copy) for stage in stages([mutant.module], quick))), "")
    return Verdict(mutant, by, time.monotonic() - begin)


def select(mutants: Sequence[Mutant], only: Sequence[str]) -> list[Mutant]:
    """Those whose names contain one of the texts."""
    for text in only:
        if not any(text in mutant.name for mutant in mutants):
            raise OutOfDate(f"no fault has {text!r} in its name; see --list")
    return [mutant for mutant in mutants if not only or any(text in mutant.name for text in only)]


def run(mutants: Sequence[Mutant], core: Path, quick: bool, jobs: int) -> int:
    for stage in stages(sorted({mutant.module for mutant in mutants}), quick):
        if by := caught_by(stage, core):
            print(f"the tests fail without any fault: {by}", file=sys.stderr)
            return 2
    survivors = []
    with ThreadPoolExecutor(jobs) as pool:
        for verdict in pool.map(lambda mutant: judge(mutant, core, quick), mutants):
            print(f"{verdict.mutant.name:<78} {verdict.seconds:6.1f} s  {verdict.by or 'SURVIVED'}", flush=True)
            if not verdict.by:
                survivors.append(verdict.mutant.name)
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} caught", *survivors, sep="\nsurvived: ")
    return 1 if survivors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation check of chairlift.core")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="faults with one of these in their name")
    parser.add_argument("--quick", action="store_true", help="only the module's own tests and a few workloads")
    parser.add_argument("--jobs", type=int, default=1, help="so many at once")
    parser.add_argument("--list", action="store_true", help="check that each fault fits, and print the names")
    parser.add_argument("--faults", type=Path, default=FAULTS, help="where the faults are written down")
    options = parser.parse_args()
    try:
        mutants = select(read_mutants(options.faults), options.only)
        with tempfile.TemporaryDirectory(prefix="core-") as folder:
            core = Path(folder) / "core"  # as it is now, though somebody may be editing it
            shutil.copytree(CORE, core, ignore=shutil.ignore_patterns("__pycache__"))
            for mutant in mutants:
                mutant.apply((core / f"{mutant.module}.py").read_text())
            if options.list:
                print(*(mutant.name for mutant in mutants), sep="\n")
                return 0
            return run(mutants, core, options.quick, options.jobs)
    except OutOfDate as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
