"""A client that leaves frees what its request holds, streamed or not, queued or running (D7, M12)."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import nullcontext, suppress

import pytest

from chairlift.config import EngineConfig
from chairlift.core.plan import Output, StepStats
from chairlift.core.request import FinishReason, Request, SamplingParams
from chairlift.errors import EngineDead
from chairlift.server import ipc
from chairlift.server.client import EngineClient
from chairlift.server.metrics import Metrics
from chairlift.server.responses import CompletionFormat
from chairlift.server.service import Generation
from chairlift.server.streaming import Answer
from chairlift.server.text import Transcript


def connect(server, **body):
    """A raw connection on which a request has been sent."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps({"prompt": "x", "temperature": 0, "max_tokens": 200} | body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_running_frees_its_blocks_within_two_steps(start, until, stream):
    """A step takes half a second here, so that what the metrics say belongs to the step in which it was asked."""
    server = start(model="toy-slowest")
    blocks = server.metric("kv_blocks_free")
    connection = connect(server, stream=stream, n=2)
    until(lambda: server.metric("requests_running") == 2)
    steps = server.metric("step_seconds_count")
    connection.close()
    until(lambda: server.metric("requests_running") == 0)
    assert server.metric("kv_blocks_free") == blocks
    assert server.metric("step_seconds_count") - steps <= 2
    assert server.metric('requests_finished_total{reason="abort"}') == 2


def test_queued(start, until):
    server = start(model="toy-slow", max_num_seqs=1)
    first = connect(server, stream=True)
    until(lambda: server.metric("requests_running") == 1)
    second = connect(server)
    until(lambda: server.metric("requests_waiting") == 1)
    second.close()
    until(lambda: server.metric("requests_waiting") == 0)
    assert server.metric("requests_running") == 1
    first.close()
    until(lambda: server.metric("requests_running") == 0)


def test_many_at_random_moments(start, until):
    """M5, M12: the engine lives, and every block comes back."""
    server = start()
    for k in range(60):
        connection = connect(server, stream=k % 2 == 0, n=1 + k % 3)
        if k % 4:
            connection.settimeout(0.001 * (k % 7))
            with suppress(OSError):
                connection.recv(100)
        connection.close()
    until(lambda: server.metric("requests_running") + server.metric("requests_waiting") == 0)
    assert server.metric("kv_blocks_free") == server.metric("kv_blocks_total")
    assert server.post("/v1/completions", prompt="x").status_code == 200


class FakeEngine:
    """Takes the place of a `Supervisor`; remembers what it is told."""

    epoch = 0
    was_stuck = False

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def generation(toy, client, n=1, **params):
    params = SamplingParams(n=n, max_tokens=50, **params)
    request = Request(id="r", token_ids=[1], num_prompt=1, params=params, seed=0, num_samples=n)
    transcripts = [Transcript(toy.ToyStream(True), params, frozenset()) for _ in range(n)]
    return Generation(client.submit([request]), [request], transcripts, 0.0, Metrics(), EngineConfig())


def answer(toy, generation):
    format = CompletionFormat("id", "toy", 0, toy.ToyTokenizer(), logprobs=False, include_usage=False)
    return Answer(generation, format, stream=True)


def test_the_abort_is_sent_at_once(toy):
    """The step that runs when the client leaves is the last that computes its request: the engine takes the abort
    before the next one."""

    async def scenario():
        engine = FakeEngine()
        client = EngineClient(engine)
        left = asyncio.Event()
        sent = []

        async def receive():
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        task = asyncio.create_task(answer(toy, generation(toy, client))({"type": "http"}, receive, send))
        await asyncio.sleep(0)
        client._receive(ipc.Outputs(0, [Output("r", new_token_ids=(97,))], StepStats()))
        await asyncio.sleep(0.01)
        left.set()
        await asyncio.wait_for(task, 10)
        assert engine.sent[1:] == [ipc.Abort(0, "r")]
        assert client.num_open == 0
        assert len(sent) >= 2

    asyncio.run(scenario())


def test_a_stop_string_ends_its_sample_in_the_engine(toy):
    """DESIGN rule 12: stop strings are the server's, which aborts. The other sample goes on."""

    async def scenario():
        engine = FakeEngine()
        client = EngineClient(engine)
        job = generation(toy, client, n=2, stop=("b",))
        deltas = job.deltas()
        news = [Output("r", 0, tuple(b"ab")), Output("r", 1, tuple(b"aa"))]
        client._receive(ipc.Outputs(0, news, StepStats()))
        gained = await anext(deltas)
        assert (gained[0].text, gained[0].stop_reason, gained[1].finish_reason) == ("a", "b", None)
        assert engine.sent[1:] == [ipc.Abort(0, "r", 0)]
        client._receive(ipc.Outputs(0, [Output("r", 0, (97,)), Output("r", 1, (99,))], StepStats()))
        assert list(await anext(deltas)) == [1]
        job.close()
        assert engine.sent[2:] == [ipc.Abort(0, "r")]

    asyncio.run(scenario())


def test_a_stop_string_and_a_later_token_in_one_piece(toy):
    """C7: a reader slower than the steps still gets the finish_reason, though the engine went on for a step."""

    async def scenario():
        client = EngineClient(FakeEngine())
        deltas = generation(toy, client, stop=("a",)).deltas()
        for byte in b"ab":
            client._receive(ipc.Outputs(0, [Output("r", new_token_ids=(byte,))], StepStats()))
        gained = [news async for news in deltas]
        assert [(news[0].finish_reason, news[0].stop_reason) for news in gained] == [(FinishReason.STOP, "a")]

    asyncio.run(scenario())


@pytest.mark.parametrize("begun", [False, True])
def test_a_stream_whose_engine_dies_is_counted_as_an_error(toy, begun):
    """O3: not as a client that left; the client is told by the last event, or by the status if nothing was sent."""

    async def scenario():
        client = EngineClient(FakeEngine())
        job = generation(toy, client)
        sent = []

        async def receive():
            await asyncio.sleep(100)

        async def send(message):
            sent.append(message)

        task = asyncio.create_task(answer(toy, job)({"type": "http"}, receive, send))
        await asyncio.sleep(0)
        if begun:
            client._receive(ipc.Outputs(0, [Output("r", new_token_ids=(97,))], StepStats()))
            await asyncio.sleep(0.01)
        client._exited(-9)
        with nullcontext() if begun else pytest.raises(EngineDead):
            await asyncio.wait_for(task, 10)
        assert [b"signal 9" in message.get("body", b"") for message in sent] == begun * [False, False, True, False]
        value = job._metrics.registry.get_sample_value
        ended = {r: value("chairlift_requests_finished_total", {"reason": r}) for r in ("abort", "error")}
        assert ended == {"abort": 0, "error": 1}

    asyncio.run(scenario())


def test_several_steps_make_one_piece(toy):
    """A reader that was busy finds all that came meanwhile, joined; the counts stay right."""

    async def scenario():
        client = EngineClient(FakeEngine())
        deltas = generation(toy, client).deltas()
        for byte in b"abc":
            client._receive(ipc.Outputs(0, [Output("r", new_token_ids=(byte,))], StepStats()))
        gained = await anext(deltas)
        assert (gained[0].text, gained[0].token_ids) == ("abc", list(b"abc"))

    asyncio.run(scenario())
