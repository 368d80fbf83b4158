"""The two processes: no way to end leaves anything behind, and no request is left without an answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from chairlift.core.request import SamplingParams


class Stream:
    """Reads a stream of completions in a thread; ``events`` are its decoded data lines, or its body if it is an error
    from the beginning."""

    def __init__(self, server, **body):
        self.events = []
        body = {"prompt": "x", "stream": True, "temperature": 0, "max_tokens": 200} | body
        self.thread = threading.Thread(target=self._read, args=(server.url, body))
        self.thread.start()

    def _read(self, url, body):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")))

    def join(self):
        self.thread.join(30)
        assert not self.thread.is_alive(), "the stream hangs"
        return self.events


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_ctrl_c_ends_both_and_leaves_nothing(start):
    server = start()
    engine = server.engine
    assert server.post("/v1/completions", prompt="x").status_code == 200
    server.signal_group(signal.SIGINT)
    assert server.wait() == 0
    assert gone(engine)
    assert server.leftovers() == []
    assert not any("Traceback" in line for line in server.log), server.log


def test_ctrl_c_with_open_streams_ends_them_with_an_error(start, until):
    server = start(model="toy-slow")
    streams = [Stream(server) for _ in range(3)]
    until(lambda: all(stream.events for stream in streams))
    server.signal_group(signal.SIGINT)
    for stream in streams:
        error = stream.join()[-1]["error"]
        assert (error["message"], error["code"]) == ("the server is shutting down", "server_shutting_down")
    assert server.wait() == 0
    assert server.leftovers() == []
    assert [line for line in server.log if "3; they end with an error" in line]
    assert not any(" ERROR " in line for line in server.log), server.log


def test_ctrl_c_with_a_request_in_flight_answers_it_and_logs_no_traceback(start, until):
    server = start(model="toy-slow")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(server.post, "/v1/completions", prompt="x", max_tokens=200)
        until(lambda: server.metric("requests_running") == 1)
        server.signal_group(signal.SIGINT)
        assert answer.result().status_code == 503
        assert answer.result().json()["error"]["code"] == "server_shutting_down"
    assert server.wait() == 0
    assert not any("Traceback" in line or " ERROR " in line for line in server.log), server.log


def test_sigterm_finishes_what_runs(start, until):
    """D5: new work is refused, the running request comes to its end, and the exit code is 0. A service manager sends
    the signal to both processes."""
    server = start(model="toy-slow")
    stream = Stream(server, max_tokens=20)
    until(lambda: bool(stream.events))
    server.signal_group(signal.SIGTERM)
    events = stream.join()
    assert events[-1] == "data: [DONE]"
    assert sum(event["chairlift"]["tokens"] for event in events[:-1]) == 20
    assert server.wait() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert server.leftovers() == []


@pytest.mark.parametrize("delay", [0.02, 0.15, 0.3, 0.45])
def test_a_signal_during_the_start_leaves_nothing(start, delay):
    server = start(wait=False)
    time.sleep(delay)
    family = psutil.Process(server.process.pid).children()
    server.signal_group(signal.SIGINT)
    server.wait()
    assert all(gone(member) for member in family)
    assert server.leftovers() == []


def test_a_signal_does_not_wait_for_the_tokenizer(start, until):
    """Which cannot be interrupted."""
    server = start(wait=False, tokenizer_seconds=1000)
    until(lambda: any("toy weights took" in line for line in server.log))  # the event loop has the signals by now
    server.signal_group(signal.SIGTERM)
    assert server.wait() == 0
    assert server.leftovers() == []


def test_a_signal_does_not_wait_for_the_tokenizer_before_the_event_loop(start, until):
    server = start(wait=False, tokenizer_seconds=1000)
    until(lambda: bool(psutil.Process(server.process.pid).children()))
    server.signal_group(signal.SIGTERM)
    assert server.wait() == 0
    assert server.leftovers() == []


def test_a_signal_after_the_death_of_the_engine_does_not_hide_it(start, until):
    server = start(max_engine_restarts=0)
    server.engine.kill()
    until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    server.signal_group(signal.SIGTERM)
    assert server.wait() == 1
    assert server.log[-1].startswith("error: the engine process was killed by signal 9; it is not replaced")


SAVER = """
import sys, time
from types import SimpleNamespace
from chairlift import engine_main
from chairlift.core.plan import Capacity

class Engine:
    scheduler = SimpleNamespace(
        capacity=Capacity(8, 16, 64, details=(("kv_cache", 10**10),)),
        settings=SimpleNamespace(max_num_seqs=1, max_num_batched_tokens=64),
        policy=None,
    )

    def __init__(self, source):
        self.source = source

    def step(self):
        self.source.take(True)

    def close(self):
        time.sleep(2)

sys.exit(engine_main.main(lambda config, source, sink, report: Engine(source)))
"""


@pytest.mark.parametrize(("disk_swap", "code"), [(None, -signal.SIGKILL), ("swap,1", 0)])
def test_an_engine_that_saves_its_cache_is_given_the_time(disk_swap, code, caplog, monkeypatch):
    from chairlift import log
    from chairlift.config import EngineConfig
    from chairlift.server import ipc, supervisor

    monkeypatch.setattr(log.get("supervisor"), "handlers", [caplog.handler])
    caplog.set_level("INFO", "chairlift.supervisor")
    engine = supervisor.EngineProcess(EngineConfig(disk_swap=disk_swap), command=[sys.executable, "-c", SAVER])

    async def until_ready():
        ready = asyncio.Event()
        engine.watch(lambda message: ready.set() if isinstance(message, ipc.Ready) else None, lambda code: None)
        await ready.wait()

    asyncio.run(until_ready())
    assert engine.stop(0.2) == code
    assert ("saves its prefix cache, 9.3 GiB at most" in caplog.text) == (code == 0)


def test_another_signal_does_not_wait_for_the_engine():
    from chairlift.server import main

    class Engine:
        def __init__(self):
            self.calls = []

        def stop(self):
            self.calls.append("stop")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)

        def kill(self):
            self.calls.append("kill")

    engine = Engine()
    main._stop(engine)
    assert engine.calls == ["stop", "kill"]


def test_the_engine_dies_with_its_parent(start, until):
    """D6: the parent is killed in a way it cannot notice."""
    server = start()
    engine = server.engine
    server.process.kill()
    until(lambda: gone(engine))
    assert server.leftovers() == []


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(100)"])
def test_the_engine_removes_the_socket_itself(toy, tmp_path, until, end):
    """The parent is killed before the engine has connected, or is not yet reading what it says."""
    program = (
        "import os, signal, sys, time\n"
        "from chairlift.config import EngineConfig\n"
        "from chairlift.server.supervisor import EngineProcess\n"
        f"command = [sys.executable, {toy.__file__!r}, 'engine', '0']\n"
        "engine = EngineProcess(EngineConfig(model='toy'), command=command)\n"
        f"open({str(tmp_path / 'launched')!r}, 'w').close()\n" + end
    )
    folder = tmp_path / "tmp"
    folder.mkdir()
    parent = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(folder)})
    try:
        until(lambda: (tmp_path / "launched").exists())
        until(lambda: not list(folder.iterdir()))
    finally:
        parent.kill()
        parent.wait()


def test_the_listener_sends_at_once():
    """Else each answer on a kept-alive connection waits for the client's delayed ACK."""
    from chairlift.config import ServerConfig
    from chairlift.server import main

    with main._listen(ServerConfig(port=0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_engine_killed_under_load(start, until):
    """D1: where no engine may follow, every open request gets an error, health fails, and the server ends with a
    non-zero code."""
    server = start(model="toy-slow", max_num_seqs=2, max_engine_restarts=0)
    streams = [Stream(server)]
    until(lambda: bool(streams[0].events))
    answers = []
    whole = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", prompt="x", max_tokens=200)))
    whole.start()
    until(lambda: server.metric("requests_running") == 2)
    streams += [Stream(server), Stream(server)]
    until(lambda: server.metric("requests_waiting") == 2)
    server.engine.kill()
    until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
    assert httpx.get(f"{server.url}/ready").status_code == 503
    assert server.post("/v1/completions", prompt="x").status_code == 503
    for stream in streams:
        error = stream.join()[-1]["error"]
        assert error["code"] == "engine_dead" and "signal 9" in error["message"]
    whole.join(30)
    assert answers[0].status_code == 500 and answers[0].json()["error"]["code"] == "engine_dead"
    assert server.wait() == 1
    assert "error: the engine process was killed by signal 9" in server.log[-1]
    (line,) = [line for line in server.log if " ERROR " in line]
    assert "--max-engine-restarts 0; open requests that have failed: 4;" in line
    assert server.leftovers() == []


@pytest.mark.parametrize(("token", "words"), [(1, "killed by signal 6"), (2, "RuntimeError: the toy was told to fail")])
def test_engine_fails_in_a_step(start, token, words):
    server = start(max_engine_restarts=0)
    answer = server.post("/v1/completions", prompt=[token])
    assert answer.status_code == 500
    assert words in answer.json()["error"]["message"]
    assert server.wait() == 1


def test_a_stuck_engine_cannot_hold_up_the_end(start, until):
    server = start()
    engine = server.engine
    stream = Stream(server, prompt=[3])
    until(lambda: server.metric("requests_received_total") == 1)
    server.signal_group(signal.SIGINT)
    stream.join()
    assert server.wait() == 0
    assert gone(engine)


def test_a_model_that_cannot_be_loaded_is_one_line(start):
    server = start(wait=False, model="toy-broken")
    assert server.wait() == 1
    assert server.log[-1] == "error: the toy is broken; take another one"
    assert not any("Traceback" in line for line in server.log)
    assert server.leftovers() == []


def test_a_port_in_use_is_one_line_and_starts_no_engine(toy, tmp_path, monkeypatch):
    from chairlift.config import EngineConfig, ServerConfig
    from chairlift.errors import ConfigError
    from chairlift.server import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}.*--port"):
            main.run(EngineConfig(), ServerConfig(port=port), toy.ToyTokenizer, command=["/no/such/program"])


def test_the_start_is_explained(server):
    """M10, I3, I4: bytes of every share, what they are a share of, and where the time went."""
    log = "\n".join(server.log)
    assert "weights 3.0 MiB (3,145,728 bytes)" in log
    assert "KV cache 1.0 MiB (1,048,576 bytes)" in log
    assert "workspace 1,000 bytes" in log
    assert "0.4 % of the 1.0 GiB (1,073,741,824 bytes) that were free at start" in log
    assert "4 requests of the full length of 256 tokens fit at once" in log
    assert "device: cpu (toy, 1 threads)" in log
    ready = next(line for line in server.log if "ready after" in line)
    for phase in ("interpreter", "toy weights", "HTTP imports", "tokenizer"):
        assert phase in ready


def test_the_report_counts_groups_windows_and_swap_space(caplog, monkeypatch):
    """Of 100 positions a full group holds 7 blocks of 16, one with a window of 17 (1 block, 2 at its ends, 1 of the
    step) holds 4."""
    from chairlift import log
    from chairlift.core.plan import Capacity
    from chairlift.server import ipc, main

    monkeypatch.setattr(log.get("server"), "handlers", [caplog.handler])
    caplog.set_level("INFO", "chairlift.server")
    details = (("weights", 100), ("kv_cache", 200), ("workspace", 50), ("swap_space", 150), ("free_at_start", 1000))
    capacity = Capacity(34, 16, 100, windows=(0, 17), details=details)
    main._report(ipc.Ready(0, capacity, {"max_num_batched_tokens": 16}))
    assert "34 blocks of 16 tokens; 3 requests of the full length of 100 tokens fit at once" in caplog.text
    assert "all of it is 500 bytes, 50.0 % of the 1,000 bytes" in caplog.text
    main._report(ipc.Ready(0, Capacity(7, 16, 100), {"max_num_batched_tokens": 16}))
    assert "; 1 request of the full length of 100 tokens fits at once" in caplog.text


def test_params_reach_the_engine_as_they_are():
    """Everything a request carries survives the socket."""
    from chairlift.core.request import Request
    from chairlift.server import ipc

    params = SamplingParams(
        n=3, seed=2**64 - 1, stop=("a", "ß"), stop_token_ids=(1, 2), logit_bias={7: -1.5}, logprobs=2, min_p=0.25
    )
    request = Request(
        id="r", token_ids=[1, 2], num_prompt=2, params=params, seed=2**64 - 1, stop_ids=frozenset({5}), num_samples=3
    )
    message = ipc.decode_for_engine(ipc.encode(ipc.Add(7, request)))
    assert message.epoch == 7
    for name in Request.__slots__:
        assert getattr(message.request, name) == getattr(request, name), name
