"""Versions of what is installed."""

from __future__ import annotations

import re
from importlib import metadata


def installed(package: str = "chairlift") -> str:
    """A package's version; "not installed" also for Chairlift itself when it runs from its sources."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def required() -> list[str]:
    """The packages that Chairlift needs, without those of extras; empty when it runs from its sources."""
    try:
        requirements = metadata.requires("chairlift") or []
    except metadata.PackageNotFoundError:
        return []
    return sorted(re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in requirements if ";" not in each)
