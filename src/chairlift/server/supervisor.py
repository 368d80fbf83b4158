"""The engine process as its parent sees it: spawned, spoken to, watched, ended, and followed by another one. Nothing of
it outlives the parent."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec
import zmq

from chairlift import log
from chairlift.config import EngineConfig, ServerConfig
from chairlift.log import short_bytes
from chairlift.server import ipc

COMMAND = (sys.executable, "-P", "-m", "chairlift.engine_main")
STOP_SECONDS = 5.0
HEALTHY_SECONDS = 60.0  # an engine that lived for so long did not end by its start
SAVED_PER_SECOND = 100 * 10**6  # bytes of KV that even a slow disk takes

OnMessage = Callable[[ipc.Message], None]
OnExit = Callable[[int], None]

_log = log.get("supervisor")


class EngineProcess:
    """One engine, of one epoch.

    It is spawned at once, before an event loop exists; `watch` then hands over what it says. The socket lies in a
    folder only this user can enter, and only until the engine has connected: a connected socket needs no name, and
    what has no name cannot be left behind, however the processes end. The engine removes it, this process only if
    the engine cannot.
    """

    def __init__(
        self, config: EngineConfig, *, epoch: int = 0, log_level: str = "info", command: Sequence[str] = COMMAND
    ) -> None:
        self.epoch = epoch
        self.was_stuck = False  # `end` was called for that
        self._folder: str | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # never blocks: what is under way is bounded by the requests that are open
        self._socket.linger = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: OnMessage = lambda message: None
        self._listens = False  # to messages: it is past loading
        self._keeps_cache = config.disk_swap is not None
        self._to_save = 0  # bytes of KV, at most, that it writes to disk before it ends
        self._process = _spawn(command)
        try:  # after the process, so that the folder is not there yet while nobody else could remove it
            self._folder = tempfile.mkdtemp(prefix="chairlift-")
            endpoint = f"ipc://{self._folder}/engine"
            self._socket.bind(endpoint)
        except BaseException:
            self.stop()
            raise
        launch = ipc.Launch(endpoint, epoch, os.getpid(), log_level, config)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died already; watch() will tell
            self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, on_message: OnMessage, on_exit: OnExit) -> None:
        """From now on calls ``on_message`` with each message of the engine and, once, ``on_exit`` with its exit code
        (negative: the signal that killed it). Both are called in the running event loop."""
        self._loop = loop = asyncio.get_running_loop()
        self._on_message = on_message
        loop.add_reader(self._socket.fileno(), self._drain)
        loop.call_soon(self._drain)

        def exited(code: int) -> None:
            self._drain()  # its last words come before the news of its end
            on_exit(code)

        def wait() -> None:
            code = self._process.wait()
            with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                loop.call_soon_threadsafe(exited, code)

        threading.Thread(target=wait, name="engine-watch", daemon=True).start()

    def send(self, message: ipc.Message) -> None:
        """Queues a message; an engine that is gone does not get it."""
        if self._socket.closed:
            return
        with suppress(zmq.ZMQError):
            self._socket.send(ipc.encode(message), zmq.NOBLOCK)
        if self._loop is not None:
            self._loop.call_soon(self._drain)  # sending may have used up the edge that announced a message

    def dump(self) -> None:
        """Has the engine tell on stderr what it is doing: the stacks of its threads, and the steps in flight as far as
        it can still tell them."""
        with suppress(OSError):
            os.kill(self.pid, ipc.DUMP_SIGNAL)
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.write(b"d")
            self._process.stdin.flush()

    def end(self, stuck: bool) -> None:
        """Kills the engine, and leaves it to `watch` to tell. ``stuck``: for something that it does itself."""
        self.was_stuck = stuck
        self._process.kill()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal holds it, as SIGSTOP does: then it can do nothing, not even tell."""
        import psutil

        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """Ends the engine: asks it to finish its step, and kills it if it has not within ``seconds`` and the time that
        its cache takes to save, or if it is still loading. Returns its exit code. May be called from any state, and
        again."""
        self._on_message = lambda message: None
        if self._loop is not None and self._loop.is_closed():
            self._loop = None
        if self._listens:
            self.send(ipc.Stop(self.epoch))
            self._wait(seconds)
        self._process.kill()
        return self._end()

    def kill(self) -> None:
        """Ends the engine at once, whatever it is doing."""
        self._process.kill()
        self._end()

    def _wait(self, seconds: float) -> None:
        saving = self._to_save / SAVED_PER_SECOND
        try:
            if saving:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(min(1.0, saving))
                    return
                _log.info(
                    "the engine saves its prefix cache, %s at most, to --disk-swap, and has %.0f s for it",
                    short_bytes(self._to_save),
                    seconds + saving,
                )
            self._process.wait(seconds + saving)
        except subprocess.TimeoutExpired:
            _log.warning("the engine did not stop within %.0f s and is killed", seconds + saving)

    def _end(self) -> int:
        code = self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._close_socket()
        return code

    def _drain(self) -> None:
        """Reads all that is there: ZeroMQ announces only the first of several messages."""
        while not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            self._remove_folder()
            message = ipc.decode_for_api(frame)
            if isinstance(message, ipc.Ready):
                self._listens = True
                self._to_save = dict(message.capacity.details).get("kv_cache", 0) if self._keeps_cache else 0
            if message.epoch == self.epoch:
                self._on_message(message)

    def _close_socket(self) -> None:
        if not self._socket.closed:
            if self._loop is not None:
                self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._context.term()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class Supervisor:
    """The engines of a server, one after the other, each of the next epoch. Methods without a docstring are those of
    the present `EngineProcess`."""

    def __init__(self, config: EngineConfig, server_config: ServerConfig, command: Sequence[str] = COMMAND) -> None:
        self.resumes = server_config.on_crash == "resume"  # whether what was open goes on in the next engine
        self._most = server_config.max_engine_restarts
        self._spawn = partial(EngineProcess, config, log_level=server_config.log_level, command=command)
        self._engine = self._spawn(epoch=0)
        self._since = time.monotonic()
        self._fruitless = 0  # engines in a row that ended with nothing done
        self._hooks: tuple[OnMessage, OnExit] | None = None

    @property
    def epoch(self) -> int:
        return self._engine.epoch

    def watch(self, on_message: OnMessage, on_exit: OnExit) -> None:
        """As `EngineProcess.watch`, for all that follow, too."""
        self._hooks = on_message, on_exit
        self._engine.watch(on_message, on_exit)

    def give_up(self, fruitful: bool) -> str:
        """The engine has ended. Says why none is to follow it; "" if one is."""
        healthy = fruitful or time.monotonic() - self._since > HEALTHY_SECONDS
        self._fruitless = 1 if healthy else self._fruitless + 1
        if self._fruitless <= self._most:
            return ""
        if not self._most:
            return "it is not replaced, by --max-engine-restarts 0"
        return f"{self._fruitless} engines in a row got nothing done, and --max-engine-restarts is {self._most}"

    def replace(self) -> None:
        """Starts the next engine. The present one has ended, or ends now."""
        assert self._hooks is not None
        self._engine.kill()
        self._engine = self._spawn(epoch=self._engine.epoch + 1)
        self._since = time.monotonic()
        self._engine.watch(*self._hooks)

    def send(self, message: ipc.Message) -> None:
        self._engine.send(message)

    @property
    def is_stopped(self) -> bool:
        return self._engine.is_stopped

    def dump(self) -> None:
        self._engine.dump()

    def end(self, stuck: bool) -> None:
        self._engine.end(stuck)

    @property
    def was_stuck(self) -> bool:
        return self._engine.was_stuck

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        return self._engine.stop(seconds)

    def kill(self) -> None:
        self._engine.kill()


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts the process with this one's import path and with SIGINT and SIGTERM blocked: a terminal and a
    service manager send them to all processes, and it is for the parent to end the engine, in order."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
