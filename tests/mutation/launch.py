"""Runs tests with a ``chairlift.core`` from another folder; all else is what the environment offers.

    python launch.py FOLDER pytest ARGUMENTS ...
    python launch.py FOLDER SCRIPT ARGUMENTS ...

The last line printed names the first test that failed, if one did.
"""

from __future__ import annotations

import contextlib
import resource
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import Phase, settings

MOST_MEMORY = 4 << 30  # bytes; a fault may fill it


class CoreFinder(MetaPathFinder):
    """Finds ``chairlift.core`` in a folder, before any other finder is asked, such as that of an editable install."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "chairlift.core":
            return spec_from_file_location(
                name, self._folder / "__init__.py", submodule_search_locations=[str(self._folder)]
            )
        if name.startswith("chairlift.core."):
            return spec_from_file_location(name, self._folder / f"{name.rpartition('.')[2]}.py")
        return None


class FirstFailure:
    """A pytest plugin that remembers it."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.name:
            self.name = report.nodeid


def main() -> int:
    folder, what, *arguments = sys.argv[1:]
    with contextlib.suppress(ValueError, OSError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    sys.meta_path.insert(0, CoreFinder(Path(folder)))
    if what != "pytest":
        sys.argv = [what, *arguments]
        runpy.run_path(what, run_name="__main__")
        return 0
    # What fails need not be made small.
    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None, derandomize=True)
    settings.load_profile("mutants")
    first = FirstFailure()
    code = pytest.main(arguments, plugins=[first])
    print(first.name)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
