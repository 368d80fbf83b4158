"""Small faults in the engine's core, to be caught by its tests.

They are written down in ``faults/``: one file for each module of ``chairlift.core``, in it hunks like those of a patch
but without line numbers. Each begins with a line ``@ name``; lines with a space or a minus in front are what the module
says, and those with a space or a plus are what it is made to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FAULTS = Path(__file__).parent / "faults"


class OutOfDate(Exception):
    """A fault does not fit its module any more; the message says which, and what to change."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in ``module``, a file's name without its end, the lines ``old`` become ``new``."""

    module: str
    title: str
    old: str
    new: str

    @property
    def name(self) -> str:
        return f"{self.module}: {self.title}"

    def apply(self, source: str) -> str:
        """The module with the fault in it. Raises `OutOfDate` unless the old lines are there once and it compiles."""
        count = f"\n{source}".count(f"\n{self.old}")
        if not self.old or count != 1 or self.old == self.new:
            raise OutOfDate(f"{self.name}: its old lines occur {count} times; bring {self.module}.diff up to date")
        mutated = f"\n{source}".replace(f"\n{self.old}", f"\n{self.new}")[1:]
        try:
            compile(mutated, f"{self.module}.py", "exec")
        except SyntaxError as error:
            raise OutOfDate(f"{self.name}: does not compile, {error}; correct {self.module}.diff") from error
        return mutated


def read_mutants(faults: Path = FAULTS) -> list[Mutant]:
    """All faults of a folder, module by module. Raises `OutOfDate` for a name that is there twice."""
    mutants = [mutant for path in sorted(faults.glob("*.diff")) for mutant in _parse(path.stem, path.read_text())]
    names = [mutant.name for mutant in mutants]
    for name in names:
        if names.count(name) > 1:
            raise OutOfDate(f"two faults have the name {name!r}; rename one")
    return mutants


def _parse(module: str, text: str) -> list[Mutant]:
    mutants = []
    for hunk in f"\n{text}".split("\n@ ")[1:]:
        title, *lines = hunk.splitlines(keepends=True)
        marked = [line if line.strip() else " \n" for line in lines]  # editors strip lines without text
        while marked and marked[-1] == " \n":  # between hunks
            marked.pop()
        old = "".join(line[1:] for line in marked if line[0] in " -")
        new = "".join(line[1:] for line in marked if line[0] in " +")
        mutants.append(Mutant(module, title.strip(), old, new))
    return mutants
