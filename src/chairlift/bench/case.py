"""A measured case: one question about the engine, answered by running loads under several configurations.

A case is a frozen dataclass whose fields are its options. It says which variants to run, what to read from a run, and
what is expected. `chairlift.bench.measure` does the rest in the same way for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from chairlift.bench.trace import Trace
from chairlift.config import EngineConfig
from chairlift.errors import ParameterError
from chairlift.sim.workloads import Workload

if TYPE_CHECKING:  # the command line reads the options of all cases, and is not to load the engine for it
    from chairlift.bench.lab import Lab

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the things that a case compares.

    Fields:
        config: as an operator would give it.
        num_blocks: size of the KV pool in blocks; None for all that the runner reserved.
    """

    label: str
    workload: Workload
    config: EngineConfig
    num_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Column:
    """A number of each run: its name in the JSON, its heading, and its unit in the table."""

    name: str
    head: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """Something expected of the numbers. ``unit`` as in `Column`."""

    text: str
    value: float
    limit: float
    at_most: bool = True
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit


class Case(Protocol):
    """See the module. The docstring of a case is the help of its command."""

    name: ClassVar[str]
    columns: ClassVar[tuple[Column, ...]]
    notes: ClassVar[str]  # how the numbers are defined

    def config(self, base: EngineConfig) -> EngineConfig:
        """What the runner must reserve, for all variants."""
        ...

    def variants(self, lab: Lab, config: EngineConfig, seed: int) -> Sequence[Variant]:
        """What to run. May try something on the lab first, to find settings that suit the machine."""
        ...

    def numbers(self, variant: Variant, trace: Trace) -> Numbers:
        """What is read from a run: a value for each column."""
        ...

    def targets(self, numbers: Mapping[str, Numbers]) -> Sequence[Target]:
        """What is expected, by the numbers of one run of each variant."""
        ...


def whole(name: str, value: int, low: int, high: int) -> int:
    """Checks an option of a case. Raises ParameterError."""
    if not low <= value <= high:
        flag = name.replace("_", "-")
        raise ParameterError(name, f"--{flag} must be a whole number from {low} to {high}, got {value}")
    return value


def rounded_up(tokens: int, block_size: int) -> int:
    """To whole blocks, in tokens."""
    return -(-tokens // block_size) * block_size
