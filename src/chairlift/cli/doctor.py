"""``chairlift doctor``: what the engine finds on this machine, and what quantisation costs a model."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated, Any

import typer

from chairlift.cli.options import config_options
from chairlift.config import EngineConfig
from chairlift.config_checks import flag
from chairlift.errors import ChairliftError, ConfigError


@partial(config_options, only=("model", "quantization", "kv_cache_dtype", "threads", "isa"))
def doctor(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, e.g. for a report of a fault.")
    ] = False,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality",
            help="Measure how well the model predicts an English text: as it runs with the options below, and with "
            "weights and KV in f32. Takes up to minutes, and the memory of the weights in f32.",
        ),
    ] = False,
    engine_config: EngineConfig,
) -> None:
    """Show versions, processor, threads, instruction set, memory and models as the engine finds them here.

    Exit code 1, and what to do about it, if the engine could not run.
    """
    import json

    if not quality:
        _check_no_options(engine_config)
    found = examine()
    lines = _lines(found)
    width = max(map(len, lines))
    if not as_json:
        for name, text in lines.items():
            print(f"{name:{width}}  {text}", flush=True)
    if quality and not found["problems"]:
        try:
            found["quality"] = compare_quality(engine_config)
        except (ChairliftError, MemoryError, OSError) as error:  # what was found until then is still worth printing
            found["problems"].append(str(error) or type(error).__name__)
    if "quality" in found and not as_json:
        print(f"{'quality':{width}}  {_quality_line(found['quality'])}")
    if as_json:
        print(json.dumps(found, indent=2))
    for problem in found["problems"]:
        typer.echo(f"error: {problem}", err=True)
    if found["problems"]:
        raise typer.Exit(1)


def _check_no_options(config: EngineConfig) -> None:
    for field in dataclasses.fields(config):
        if getattr(config, field.name) != field.default:
            raise ConfigError(f"{flag(field.name)} has no effect without --quality; add it")


def compare_quality(config: EngineConfig) -> dict[str, Any]:
    """The perplexity of the bundled text for the model as it runs, and in f32, as plain data."""
    from chairlift.cli.progress import token_progress
    from chairlift.cli.session import fetch
    from chairlift.quality import bundled_text, measure, unquantized

    fetch(config.model)
    text = bundled_text()
    with token_progress() as show:
        runs = measure(config, text, partial(show, "as it runs"))
        plain = measure(unquantized(config), text, partial(show, "in f32"))
    return {
        "model": config.model,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "tokens": runs.tokens,
        "perplexity": runs.perplexity,
        "perplexity_f32": plain.perplexity,
        "difference_percent": 100 * (runs.perplexity / plain.perplexity - 1),
        "seconds": runs.seconds,
        "seconds_f32": plain.seconds,
    }


def _quality_line(quality: dict[str, Any]) -> str:
    return (
        f"{quality['model']}: perplexity {quality['perplexity']:.3f} as it runs, "
        f"{quality['perplexity_f32']:.3f} in f32, {quality['difference_percent']:+.2f} %; "
        f"{quality['tokens']:,} tokens, {quality['seconds']:.1f} s and {quality['seconds_f32']:.1f} s"
    )


def examine() -> dict[str, Any]:
    """What `doctor` shows, as plain data; sizes in bytes. Nothing is loaded or fetched."""
    import os
    import platform

    import psutil

    from chairlift.bench.machine import cpu_model
    from chairlift.models import KNOWN
    from chairlift.models.fetch import stored
    from chairlift.runners.memory import DEFAULT_UTILIZATION, available_cpus, available_memory
    from chairlift.versions import installed, required

    isas, problems = _instruction_sets()
    models = {name: stored(known) for name, known in KNOWN.items()}
    return {
        "chairlift": installed(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": cpu_model(),
        "processors": os.cpu_count(),
        "threads": available_cpus(),
        "isa": isas[0] if isas else None,
        "isas": isas,
        "memory": psutil.virtual_memory().total,
        "memory_free": (free := available_memory()),
        "memory_usable": int(free * DEFAULT_UTILIZATION),
        "models": {name: path and str(path) for name, path in models.items()},
        "libraries": {name: installed(name) for name in required()},
        "problems": problems,
    }


def _instruction_sets() -> tuple[list[str], list[str]]:
    """Those that can be used, best first, and what is wrong with the extension that holds the kernels."""
    try:
        from chairlift import _native
    except ImportError as error:
        return [], [f"the C++ extension does not load ({error}); install chairlift again, for this Python"]
    return list(_native.available_isas()), []


def _lines(found: dict[str, Any]) -> dict[str, str]:
    from chairlift.log import short_bytes

    others = ", ".join(found["isas"][1:]) or "none"
    return {
        "chairlift": f"{found['chairlift']}, Python {found['python']}, {found['system']}",
        "processor": found["processor"],
        "threads": f"{found['threads']} of {found['processors']} processors (--threads)",
        "instruction set": f"{found['isa'] or 'none'}; others that work here: {others} (--isa)",
        "memory": f"{short_bytes(found['memory_free'])} free of {short_bytes(found['memory'])}, of which "
        f"{short_bytes(found['memory_usable'])} may be used (--gpu-memory-utilization)",
        **{f"model {name}": path or f"not here: chairlift pull {name}" for name, path in found["models"].items()},
        "libraries": ", ".join(f"{name} {version}" for name, version in found["libraries"].items())
        or "not known, as this is not an installed Chairlift",
    }
