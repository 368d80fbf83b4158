"""GET /v1/requests: what lives, why it waits, and how a request has fared (B3, S8). The test plays the engine."""

from __future__ import annotations

import asyncio

import pytest
from fastapi.testclient import TestClient

from chairlift.config import EngineConfig
from chairlift.core.plan import Capacity
from chairlift.core.ports import LifeLine, Report, RequestView
from chairlift.errors import EngineDead, NotReady
from chairlift.server import client as client_module
from chairlift.server import inspection, ipc
from chairlift.server.app import create_app
from chairlift.server.client import EngineClient
from chairlift.server.metrics import Metrics
from chairlift.server.service import Service


class FakeEngine:
    """Answers at once from ``views`` and ``lives``, both by the engine's ids."""

    epoch = 0

    def __init__(self):
        self.client = EngineClient(self)
        self.client._receive(ipc.Ready(0, Capacity(100, 16, 1000), {}))
        self.views: list[RequestView] = []
        self.lives: dict[str, tuple[LifeLine, ...]] = {}
        self.answers = True
        self.asked: list[str | None] = []

    was_stuck = False

    def give_up(self, fruitful):
        return "it is the last"

    def send(self, message):
        if not isinstance(message, ipc.Inspect) or not self.answers:
            return
        asked = message.request_id
        self.asked.append(asked)
        views = tuple(view for view in self.views if asked in (None, view.id))
        report = Report(message.question, views, self.lives.get(asked, ()))
        frame = ipc.encode(ipc.Answer(0, report))
        self.client._receive(ipc.decode_for_api(frame))


def view(id, index=0, **more):
    return RequestView(
        id=id,
        index=index,
        tenant="t/u",
        priority=-1,
        num_prompt=5,
        num_output=3,
        num_computed=7,
        num_host_blocks=0,
        **{"state": "running", "num_blocks": 1, "num_preemptions": 0, "waited": 0.5} | more,
    )


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def service(engine):
    service = Service(engine.client, EngineConfig(), ["toy"], Metrics())
    service.tokenizer = object()
    return service


@pytest.fixture
def http(service):
    return TestClient(create_app(service))


def test_the_live_ones_in_the_engines_order(engine, http):
    assert http.get("/v1/requests").json() == {"object": "list", "data": []}
    engine.views = [
        view("cmpl-b-1", 2),
        view("cmpl-a-0", state="waiting", position=1, reason="blocks", estimated_start=1.5),
    ]
    first, second = http.get("/v1/requests").json()["data"]
    assert (first["id"], first["prompt"], first["index"], first["state"]) == ("cmpl-b", 1, 2, "running")
    assert (first["position"], first["reason"], first["estimated_start"]) == (None, None, None)
    assert (second["id"], second["position"], second["reason"], second["estimated_start"]) == (
        "cmpl-a",
        1,
        "blocks",
        1.5,
    )
    assert set(first) == {"prompt", *RequestView.__dataclass_fields__}
    assert http.head("/v1/requests").status_code == 200


def test_the_life_of_one(engine, http, service):
    """Of all its prompts, and of no other request."""
    service.requests.remember("cmpl-a", 2)
    engine.views = [view("cmpl-a-1"), view("cmpl-b-0"), view("cmpl-a-10")]
    engine.lives = {
        "cmpl-a-0": (LifeLine(0.0, 3, 3, 0, "queued"), LifeLine(0.1, 4, 9, 0, "decode", "6 tokens")),
        "cmpl-a-1": (LifeLine(0.0, 3, 3, 0, "waits", "slots"),),
    }
    answer = http.get("/v1/requests/cmpl-a").json()
    assert (answer["id"], answer["object"]) == ("cmpl-a", "request")
    assert [(v["id"], v["prompt"]) for v in answer["requests"]] == [("cmpl-a", 1)]
    line = {"seconds": 0.1, "step": 4, "last_step": 9, "prompt": 0, "index": 0, "what": "decode", "detail": "6 tokens"}
    assert answer["life"][1] == line
    assert [(line["prompt"], line["what"]) for line in answer["life"]] == [(0, "queued"), (0, "decode"), (1, "waits")]


def test_a_request_of_many_prompts_takes_few_questions(engine, http, service):
    """All its sequences are shown by one; `life` names the prompts that it tells of, the live ones first."""
    service.requests.remember("cmpl-a", 256)
    engine.views = [view(f"cmpl-a-{prompt}") for prompt in (200, 3, 255)] + [view("cmpl-b-7")]
    engine.lives = {f"cmpl-a-{prompt}": (LifeLine(0.0, 1, 1, 0, "queued"),) for prompt in range(256)}
    answer = http.get("/v1/requests/cmpl-a").json()
    assert [shown["prompt"] for shown in answer["requests"]] == [3, 200, 255]
    assert answer["num_prompts"] == 256
    assert answer["life_prompts"] == [3, 200, *range(242, 256)]
    assert [line["prompt"] for line in answer["life"]] == answer["life_prompts"]
    assert len(engine.asked) == 1 + inspection.MAX_LIVES and engine.asked[0] is None


def test_an_unknown_request_takes_no_question(engine, http):
    assert http.get("/v1/requests/cmpl-a").status_code == 404
    assert engine.asked == []


def test_one_that_has_ended_still_has_a_life(engine, http, service):
    service.requests.remember("cmpl-a", 1)
    engine.lives["cmpl-a-0"] = (LifeLine(0.0, 1, 1, 0, "ended"),)
    answer = http.get("/v1/requests/cmpl-a").json()
    assert answer["requests"] == [] and len(answer["life"]) == 1


@pytest.mark.parametrize("id", ["cmpl-a", "cmpl-a-0", "0", "%00", "%2e%2e", "x" * 5000, "🚠"])
def test_unknown(engine, http, service, id):
    service.requests.remember("cmpl-a", 1)  # and the engine knows nothing of it any more
    answer = http.get(f"/v1/requests/{id}")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "request_not_found")
    assert "GET /v1/requests" in error["message"] and len(error["message"]) < 300


def test_what_is_remembered_is_bounded(engine, service, monkeypatch):
    monkeypatch.setattr(inspection, "MAX_REMEMBERED", 3)
    engine.lives = {f"r{k}-0": (LifeLine(0.0, 1, 1, 0, "ended"),) for k in range(5)}
    for k in range(5):
        service.requests.remember(f"r{k}", 1)
    for k in range(2):
        with pytest.raises(inspection.RequestNotFound):
            asyncio.run(service.requests.one(f"r{k}"))
    assert asyncio.run(service.requests.one("r2"))["life"]


def test_an_engine_that_does_not_answer(engine, http, monkeypatch):
    monkeypatch.setattr(client_module, "INSPECT_SECONDS", 0.01)
    engine.answers = False
    answer = http.get("/v1/requests")
    assert answer.status_code == 503 and "did not answer" in answer.json()["error"]["message"]
    assert engine.client._questions == {}, "a question is forgotten with its asker"
    engine.client._receive(ipc.Answer(0, Report(0)))  # too late, and harmless


def test_an_engine_that_dies_while_it_is_asked(engine):
    engine.answers = False

    async def scenario():
        question = asyncio.create_task(engine.client.inspect())
        await asyncio.sleep(0)
        engine.client._exited(-9)
        with pytest.raises(EngineDead, match="signal 9"):
            await question
        with pytest.raises(EngineDead):
            await engine.client.inspect()

    asyncio.run(scenario())


def test_before_the_engine_is_ready(service, http):
    service.tokenizer = None
    assert http.get("/v1/requests").status_code == http.get("/v1/requests/x").status_code == 503
    with pytest.raises(NotReady):
        service.require_ready()


def test_numbers_that_json_cannot_say(engine, http):
    engine.views = [view("r-0", waited=float("inf"), estimated_start=float("nan"))]
    (shown,) = http.get("/v1/requests").json()["data"]
    assert shown["waited"] is None and shown["estimated_start"] is None
