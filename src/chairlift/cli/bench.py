"""``chairlift bench``: measure the engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chairlift.bench.cases import CASES
from chairlift.cli.options import ModelArgument, config_options
from chairlift.cli.progress import token_progress
from chairlift.config import DEFAULT_MODEL, EngineConfig, option
from chairlift.errors import ChairliftError, ConfigError

if TYPE_CHECKING:
    from chairlift.bench.case import Case
    from chairlift.bench.lab import Lab
    from chairlift.bench.results import Setting

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
    isa: Annotated[
        str, typer.Option(help="Instruction set of the kernels: auto, amx, avx512, avx2, neon or portable.")
    ] = "auto",
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache, e.g. 512MiB. Default: enough to fill every slot.")
    ] = None,
) -> None:
    """Run the same requests through static, continuous and chunked scheduling, and compare."""
    from rich.console import Console

    from chairlift.bench.compare import engine_config, make_bench, make_workload
    from chairlift.bench.lab import check_reps
    from chairlift.bench.report import to_html
    from chairlift.bench.results import parts, to_json, to_table

    check_reps(reps)
    _check_paths(json_path, report)
    workload = make_workload(case, seed=seed, scale=scale)
    base = EngineConfig(model=model, threads=threads, isa=isa, kv_cache_memory=kv_cache_memory)
    config = engine_config(workload, base, chunk_tokens=max_num_batched_tokens)
    with _lab(config, seed=seed, scale=scale) as (lab, setting), token_progress() as show:
        bench = make_bench(lab, workload, config, chunk_tokens=max_num_batched_tokens)
        comparison = bench.compare(reps=reps, progress=show)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOptions:
    """What all cases can be told."""

    json: str | None = option(None, "Write all numbers and the raw records to this file.")
    report: str | None = option(None, "Write an HTML page with the numbers and a timeline of every slot to this file.")
    reps: int = option(1, "Run everything so often, in turns, and take medians.")
    seed: int = option(0, "Seed of the load's lengths and tokens.")
    threads: int | None = option(None, "Threads that compute. Default: the processors this process may use.")
    isa: str = option("auto", "Instruction set of the kernels: auto, amx, avx512, avx2, neon or portable.")
    kv_cache_memory: str | None = option(None, "Memory for the KV cache, e.g. 512MiB. Default: as for serve.")


def _case_command(kind: type[Case]) -> Callable[..., None]:
    """The command of a case: its own options, and those of all."""

    def command(case: Any, options: CaseOptions, model: ModelArgument = DEFAULT_MODEL) -> None:
        _run_case(case, options, model)

    command.__annotations__["case"] = kind
    return config_options(command)


for _kind in CASES:
    app.command(_kind.name, help=_kind.__doc__)(_case_command(_kind))


def _run_case(case: Case, options: CaseOptions, model: str) -> None:
    from rich.console import Console

    from chairlift.bench.case_report import to_html
    from chairlift.bench.case_results import to_json, to_table, to_text
    from chairlift.bench.lab import check_reps
    from chairlift.bench.measure import measure

    check_reps(options.reps)
    json_path, report = (Path(name) if name else None for name in (options.json, options.report))
    _check_paths(json_path, report)
    base = EngineConfig(model=model, threads=options.threads, isa=options.isa, kv_cache_memory=options.kv_cache_memory)
    config = case.config(base)
    with _lab(config, seed=options.seed, scale=1.0) as (lab, setting), token_progress() as show:
        measured = measure(case, lab, config, seed=options.seed, reps=options.reps, progress=show)
    console = Console()
    console.print(to_table(measured))
    console.print(to_text(measured))
    if json_path:
        json_path.write_text(json.dumps(to_json(measured, setting, lab.capacity)), encoding="utf-8")
        console.print(f"numbers: {json_path}", highlight=False)
    if report:
        report.write_text(to_html(measured, setting, lab.capacity), encoding="utf-8")
        console.print(f"report: {report}", highlight=False)


@contextmanager
def _lab(config: EngineConfig, *, seed: int, scale: float) -> Iterator[tuple[Lab, Setting]]:
    """A lab on a runner that is started, and closed at the end."""
    from chairlift import models
    from chairlift.bench.lab import make_lab
    from chairlift.bench.machine import machine_info
    from chairlift.bench.results import Setting
    from chairlift.cli.progress import download_progress
    from chairlift.engine_main import make_scheduler, start_runner
    from chairlift.versions import installed

    with download_progress() as progress:
        models.resolve(config.model, progress=progress)
    executor, capacity = start_runner(config)
    try:
        vocab_size = models.load_tokenizer(config.model).vocab_size
        name = Path(config.model).name if Path(config.model).exists() else config.model
        setting = Setting(name, seed, scale, installed(), machine_info(executor))
        yield make_lab(executor, capacity, make_scheduler, vocab_size=vocab_size, seed=seed), setting
    finally:
        executor.close()
