"""``chairlift bench``: measure the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.cli.options import ModelArgument
from chairlift.config import DEFAULT_MODEL, EngineConfig
from chairlift.errors import ChairliftError, ConfigError

if TYPE_CHECKING:
    from chairlift.bench.compare import Comparison, Progress
    from chairlift.bench.results import Setting
    from chairlift.sim.workloads import Workload

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure the engine."""


@app.command()
def compare(
    model: ModelArgument = DEFAULT_MODEL,
    case: Annotated[
        str,
        typer.Option(
            help="four-requests: A to D in a batch of four, E and F wait. peak: 50, then 80 clients, 32 slots."
        ),
    ] = "four-requests",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers and the raw records to this file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML page with the numbers and a timeline of every slot to this file.")
    ] = None,
    reps: Annotated[int, typer.Option(help="Run everything so often, in turns, and take medians.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the load's lengths and tokens.")] = 0,
    scale: Annotated[
        float,
        typer.Option(help="peak only: multiplies all lengths. Below 1 for a quick look, above for a fast machine."),
    ] = 1.0,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Most tokens of a step under chunked. The others need a budget for whole prompts.")
    ] = 512,
    threads: Annotated[
        int | None, typer.Option(help="Threads that compute. Default: the processors this process may use.")
    ] = None,
    isa: Annotated[str, typer.Option(help="Instruction set of the kernels: auto, avx2 or portable.")] = "auto",
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache, e.g. 512MiB. Default: enough to fill every slot.")
    ] = None,
) -> None:
    """Run the same requests through static, continuous and chunked scheduling, and compare."""
    from rich.console import Console

    from chairlift.bench.compare import check_reps, engine_config, make_workload
    from chairlift.bench.report import to_html
    from chairlift.bench.results import parts, to_json, to_table

    check_reps(reps)
    _check_paths(json_path, report)
    workload = make_workload(case, seed=seed, scale=scale)
    base = EngineConfig(model=model, threads=threads, isa=isa, kv_cache_memory=kv_cache_memory)
    config = engine_config(workload, base, chunk_tokens=max_num_batched_tokens)
    comparison, setting = _measure(workload, config, max_num_batched_tokens, seed=seed, scale=scale, reps=reps)
    console = Console()
    for part in parts(comparison):
        console.print(to_table(part))
    if json_path:
        json_path.write_text(json.dumps(to_json(comparison, setting)), encoding="utf-8")
        console.print(f"numbers: {json_path}", highlight=False)
    if report:
        report.write_text(to_html(comparison, setting), encoding="utf-8")
        console.print(f"report: {report}", highlight=False)
    if not comparison.identical:
        raise ChairliftError("some requests got other tokens under another policy, which must never happen")


def _check_paths(json_path: Path | None, report: Path | None) -> None:
    """Before minutes are spent on numbers that could not be written."""
    for flag, path in (("--json", json_path), ("--report", report)):
        if path and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"{flag} must name a file in a folder that exists, got {path}")
    if report and report.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--report writes HTML, so its name must end in .html, got {report}")


def _measure(
    workload: Workload, config: EngineConfig, chunk_tokens: int, *, seed: int, scale: float, reps: int
) -> tuple[Comparison, Setting]:
    from chairlift import models
    from chairlift.bench.compare import make_bench
    from chairlift.bench.machine import machine_info
    from chairlift.bench.results import Setting
    from chairlift.cli.progress import download_progress
    from chairlift.engine_main import start_runner

    with download_progress() as progress:
        models.resolve(config.model, progress=progress)
    executor, capacity = start_runner(config)
    try:
        bench = make_bench(
            executor,
            capacity,
            workload,
            vocab_size=models.load_tokenizer(config.model).vocab_size,
            seed=seed,
            whole_tokens=config.max_num_batched_tokens or capacity.max_model_len,
            chunk_tokens=chunk_tokens,
        )
        with _bars() as show:
            comparison = bench.compare(reps=reps, progress=show)
        name = Path(config.model).name if Path(config.model).exists() else config.model
        return comparison, Setting(name, seed, scale, _version(), machine_info(executor))
    finally:
        executor.close()


@contextmanager
def _bars() -> Iterator[Progress]:
    """A bar on stderr for each run. Redrawn rarely: what draws takes time from what is measured."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeElapsedColumn(),
    )
    tasks = {}
    with Bars(*columns, console=Console(stderr=True), refresh_per_second=2) as bars:

        def show(run: str, done: int, total: int) -> None:
            if run not in tasks:
                tasks[run] = bars.add_task(run, total=total)
            bars.update(tasks[run], completed=done)

        yield show


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("chairlift")
    except PackageNotFoundError:  # run from a source tree
        return "not installed"
