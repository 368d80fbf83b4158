"""Logging, set up the same way in the API process and in the engine process, and what a start reports."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(process_name)s: %(message)s"


def get(name: str) -> logging.Logger:
    """The logger of one part of Chairlift."""
    return logging.getLogger(f"chairlift.{name}")


def setup(level: str, process_name: str) -> None:
    """Sends this process's log to stderr, each line marked with ``process_name``."""

    class Formatter(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            record.process_name = process_name
            return super().format(record)

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter(_FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger("chairlift")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def short_bytes(count: int) -> str:
    """A number of bytes for people: "92.1 MiB"."""
    value, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{count} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def exact_bytes(count: int) -> str:
    """The same with the exact number: "92.1 MiB (96,559,104 bytes)"."""
    return f"{count:,} bytes" if abs(count) < 1024 else f"{short_bytes(count)} ({count:,} bytes)"


Report = Callable[[str, "float | None"], None]
"""Told of each phase of a start: (name, None) as it begins, and (name, seconds) as it ends."""


@contextmanager
def phase(name: str, report: Report) -> Iterator[None]:
    """Reports a ``with`` block as a phase; its end only if it succeeded."""
    report(name, None)
    begin = time.perf_counter()
    yield
    report(name, time.perf_counter() - begin)


def process_age() -> float:
    """Seconds since this process was started, including the start of the interpreter; 0 where that is not known."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            started = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, AttributeError):
        return 0.0
