"""What the engine needs from outside: something that computes, messages in, outputs out, and the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chairlift.core.plan import Capacity, Output, StepPlan, StepResult, StepStats
from chairlift.core.request import Request


@dataclass(frozen=True, slots=True)
class Add:
    """A new request boards the queue."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """A request and all its samples end now (``index`` None), or one sample does. Unknown ids are ignored."""

    request_id: str
    index: int | None = None


Message = Add | Abort


class Executor(Protocol):
    """Runs plans, in the order submitted."""

    def start(self) -> Capacity:
        """Loads and reserves everything; nothing is allocated later."""
        ...

    def submit(self, plan: StepPlan) -> Any:
        """Begins a step and returns a handle for `result`. May return at once, or only when the step is done."""
        ...

    def result(self, handle: Any) -> StepResult:
        """Waits for the step of this handle."""
        ...

    def close(self) -> None: ...


class Source(Protocol):
    def take(self, idle: bool) -> Sequence[Message]:
        """New messages. Returns at once while the engine has work; when ``idle``, may wait for the first (a wall
        clock waits a bounded time, a virtual one jumps to the next arrival)."""
        ...


class Sink(Protocol):
    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        """Takes a step's outputs; must not block for long, since the engine waits."""
        ...


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, from an arbitrary but fixed origin; never goes back."""
        ...
