"""Servers over the toy model, as processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

TOY = Path(__file__).with_name("toy.py")


@pytest.fixture(autouse=True, scope="session")
def _sigint_is_not_ignored():
    """A shell that runs the tests in the background has it ignored, and every child would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Server:
    """A running server. It has its own process group, as if started from a terminal, and its own folder for
    temporary files."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log: list[str] = []
        self.url = ""
        self._listening = threading.Event()
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._http: httpx.Client | None = None

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if "Listening on " in line:
                self.url = line.split("Listening on ")[1].strip()
                self._listening.set()
        self._listening.set()

    def wait_listening(self) -> Server:
        assert self._listening.wait(60) and self.url, "\n".join(self.log)
        return self

    @property
    def engine(self) -> psutil.Process:
        (engine,) = psutil.Process(self.process.pid).children()
        return engine

    @property
    def openai(self) -> openai.OpenAI:
        """A client that checks every answer against OpenAI's types."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)

    @property
    def http(self) -> httpx.Client:
        self._http = self._http or httpx.Client(base_url=self.url, timeout=60)
        return self._http

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def metric(self, name: str) -> float:
        """A metric's value; labels as Prometheus writes them."""
        for line in self.http.get("/metrics").text.splitlines():
            key, _, value = line.rpartition(" ")
            if key == f"chairlift_{name}":
                return float(value)
        raise KeyError(name)

    def signal_group(self, number: signal.Signals) -> None:
        """As Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, number)

    def wait(self) -> int:
        code = self.process.wait(30)
        self._reader.join(30)
        return code

    def leftovers(self) -> list[str]:
        return [str(path) for path in self.folder.rglob("*")]

    def end(self) -> None:
        if self._http is not None:
            self._http.close()
        if self.process.poll() is None:
            family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
            for member in family:
                member.kill()
        self.wait()


@pytest.fixture(scope="session")
def toy() -> Any:
    """The module toy.py."""
    spec = importlib.util.spec_from_file_location("chairlift_toy", TOY)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chairlift_toy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_server(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[str]], Server]:
    return lambda command: Server(command, tmp_path_factory.mktemp("server") / "tmp")


def _toy_command(settings: dict[str, Any]) -> list[str]:
    return [sys.executable, str(TOY), "serve", json.dumps(settings)]


@pytest.fixture
def start(run_server: Callable[[list[str]], Server]) -> Iterator[Callable[..., Server]]:
    """Starts toy servers that the test may ruin. ``start(wait=False, **EngineConfig fields)``."""
    servers: list[Server] = []

    def start(wait: bool = True, **settings: Any) -> Server:
        servers.append(run_server(_toy_command(settings)))
        return servers[-1].wait_listening() if wait else servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture(scope="module")
def server(run_server: Callable[[list[str]], Server]) -> Iterator[Server]:
    """A toy server shared by the tests of a module."""
    server = run_server(_toy_command({})).wait_listening()
    yield server
    server.end()


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], None]:
    """Waits for a condition that must come true; fails after 30 s."""

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "it did not become true within 30 s"
            time.sleep(0.01)

    return until
