"""What a comparison runs on: the processor, its limits in the same run, and who else used it meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUIET_IDLE = 0.9  # share of the processor that is idle when nobody else works


def limits(threads: int) -> dict[str, float] | str:
    """What benchmarks/kernels.py finds: multiply-adds/s by kind, and bytes/s of "stream"; or why it could not."""
    import kernels

    try:
        found = kernels.measure("auto", threads, out=1536, inner=576, seconds=0.1)["limit"]
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not measured: {error}"
    return {name: float(value) for name, value in found.items()}


def describe() -> dict[str, str | int]:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    system = f"{platform.system()} {platform.machine()}"
    return {"cpu": names[0] if names else platform.machine(), "cores": len(os.sched_getaffinity(0)), "system": system}


def wait_until_quiet(seconds: float) -> None:
    """Returns once the processor was idle for half a second, or after the given time."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        with shares() as seen:
            time.sleep(0.5)
        if seen.get("idle", 1.0) > QUIET_IDLE:
            return


@contextmanager
def shares() -> Iterator[dict[str, float]]:
    """Filled at the end: shares of the processor's time that were idle, stolen by other machines on the same host, or
    used by processes of lower priority, such as builds."""
    seen: dict[str, float] = {}
    before = _times()
    yield seen
    spent = {name: value - before[name] for name, value in _times().items()}
    total = max(1, spent.pop("total", 0))
    seen.update({name: value / total for name, value in spent.items()})


def _times() -> dict[str, int]:
    for line in _lines("/proc/stat"):
        user, nice, system, idle, iowait, irq, soft, steal = map(int, line.split()[1:9])
        total = user + nice + system + idle + iowait + irq + soft + steal
        return {"idle": idle + iowait, "nice": nice, "steal": steal, "total": total}
    return {}


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text(errors="replace").splitlines() if file.exists() else []
