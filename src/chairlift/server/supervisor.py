"""The engine process as its parent sees it: spawned, spoken to, watched, ended. Nothing of it outlives the parent."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq

from chairlift import log
from chairlift.config import EngineConfig
from chairlift.log import short_bytes
from chairlift.server import ipc

COMMAND = (sys.executable, "-P", "-m", "chairlift.engine_main")
STOP_SECONDS = 5.0
SAVED_PER_SECOND = 100 * 10**6  # bytes of KV that even a slow disk takes

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
        self._folder: str | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # never blocks: what is under way is bounded by the requests that are open
        self._socket.linger = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[ipc.Message], None] = lambda message: None
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

    def watch(self, on_message: Callable[[ipc.Message], None], on_exit: Callable[[int], None]) -> None:
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


def _spawn(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts the process with this one's import path and with SIGINT and SIGTERM blocked: a terminal and a
    service manager send them to all processes, and it is for the parent to end the engine, in order."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
