"""What importing each layer loads. import-linter reads the source; this looks at what really happens."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LOAD_ALL = """
import importlib, json, pkgutil, sys
before = set(sys.modules)
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""

ARITHMETIC = {"chairlift._native", "chairlift.models", "chairlift.runners", "torch", "transformers"}


def loaded_by(package: str) -> list[str]:
    """Names of all modules that a fresh interpreter loads with a package and everything in it."""
    done = subprocess.run([sys.executable, "-c", LOAD_ALL, package], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_core_is_standard_library_only() -> None:
    foreign = [
        name
        for name in loaded_by("chairlift.core")
        if name.split(".")[0] not in sys.stdlib_module_names
        and name not in ("chairlift", "chairlift.errors")
        and not (name + ".").startswith("chairlift.core.")
    ]
    assert foreign == []


@pytest.mark.parametrize("package", ["chairlift.core", "chairlift.sim", "chairlift.server"])
def test_the_logic_tower_loads_no_arithmetic(package: str) -> None:
    """Neither runners nor models nor torch: the API process and the simulator stay light."""
    loaded = loaded_by(package)
    assert package in loaded
    heavy = [name for name in loaded if any((name + ".").startswith(part + ".") for part in ARITHMETIC)]
    assert heavy == []


def test_the_check_can_fail() -> None:
    assert "chairlift.models" in loaded_by("chairlift.models")
