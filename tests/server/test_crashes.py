"""The engine ends under load, in every way, and no client sees more of it than a pause."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

LOADS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 1, "seed": 4, "n": 3},
    {"temperature": 1, "seed": 5, "logprobs": 2},
    {"temperature": 1, "seed": 6, "presence_penalty": 1.5},
    {"temperature": 0, "stop": ["山"]},
    {"temperature": 0, "logit_bias": {"256": 100}},
    {"temperature": 1, "seed": 7, "prompt": ["one", "another"]},
    {"temperature": 1, "seed": 8, "stream": False},
    {"temperature": 1, "seed": 9, "n": 2, "best_of": 4, "stream": False},
    {"temperature": 0, "n": 2, "use_beam_search": True, "stream": False},
]


class Call(threading.Thread):
    """One request, and in `choices` all that its client got: of a stream each choice's pieces joined."""

    def __init__(self, url: str, **body: Any) -> None:
        super().__init__()
        self.url = url
        self.body = {"prompt": "x", "max_tokens": 60, "stream": True} | body
        self.status = 0
        self.error: Any = None
        self.usage: Any = None
        self.num_pieces = 0
        self.choices: dict[int, dict[str, Any]] = {}
        self.start()

    def run(self) -> None:
        body = self.body | ({"stream_options": {"include_usage": True}} if self.body["stream"] else {})
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60) as response:
            self.status = response.status_code
            for line in response.iter_lines():
                if line and line != "data: [DONE]":
                    self._take(json.loads(line.removeprefix("data: ")))

    def _take(self, event: dict[str, Any]) -> None:
        self.num_pieces += 1
        self.error = self.error or event.get("error")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            whole = self.choices.setdefault(choice["index"], {"text": "", "logprobs": [], "reason": None})
            whole["text"] += choice["text"]
            whole["logprobs"] += (choice["logprobs"] or {}).get("token_logprobs", [])
            whole["reason"] = choice["finish_reason"] or whole["reason"]

    def finish(self) -> Any:
        self.join(60)
        assert not self.is_alive(), "it hangs"
        assert self.error is None, self.error
        usage = {name: self.usage[name] for name in ("prompt_tokens", "completion_tokens")}
        return self.status, self.choices, usage


def kill(server: Any, until: Any, number: int = signal.SIGKILL) -> None:
    """Ends the engine, and returns when another one is ready."""
    engine = server.engine
    before = server.metric("engine_restarts_total")
    engine.send_signal(number)
    until(lambda: server.metric("engine_restarts_total") == before + 1 and server.metric("engine_up") == 1)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


def test_no_client_notices(start, until):
    """DESIGN 8: the engine's end is a preemption of everything. Each answer is what it is without any."""
    server = start(model="toy-slow", max_num_seqs=32, kv_cache_memory="200")
    expected = [call.finish() for call in [Call(server.url, **load) for load in LOADS]]
    calls = [Call(server.url, **load) for load in LOADS]
    rng = random.Random(1)
    for _ in range(6):
        time.sleep(rng.uniform(0.0, 0.8))
        kill(server, until)
    assert any(call.is_alive() for call in calls), "all had ended before the last"
    assert [call.finish() for call in calls] == expected
    assert server.metric("engine_restarts_total") == 6
    assert server.metric("requests_running") == server.metric("requests_waiting") == 0
    assert server.metric("kv_blocks_free") == server.metric("kv_blocks_total")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert server.leftovers() == []


def test_requests_are_taken_meanwhile(start, until):
    """Between two engines the server lives, is not ready, and says so; who comes then waits."""
    server = start(restart_seconds=2)
    server.engine.kill()
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    assert "replacing the engine" in httpx.get(f"{server.url}/ready").json()["phase"]
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/v1/requests").status_code == 503
    assert server.post("/v1/completions", prompt="x", max_tokens=3, temperature=0).status_code == 200
    assert httpx.get(f"{server.url}/ready").status_code == 200
    assert any("is replaced, and 0 open requests go on" in line for line in server.log)


@pytest.mark.parametrize(("token", "words"), [(1, "killed by signal 6"), (2, "RuntimeError: the toy was told to fail")])
def test_a_request_that_kills_the_engine_fails_alone(start, token, words):
    """All others have the answers that they would have had."""
    server = start(model="toy-slow")
    expected = [call.finish() for call in [Call(server.url, **load) for load in LOADS[:4]]]
    calls = [Call(server.url, **load) for load in LOADS[:4]]
    poison = Call(server.url, prompt=[token], stream=False)
    assert [call.finish() for call in calls] == expected
    poison.join(60)
    assert poison.status == 500 and "while it computed this request alone" in poison.error["message"]
    assert words in poison.error["message"]
    assert 3 <= server.metric("engine_restarts_total") <= 6
    assert server.post("/v1/completions", prompt="x").status_code == 200


def test_an_engine_that_is_stopped_is_replaced(start, until):
    """D1: it cannot even tell. Long before --watchdog-seconds."""
    server = start(model="toy-slow")
    (expected,) = [call.finish() for call in [Call(server.url, **LOADS[1])]]
    call = Call(server.url, **LOADS[1])
    until(lambda: call.num_pieces > 5)
    engine = server.engine
    engine.send_signal(signal.SIGSTOP)
    assert call.finish() == expected
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    assert any("held by a signal" in line for line in server.log)


def test_a_stuck_step_is_told_of_and_its_request_found(start):
    """D4: the stacks, and the batch by name. The step never ends; who is to blame ends with an error, the others do not
    notice."""
    server = start(model="toy-slow", watchdog_seconds=1)
    (expected,) = [call.finish() for call in [Call(server.url, **LOADS[1])]]
    call = Call(server.url, **LOADS[1])
    stuck = Call(server.url, prompt=[3], stream=False)
    assert call.finish() == expected
    stuck.join(60)
    assert stuck.status == 500 and "this request alone" in stuck.error["message"]
    log = "\n".join(server.log)
    assert "has finished no step for" in log and "--watchdog-seconds 1" in log
    assert "toy.py" in log and "in _token" in log, "no stacks"
    assert "began" in log and "tokens from 0" in log, "no batch"


def test_a_slow_step_is_none_that_is_stuck(start):
    server = start(model="toy-slowest", watchdog_seconds=1)
    assert Call(server.url, max_tokens=4, temperature=0).finish()[0] == 200
    assert server.metric("engine_restarts_total") == 0


def test_an_idle_engine_is_none_that_is_stuck(start):
    server = start(watchdog_seconds=0.6)
    time.sleep(2)
    assert server.metric("engine_restarts_total") == 0


def test_open_requests_may_be_wanted_to_fail(start, until):
    server = start(model="toy-slow", on_crash="fail")
    stream, whole = Call(server.url), Call(server.url, stream=False)
    until(lambda: stream.num_pieces > 0 and server.metric("requests_running") == 2)
    kill(server, until)
    for call in (stream, whole):
        call.join(30)
        assert "signal 9" in call.error["message"] and call.error["code"] == "engine_dead"
    assert whole.status == 500
    assert Call(server.url, max_tokens=3).finish()[0] == 200


def test_it_gives_up_when_nothing_gets_done(start, until):
    """And exits with 1, after each open request has got an error."""
    server = start(model="toy-slow", max_engine_restarts=2)
    while server.process.poll() is None:
        with suppress(ValueError, psutil.Error):  # there is none just now
            server.engine.kill()
        time.sleep(0.05)
    assert server.wait() == 1
    assert "3 engines in a row got nothing done, and --max-engine-restarts is 2" in server.log[-1]
    assert server.leftovers() == []


def test_the_pinned_prefix_is_pinned_again(start, until, tmp_path):
    prefix = tmp_path / "prefix"
    prefix.write_text("a beginning of many prompts, " * 4)
    server = start(pin_prefix=str(prefix), max_num_batched_tokens=64)
    pinned = server.metric("kv_blocks_total") - server.metric("kv_blocks_free")
    kill(server, until)
    usage = server.post("/v1/completions", prompt=prefix.read_text() + "x").json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
    until(lambda: server.metric("kv_blocks_total") - server.metric("kv_blocks_free") >= pinned)


def test_the_server_may_be_ended_between_two_engines(start, until):
    server = start(restart_seconds=30)
    server.engine.kill()
    until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
    family = psutil.Process(server.process.pid).children()
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert all(not member.is_running() or member.status() == psutil.STATUS_ZOMBIE for member in family)
    assert server.leftovers() == []
