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


@dataclass(frozen=True, slots=True)
class Pin:
    """The KV of these tokens, the beginning of prompts of all tenants, is computed now and stays."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inspect:
    """A question: what about this request, or, without an id, all that live? `Sink.answer` gets the reply."""

    question: int
    request_id: str | None = None


Message = Add | Abort | Pin | Inspect


@dataclass(frozen=True, slots=True)
class RequestView:
    """A live sequence, for a person.

    Fields:
        state: waiting, running or preempted.
        position: about how many board before it, counting from 1; None while it runs.
        reason: for want of what it waits (`chairlift.core.recorder` explains the words), None while it runs.
        waited: seconds since it was added.
        estimated_start: seconds until it boards, by how fast the queue moved lately; None if not known.
        num_blocks: KV blocks it holds on the device; num_host_blocks in host memory or on disk.
    """

    id: str
    index: int
    state: str
    tenant: str
    priority: int
    num_prompt: int
    num_output: int
    num_computed: int
    num_blocks: int
    num_host_blocks: int
    num_preemptions: int
    waited: float
    position: int | None = None
    reason: str | None = None
    estimated_start: float | None = None


@dataclass(frozen=True, slots=True)
class LifeLine:
    """One line of a request's life. ``seconds`` from its arrival; steps ``step .. last_step`` if it spans several."""

    seconds: float
    step: int
    last_step: int
    index: int
    what: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to `Inspect`: the live sequences, the running in boarding order and then the waiting in the queue's,
    and of one that was asked for by id, also its life as far as the flight recorder reaches back."""

    question: int
    requests: tuple[RequestView, ...] = ()
    life: tuple[LifeLine, ...] = ()


class Executor(Protocol):
    """Runs plans, in the order submitted. `submit` and `result` may raise `chairlift.errors.StepFailed`."""

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
    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        """New messages. Returns at once while the engine has work; when ``idle``, may wait for the first (a wall
        clock waits a bounded time, a virtual one jumps to the next arrival), but not beyond ``until``, a time of the
        engine's clock."""
        ...


class Sink(Protocol):
    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        """Takes a step's outputs; must not block for long, since the engine waits."""
        ...

    def answer(self, report: Report) -> None:
        """Takes the reply to an `Inspect`."""
        ...


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, from an arbitrary but fixed origin; never goes back."""
        ...
