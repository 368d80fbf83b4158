"""``chairlift doctor``: what the engine finds on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def doctor(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, e.g. for a report of a fault.")
    ] = False,
) -> None:
    """Show versions, processor, threads, instruction set, memory and models as the engine finds them here.

    Exit code 1, and what to do about it, if the engine could not run.
    """
    import json

    found = examine()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        lines = _lines(found)
        width = max(map(len, lines))
        for name, text in lines.items():
            print(f"{name:{width}}  {text}")
    for problem in found["problems"]:
        typer.echo(f"error: {problem}", err=True)
    if found["problems"]:
        raise typer.Exit(1)


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
