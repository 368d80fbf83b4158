"""What a client may ask of one request beyond sampling: whose it is, how urgent, how chosen, and how it fares."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

PROMPT = "a prompt of some length, that fills whole blocks of the cache."
BODIES = {"/v1/completions": {"prompt": "x"}, "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]}}


def texts(answer):
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


@pytest.mark.parametrize("path", BODIES)
def test_best_of_returns_the_likeliest_samples(server, path):
    """The same samples as n draws them; those of the greatest mean logprob come first, and all are counted."""
    ask = BODIES[path] | {"max_tokens": 12, "seed": 3}
    logprobs = {"logprobs": 0} if path == "/v1/completions" else {"logprobs": True}
    drawn = server.post(path, **ask, n=5, **logprobs).json()

    def mean(choice):
        if path == "/v1/completions":
            values = choice["logprobs"]["token_logprobs"]
        else:
            values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return sum(values) / len(values)

    means = [mean(choice) for choice in drawn["choices"]]
    assert len(set(means)) == 5
    order = sorted(range(5), key=lambda k: -means[k])
    chosen = server.post(path, **ask, n=2, best_of=5).json()
    assert texts(chosen) == [texts(drawn)[k] for k in order[:2]]
    assert [choice["index"] for choice in chosen["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in chosen["choices"]), "they were not asked for"
    assert chosen["usage"]["completion_tokens"] == 60
    assert server.metric("requests_running") == 0


def test_api_keys_do_not_share_a_cache(server):
    """DESIGN 5, rule 13: what one key has sent is not to be found out by another, whatever `user` it sends."""

    def cached(key, user=None):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        body = {"prompt": PROMPT, "max_tokens": 1, "user": user}
        answer = server.http.post("/v1/completions", json=body, headers=headers).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("one") == 48
    assert cached("two") == cached(None) == cached("one", "me") == 0
    assert cached("two") == cached(None) == cached("one", "me") == 48


@pytest.mark.parametrize("path", BODIES)
def test_a_deadline_is_told_as_such(start, path):
    """S9, S10: neither `length` nor `stop`, whole or streamed, with what there is by then."""
    server = start(model="toy-slow")
    ask = BODIES[path] | {"max_tokens": 200, "temperature": 0, "deadline_ms": 400}
    whole = server.post(path, **ask).json()
    assert whole["choices"][0]["finish_reason"] == "deadline"
    assert 0 < whole["usage"]["completion_tokens"] < 200
    with server.http.stream("POST", path, json=ask | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[-1]["choices"][0]["finish_reason"] == "deadline"
    assert server.metric('requests_finished_total{reason="deadline"}') == 2
    assert server.metric('goodput_requests_total{outcome="late_deadline"}') == 2


def test_a_deadline_in_the_queue(start, until):
    """S9: it ends while another holds the only slot; nothing was generated, and that is no error of the server."""
    server = start(model="toy-slow", max_num_seqs=1)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(server.post, "/v1/completions", prompt="x", max_tokens=40, temperature=0)
        until(lambda: server.metric("requests_running") == 1)
        late = server.post("/v1/completions", prompt="y", ttft_ms=100)
        assert not first.done()
        assert late.status_code == 200 and late.json()["choices"][0]["finish_reason"] == "deadline"
        assert late.json()["usage"]["completion_tokens"] == 0
        assert server.metric('goodput_requests_total{outcome="late_ttft"}') == 1
        assert first.result().json()["choices"][0]["finish_reason"] == "length"


def test_a_lower_number_goes_first(start, until):
    """S3: it takes the place of a running request of a higher number, and both get all their tokens."""
    server = start(model="toy-slow", max_num_seqs=1, order="priority")
    ask = {"prompt": "x", "max_tokens": 20, "temperature": 0}
    alone = texts(server.post("/v1/completions", **ask).json())
    done = []

    def post(priority):
        done.append((priority, texts(server.post("/v1/completions", **ask, priority=priority).json())))

    slow = threading.Thread(target=post, args=(5,))
    slow.start()
    until(lambda: server.metric("requests_running") == 1)
    post(-5)
    slow.join(60)
    assert done == [(-5, alone), (5, alone)]
    assert server.metric("preemptions_total") == 1
    assert any("1 preemption since the start" in line and "--order priority" in line for line in server.log), server.log


def test_who_waits_and_why(start, until):
    """B3, S8: the position in the queue, and the resource that binds."""
    server = start(model="toy-slow", max_num_seqs=1)
    ask = {"prompt": "tell nobody", "max_tokens": 30, "temperature": 0, "user": "me"}
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(server.post, "/v1/completions", **ask) for _ in range(3)]
        until(lambda: server.metric("requests_running") == 1 and server.metric("requests_waiting") == 2)
        until(lambda: server.metric('waiting_reason{reason="slots"}') == 1)
        answer = server.http.get("/v1/requests")
        running, *waiting = answer.json()["data"]
        assert running["state"] == "running" and running["position"] is None
        assert [(view["state"], view["position"]) for view in waiting] == [("waiting", 1), ("waiting", 2)]
        assert waiting[0]["reason"] == "slots"
        assert {view["tenant"] for view in (running, *waiting)} == {"/me"}
        assert "nobody" not in answer.text and "token_ids" not in answer.text
        life = server.http.get(f"/v1/requests/{running['id']}").json()
        assert [view["id"] for view in life["requests"]] == [running["id"]]
        assert [line["what"] for line in life["life"]][:2] == ["queued", "boarded"]
        for job in jobs:
            answer = job.result().json()
            told = server.http.get(f"/v1/requests/{answer['id']}").json()
            assert told["life"][-1]["what"] == "ended"
    assert server.http.get("/v1/requests").json()["data"] == []
    assert server.http.get("/v1/requests/cmpl-0").status_code == 404


def test_each_prompt_of_a_request_has_a_life(server):
    id = server.post("/v1/completions", prompt=["a", "b"], n=2, max_tokens=2).json()["id"]
    life = server.http.get(f"/v1/requests/{id}").json()["life"]
    assert {(line["prompt"], line["index"]) for line in life} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_pinned_prefix_is_there_for_everybody(start, tmp_path):
    """It is computed before the first request, whoever sends that."""
    path = tmp_path / "system.txt"
    path.write_text(PROMPT)
    server = start(pin_prefix=str(path))
    for key in ("one", "two"):
        body = {"prompt": f"{PROMPT} And {key}?", "max_tokens": 1}
        answer = server.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48


@pytest.mark.parametrize(("text", "words"), [(None, "cannot be read"), ("short", "whole KV blocks"), ("", "is empty")])
def test_a_prefix_that_cannot_be_pinned_ends_the_start(start, tmp_path, text, words):
    path = tmp_path / "system.txt"
    if text is not None:
        path.write_text(text)
    server = start(wait=False, pin_prefix=str(path))
    assert server.wait() == 1
    assert [line for line in server.log if line.startswith("error: --pin-prefix ") and words in line], server.log
    assert not any("Traceback" in line for line in server.log)


def test_a_prefix_that_the_cache_has_no_room_for_ends_the_start(start, tmp_path):
    """Before the server says that it is ready."""
    path = tmp_path / "system.txt"
    path.write_text("x" * 240)
    server = start(wait=False, pin_prefix=str(path), kv_cache_memory="28")
    assert server.wait() == 1
    assert "error: --pin-prefix needs 15 KV blocks for good" in server.log[-1]
    assert not any("ready after" in line for line in server.log)


def test_a_pipe_for_a_prefix_starts_nothing(start, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    server = start(wait=False, pin_prefix=str(tmp_path / "pipe"))
    assert server.wait() == 1
    assert [line for line in server.log if line.startswith("error: --pin-prefix")] == server.log
