"""The command: installs, measures in rounds, prints and writes. Usage: see benchmarks/peers.py."""

from __future__ import annotations

import argparse
import datetime
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from peers import machine, quality
from peers.engines import ENGINES, THREADS, Context, Engine, Starter
from peers.figures import measure
from peers.install import Installer, Unavailable
from peers.limit import ModelCosts, Work
from peers.processes import Running
from peers.results import Results, Row, Run
from peers.workloads import Workload, all_workloads

MODEL = "smollm2-135m"
REST_SECONDS = 10.0  # after an engine has ended: a virtual machine gives its memory back, which takes processors
ABOUT_MODEL = Path(__file__).with_name("inside") / "model.py"


def parse(arguments: Sequence[str] | None, description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, with commas between; default: all")
    parser.add_argument(
        "--workloads", default=",".join(all_workloads()), help="names, with commas between; default: all"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of all engines, in turn")
    parser.add_argument("--scale", type=float, default=1.0, help="share of each workload, for a quick look")
    tries = "one more row: an engine with more arguments, such as 'llamacpp-q8_0=-ub 256'; may be given again"
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="ENGINE=ARGUMENTS", help=tries)
    parser.add_argument("--output", type=Path, default=Path("build/peers"), help="writes OUTPUT.json and OUTPUT.md")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/chairlift-peers"), help="what the peers need")
    parser.add_argument("--model", default=MODEL, help="a GGUF file in Q4_1, or its name")
    parser.add_argument("--chairlift-python", default=sys.executable, help="the interpreter that has Chairlift")
    parser.add_argument(
        "--quiet-wait",
        type=float,
        default=15.0,
        help="seconds to wait at most for an idle machine, and after an engine",
    )
    parser.add_argument("--no-limits", action="store_true", help="do not measure the limits of the machine")
    args = parser.parse_args(arguments)
    for given, known in ((args.engines, ENGINES), (args.workloads, all_workloads())):
        for name in set(given.split(",")) - set(known):
            parser.error(f"there is no {name!r}; there are {', '.join(known)}")
    for name in {text.partition("=")[0] for text in args.tries} - set(ENGINES):
        parser.error(f"--try: there is no engine {name!r}")
    if args.rounds < 1 or not 0 < args.scale <= 1:
        parser.error("--rounds must be at least 1, and --scale above 0 and at most 1")
    return args


def main(description: str, arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments, description)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended
    engines = [ENGINES[name] for name in args.engines.split(",")]
    engines += [ENGINES[name].with_arguments(more) for name, _, more in (text.partition("=") for text in args.tries)]
    workloads = [all_workloads()[name].scaled(args.scale) for name in args.workloads.split(",")]
    ask = [args.chairlift_python, str(ABOUT_MODEL), args.model]
    about = json.loads(subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout)
    model, costs = Path(about.pop("path")), ModelCosts(**about)
    cache = args.cache.expanduser()
    comparison = Comparison(
        Context(Installer(cache, model), model, args.chairlift_python), engines, workloads, cache / "logs", args.output
    )
    arriving = [name for name in all_workloads() if name.startswith("W-rate")]
    comparison.results.works = {w.name: Work.of(w, costs) for w in workloads if w.name not in arriving}
    comparison.results.setting = {
        "model": model.name,
        "date": datetime.date.today().isoformat(),
        "machine": machine.describe(),
        "rounds": args.rounds,
        "scale": args.scale,
    }
    comparison.run(args.rounds, args.quiet_wait, limits=not args.no_limits)
    print(comparison.results.as_markdown())


class Comparison:
    """Measures engines in turn, and writes what is known after each measurement."""

    def __init__(
        self, context: Context, engines: list[Engine], workloads: list[Workload], logs: Path, output: Path
    ) -> None:
        rows = [Row(engine.name, engine.setting, engine.own, engine.exact) for engine in engines]
        self.results = Results(rows, [workload.name for workload in workloads])
        self._context = context
        self._engines = engines
        self._workloads = workloads
        self._logs = logs
        self._output = output
        self._quiet_wait = 0.0

    def run(self, rounds: int, quiet_wait: float, *, limits: bool) -> None:
        self._quiet_wait = quiet_wait
        self._logs.mkdir(parents=True, exist_ok=True)
        starters = self._prepare()
        self._measure_limits(limits)
        for round_ in range(rounds):
            first = round_ % max(1, len(starters))  # nobody is always measured after the same neighbour
            for name, start in starters[first:] + starters[:first]:
                self._stay(name, start, round_)
        self._measure_limits(limits)
        self._write()

    # -- inside

    def _prepare(self) -> list[tuple[str, Starter]]:
        """Installs everything first, so that no build runs beside a measurement."""
        starters = []
        for engine in self._engines:
            try:
                starters.append((engine.name, engine.starter(self._context)))
            except Unavailable as error:
                self._problem(engine.name, "", error)
        return starters

    def _stay(self, name: str, start: Starter, round_: int) -> None:
        """One engine's turn: started once for each number of slots, ended after its workloads."""
        for slots in sorted({workload.slots for workload in self._workloads}, reverse=True):
            log = self._logs / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}-{slots}.log"
            try:
                with start(slots, log) as engine:
                    if name not in self.results.agreement:
                        self._check_quality(name, engine)
                    for workload in self._workloads:
                        if workload.slots == slots:
                            self._measure(name, engine, workload, round_)
            except Exception as error:  # whatever it is, the other engines go on, and the table says so
                self._problem(name, "", error)
            time.sleep(min(REST_SECONDS, self._quiet_wait))

    def _check_quality(self, name: str, engine: Running) -> None:
        try:
            agreement = f"text: {quality.check(engine, self._context.installer.reference())}"
        except Unavailable as error:
            agreement = f"text not compared: {error}"
        self.results.agreement[name] = agreement
        print(f"{name}, {agreement}", file=sys.stderr, flush=True)

    def _measure(self, name: str, engine: Running, workload: Workload, round_: int) -> None:
        salted = workload.salted(round_)
        try:
            engine.answer(workload.warm_up().requests)
            machine.wait_until_quiet(self._quiet_wait)
            with machine.shares() as shares:
                answers = engine.answer(salted.requests)
            figures = measure(salted, answers)
        except Exception as error:
            self._problem(name, workload.name, error)
            return
        self.results.runs.append(Run(name, workload.name, round_, figures, shares))
        self._write()
        shown = ", ".join(f"{key} {value:.3g}" for key, value in figures.items())
        print(f"round {round_ + 1}, {name}, {workload.name}: {shown}", file=sys.stderr, flush=True)

    def _problem(self, name: str, workload: str, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        print(f"{name} {workload}: {reason}", file=sys.stderr, flush=True)
        if (name, workload, reason) not in self.results.problems:
            self.results.problems.append((name, workload, reason))

    def _measure_limits(self, wanted: bool) -> None:
        if wanted:
            self.results.limits.append(machine.limits(int(THREADS)))

    def _write(self) -> None:
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.with_name(self._output.name + ".json").write_text(
            json.dumps(self.results.as_json(), indent=1) + "\n"
        )
        self._output.with_name(self._output.name + ".md").write_text(self.results.as_markdown())
