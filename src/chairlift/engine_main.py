"""The engine process: builds scheduler and runner from the configuration, and runs `Engine.step` until told to stop.

This file and llm.py are where the two towers meet: logic (core) and arithmetic (models, runners).
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from chairlift import log
from chairlift.config import (
    DEFAULT_MAX_PREEMPTIONS,
    DEFAULT_PRIORITY_AGEING,
    EngineConfig,
    parse_tenant_weights,
)
from chairlift.core.clock import WallClock
from chairlift.core.engine import Engine
from chairlift.core.order import make_order
from chairlift.core.plan import Capacity, Output, StepRecord, StepStats
from chairlift.core.policy import Policy, make_policy
from chairlift.core.ports import Clock, Message, Report, Sink, Source
from chairlift.core.scheduler import Scheduler, Settings
from chairlift.core.shares import Shares
from chairlift.errors import ChairliftError
from chairlift.server import ipc

if TYPE_CHECKING:
    from chairlift.runners.disk import DiskFile
    from chairlift.runners.native import NativeRunner

STEP_SHARE = 0.92  # of the target for the time between tokens: planning and what becomes of the tokens take the rest
IDLE_SECONDS = 0.1  # longest wait for a message when there is nothing to compute

Recorder = Callable[[StepRecord], None]

_log = log.get("engine")


def build_engine(
    config: EngineConfig,
    source: Source,
    sink: Sink,
    *,
    clock: Clock | None = None,
    recorder: Recorder | None = None,
    report: log.Report | None = None,
) -> Engine:
    """An engine ready for its first step. Raises as `start_runner` does."""
    policy = configured_policy(config)  # first, since loading a model takes long
    runner, capacity = start_runner(config, report)
    scheduler = make_scheduler(config, capacity, policy=policy, disk=runner.disk)
    return Engine(
        scheduler, runner, source, sink, clock or WallClock(), recorder, depth=2 if config.async_scheduling else 1
    )


def make_scheduler(
    config: EngineConfig, capacity: Capacity, *, policy: Policy | None = None, disk: DiskFile | None = None
) -> Scheduler:
    """The scheduler that the configuration describes, for what a runner reserved."""
    from chairlift.runners.memory import batch_tokens

    settings = Settings(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batch_tokens(config, capacity.max_model_len),
        enable_prefix_caching=config.enable_prefix_caching,
        preemption_mode=config.preemption_mode or "auto",
        max_preemptions=DEFAULT_MAX_PREEMPTIONS if config.max_preemptions is None else config.max_preemptions,
        slo_itl=None if config.slo_itl is None else STEP_SHARE * config.slo_itl / 1000,
        num_speculative_tokens=config.num_speculative_tokens,
        max_batch_delay=config.max_batch_delay_ms / 1000,
        check=config.debug,
    )
    return Scheduler(
        capacity,
        policy or configured_policy(config),
        settings,
        shares=Shares(parse_tenant_weights(config.tenant_weights or "")) if config.fair_tenants else None,
        secret=disk.secret if disk else None,
        disk_contents=disk.contents() if disk else (),
    )


def configured_policy(config: EngineConfig) -> Policy:
    """Raises ConfigError for one that cannot be used."""
    ageing = DEFAULT_PRIORITY_AGEING if config.priority_ageing is None else config.priority_ageing
    order = make_order(config.order or "fcfs", priority_ageing=ageing, slo_ttft=_seconds(config.slo_ttft))
    return make_policy(config.scheduler_policy, admission=config.admission, order=order)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def start_runner(config: EngineConfig, report: log.Report | None = None) -> tuple[NativeRunner, Capacity]:
    """Loads the model and reserves the memory.

    Raises ModelError for a model that cannot be loaded, ConfigError for settings that cannot work.
    """
    report = report or (lambda name, seconds: None)
    with log.phase("engine imports", report):
        from chairlift.models import load_checkpoint
        from chairlift.runners.native import NativeRunner
    with log.phase("model file", report):
        checkpoint = load_checkpoint(config.model)
    runner = NativeRunner(checkpoint, config, report=report)
    return runner, runner.start()


class SocketSource:
    """The messages of the API process, as the engine's source."""

    def __init__(self, socket: zmq.Socket[bytes], epoch: int) -> None:
        self._socket = socket
        self._epoch = epoch
        self._clock = WallClock()
        self.stopped = False

    def take(self, idle: bool, until: float | None = None) -> Sequence[Message]:
        messages: list[Message] = []
        if idle:
            left = IDLE_SECONDS if until is None else min(IDLE_SECONDS, until - self._clock.now())
            self._socket.poll(max(0, int(left * 1000)))  # ms; never beyond `until`
        while not self.stopped:
            try:
                message = ipc.decode_for_engine(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if message.epoch != self._epoch:
                continue
            if isinstance(message, ipc.Stop):
                self.stopped = True
            else:
                messages.append(ipc.for_core(message))
        return messages


class SocketSink:
    """Sends a step's outputs to the API process, as one message, and answers its questions."""

    def __init__(self, socket: zmq.Socket[bytes], epoch: int) -> None:
        self._socket = socket
        self._epoch = epoch

    def put(self, outputs: Sequence[Output], stats: StepStats) -> None:
        self._socket.send(ipc.encode(ipc.Outputs(self._epoch, list(outputs), stats)))

    def answer(self, report: Report) -> None:
        self._socket.send(ipc.encode(ipc.Answer(self._epoch, report)))


Build = Callable[..., Engine]
"""What `build_engine` is; tests pass one that loads no model."""


def main(build: Build = build_engine) -> int:
    """The process. Returns its exit code: 0 when told to stop, 1 when it cannot start or go on."""
    faulthandler.enable()
    faulthandler.register(ipc.DUMP_SIGNAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Ignored too: a service manager sends it to all processes of a service, and the parent drains its requests before
    # it stops the engine.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:  # the parent was gone before it said anything
        return 1
    launch = msgspec.json.decode(line, type=ipc.Launch)
    log.setup(launch.log_level, "engine")
    context = zmq.Context()
    socket = _connect(context, launch)
    lifeline = Lifeline(launch.parent_pid)
    try:
        _run(launch, socket, build, lifeline)
        return 0
    except ChairliftError as error:  # for a person: one line, no traceback
        socket.send(ipc.encode(ipc.Failed(launch.epoch, str(error))))
    except Exception as error:
        _log.exception("the engine failed")
        socket.send(ipc.encode(ipc.Failed(launch.epoch, f"the engine failed: {type(error).__name__}: {error}")))
    finally:
        socket.close()
        context.term()
    return 1


def _run(launch: ipc.Launch, socket: zmq.Socket[bytes], build: Build, lifeline: Lifeline) -> None:
    def report(name: str, seconds: float | None) -> None:
        socket.send(ipc.encode(ipc.Phase(launch.epoch, name, seconds)))

    report("interpreter", log.process_age())
    source = SocketSource(socket, launch.epoch)
    engine = build(launch.config, source, SocketSink(socket, launch.epoch), report=report)
    socket.send(ipc.encode(ipc.Ready(launch.epoch, engine.scheduler.capacity, _details(engine, launch.config))))
    lifeline.engine = engine
    gc.freeze()  # what the start has made stays; no later collection looks at it again
    try:
        while not source.stopped:
            engine.step()
    finally:
        engine.close()


def _details(engine: Engine, config: EngineConfig) -> dict[str, str | int | float]:
    scheduler = engine.scheduler
    return {
        "max_num_seqs": scheduler.settings.max_num_seqs,
        "max_num_batched_tokens": scheduler.settings.max_num_batched_tokens,
        "policy": config.scheduler_policy,
    }


def _connect(context: zmq.Context[zmq.Socket[bytes]], launch: ipc.Launch) -> zmq.Socket[bytes]:
    """The socket to the parent. Once it is connected, or the parent gone, nobody needs its name, and the folder of it
    is removed here: the parent may be killed, and this process with it, before it gets to that."""
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = 2000  # ms, so that the last words are heard
    monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED)
    socket.connect(launch.endpoint)
    while not monitor.poll(50) and not select.select([sys.stdin], [], [], 0)[0]:  # at its end: the parent is gone
        pass
    socket.disable_monitor()
    name = Path(launch.endpoint.removeprefix("ipc://"))
    with suppress(OSError):
        name.unlink(missing_ok=True)
        name.parent.rmdir()
    return socket


class Lifeline:
    """The pipe from the parent, read in a thread of its own. A byte asks what the engine is doing, and the end of the
    pipe says that the parent is gone: this process then ends at once.

    Linux kills the process with its parent (PR_SET_PDEATHSIG); elsewhere, and in the moment before that is set, the
    pipe does it.

    Attributes:
        engine: of whom to tell, once there is one.
    """

    def __init__(self, parent_pid: int) -> None:
        self.engine: Engine | None = None
        if sys.platform == "linux":
            set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)
        threading.Thread(target=self._read, name="lifeline", daemon=True).start()

    def _read(self) -> None:
        while os.read(sys.stdin.fileno(), 1):
            for line in self.engine.describe() if self.engine else ():
                _log.error("%s", line)
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
