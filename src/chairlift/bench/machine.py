"""What a comparison was measured on."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil

from chairlift.core.ports import Executor


def machine_info(executor: Executor) -> dict[str, Any]:
    """Processor, cores, threads and instruction set of the runner, memory, system, Python."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": getattr(executor, "threads", None),
        "isa": getattr(executor, "isa", None),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    """The processor's name, as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
