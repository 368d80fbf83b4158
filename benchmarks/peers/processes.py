"""Engines that run: a server, or a worker in process. Only what was started here is ended, by its process group."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import Any, Self

from peers.client import TIMEOUT, send
from peers.figures import Answer
from peers.workloads import Request

START_TIMEOUT = 900.0  # seconds; vLLM compiles at its first start
STOP_TIMEOUT = 20.0  # seconds
LOG_TAIL = 200  # characters of a log's last line


class Running:
    """An engine in a process group of its own; what it writes to stderr goes to ``log``."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path, **pipes: Any) -> None:
        self._log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, env=os.environ | env, stderr=file, start_new_session=True, **({"stdout": file} | pipes)
            )

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Sends each request when it is due, and waits for all."""
        raise NotImplementedError

    def failure(self, what: str) -> RuntimeError:
        lines = self._log.read_text(errors="replace").splitlines() or [""]
        return RuntimeError(f"{what}; the last of {self._log.name}: {lines[-1][-LOG_TAIL:]}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_TIMEOUT)


class Server(Running):
    """A server with OpenAI's /v1/completions on a free port of this machine, given as {port} in the command.

    Args:
        extra: fields that each request needs besides.
        ready: the path that answers 200 once requests can be answered.
    """

    def __init__(
        self, command: Sequence[str], env: dict[str, str], log: Path, extra: dict[str, Any], ready: str = "/health"
    ) -> None:
        self._extra = extra
        self._ready = ready
        self._port = _free_port()
        super().__init__([word.format(port=self._port) for word in command], env, log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        return send(self._port, requests, self._extra)

    def _wait_until_ready(self) -> None:
        url = f"http://127.0.0.1:{self._port}{self._ready}"
        give_up = time.monotonic() + START_TIMEOUT
        while time.monotonic() < give_up:
            if self.process.poll() is not None:
                raise self.failure(f"the server ended with {self.process.returncode}")
            with suppress(OSError), urllib.request.urlopen(url, timeout=5):  # it raises for any other status
                return
            time.sleep(0.2)
        raise self.failure("the server did not come up")


class Worker(Running):
    """An engine that speaks as inside/worker.py says."""

    def __init__(self, command: Sequence[str], env: dict[str, str], log: Path) -> None:
        super().__init__(command, env, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._read()
        except BaseException:
            self.__exit__()
            raise

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([asdict(request) for request in requests]) + "\n")
        self.process.stdin.flush()
        return [
            Answer(request.due, tuple(found["times"]), len(found["tokens"]), ids=tuple(found["tokens"]))
            for request, found in zip(requests, self._read(), strict=True)
        ]

    def _read(self) -> Any:
        assert self.process.stdout is not None
        timer = Timer(TIMEOUT, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise self.failure("the engine ended")
        return json.loads(line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
