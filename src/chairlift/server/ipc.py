"""What the API process and the engine process say to each other: msgpack over one local ZeroMQ socket per engine.

Each message carries the epoch of the engine it belongs to. A new engine gets the next epoch and a new socket, so a
message that was under way when an engine died can never be taken for one of its successor's.

| message | direction       | meaning                                                            |
|---------|-----------------|--------------------------------------------------------------------|
| Add     | API to engine   | a new request                                                      |
| Abort   | API to engine   | end a request, or one sample of it                                 |
| Inspect | API to engine   | a question: what lives, or how has this request fared              |
| Pin     | API to engine   | compute the KV of this beginning of prompts, and keep it           |
| Stop    | API to engine   | finish the step, release everything, exit 0                        |
| Phase   | engine to API   | a phase of the start began (seconds None) or ended                 |
| Ready   | engine to API   | the model is loaded, and this is what was reserved                 |
| Outputs | engine to API   | one step's news, and the engine's state after it                   |
| Answer  | engine to API   | the reply to an Inspect                                            |
| Failed  | engine to API   | the engine cannot start or go on; it exits with 1 after this       |
"""

from __future__ import annotations

import signal

import msgspec

from chairlift.config import EngineConfig
from chairlift.core import ports
from chairlift.core.layout import most_held
from chairlift.core.plan import Capacity, Output, StepStats
from chairlift.core.request import Request

DUMP_SIGNAL = signal.SIGUSR1
"""Has an engine print the stacks of all its threads, whatever they do. A byte on its stdin asks for the steps, too."""


class Launch(msgspec.Struct, frozen=True):
    """The first line on an engine's stdin, as JSON. Later each byte asks what it is doing, and the end of the pipe says
    that the parent is gone."""

    endpoint: str
    epoch: int
    parent_pid: int
    log_level: str
    config: EngineConfig


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages on the socket."""

    epoch: int


class Add(Message, frozen=True):
    request: Request


class Abort(Message, frozen=True):
    request_id: str
    index: int | None = None


class Inspect(Message, frozen=True):
    question: int
    request_id: str | None = None


class Pin(Message, frozen=True):
    token_ids: tuple[int, ...]


class Stop(Message, frozen=True):
    pass


class Phase(Message, frozen=True):
    name: str
    seconds: float | None = None


class Ready(Message, frozen=True):
    """``details``: facts worth a line in the start report, such as threads and instruction set."""

    capacity: Capacity
    details: dict[str, str | int | float]

    @property
    def chunk(self) -> int:
        """Most tokens that a step computes."""
        return int(self.details.get("max_num_batched_tokens", self.capacity.max_model_len))

    def held(self, length: int) -> int:
        """Most KV blocks that a request of so many tokens holds at a time, over all groups of layers."""
        return most_held(self.capacity.windows, length, self.capacity.block_size, self.chunk)


class Outputs(Message, frozen=True):
    outputs: list[Output]
    stats: StepStats


class Answer(Message, frozen=True):
    report: ports.Report


class Failed(Message, frozen=True):
    error: str


encode = msgspec.msgpack.Encoder().encode
decode_for_engine = msgspec.msgpack.Decoder(Add | Abort | Inspect | Pin | Stop).decode
decode_for_api = msgspec.msgpack.Decoder(Phase | Ready | Outputs | Answer | Failed).decode


def for_core(message: Add | Abort | Inspect | Pin) -> ports.Message:
    """The core's own form of a message."""
    match message:
        case Add(_, request):
            return ports.Add(request)
        case Abort(_, request_id, index):
            return ports.Abort(request_id, index)
        case Inspect(_, question, request_id):
            return ports.Inspect(question, request_id)
        case Pin(_, token_ids):
            return ports.Pin(token_ids)
