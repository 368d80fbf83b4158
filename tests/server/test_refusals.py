"""Every bad request gets 400 in OpenAI's shape, naming the parameter and what is allowed (A6, A7), and hurts nobody."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chairlift.config import EngineConfig
from chairlift.core.plan import Capacity
from chairlift.core.request import SamplingParams
from chairlift.errors import ContextTooLong, ParameterError
from chairlift.server import app, ipc, schemas
from chairlift.server.app import create_app
from chairlift.server.client import EngineClient
from chairlift.server.metrics import Metrics
from chairlift.server.service import Service

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}


def refused(response: httpx.Response, status: int = 400) -> dict:
    """The error of a refused request, after a check of its shape."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return error


@pytest.fixture
def service():
    """A service with a context of 100,000 tokens that is ready but for the tokenizer."""
    client = EngineClient(None)
    client._receive(ipc.Ready(0, Capacity(10**4, 16, 10**5), {}))
    return Service(client, EngineConfig(), ["toy"], Metrics())


OUT_OF_RANGE = [
    ("temperature", -0.1, "0 to 2"),
    ("temperature", 2.1, "0 to 2"),
    ("top_p", 0, "above 0 and at most 1"),
    ("top_p", 1.5, "above 0 and at most 1"),
    ("top_k", -2, "-1 to"),
    ("min_p", 1.1, "0 to 1"),
    ("n", 0, "1 to"),
    ("n", 33, "1 to 32"),
    ("n", 1000, "1 to 128"),
    ("max_tokens", 0, "1 to"),
    ("max_tokens", -5, "1 to"),
    ("min_tokens", 3, "at most max_tokens"),
    ("seed", -1, "0 to 18446744073709551615"),
    ("seed", 2**64, "0 to 18446744073709551615"),
    ("presence_penalty", 2.5, "-2 to 2"),
    ("frequency_penalty", -2.5, "-2 to 2"),
    ("repetition_penalty", 0, "above 0"),
    ("logit_bias", {"5": 101}, "-100 to 100"),
    ("logit_bias", {"five": 1}, "token ids"),
    ("logit_bias", {"258": 1}, "0 to 257"),
    ("stop_token_ids", [258], "0 to 257"),
    ("stop_token_ids", [-1], "from 0"),
    ("stop", [""], "non-empty"),
    ("stop", ["x"] * 17, "at most 16"),
    ("stop", "x" * 257, "at most 256"),
    ("stop", [1], "string"),
    ("best_of", 0, "1 to 128"),
    ("best_of", 33, "1 to 32"),
    ("best_of", 129, "1 to 128"),
    ("use_beam_search", 1, "true or false"),
    ("length_penalty", 11, "-10 to 10"),
    ("length_penalty", 0.5, "use_beam_search"),
    ("priority", 2**31, "-2147483648 to 2147483647"),
    ("priority", "", "whole number"),
    ("priority", 1, "--order priority"),
    ("ttft_ms", 0, "above 0"),
    ("deadline_ms", -1, "above 0"),
    ("deadline_ms", 1e10, "at most 1e+09"),
    ("user", 7, "string"),
    ("user", "u" * 513, "at most 512"),
]


@pytest.mark.parametrize(("param", "value", "allowed"), OUT_OF_RANGE)
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_out_of_range(server, path, body, param, value, allowed):
    error = refused(server.post(path, **body | {param: value}))
    assert error["param"] == param
    assert param in error["message"] and allowed in error["message"]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_settings_of_one_request_that_contradict_each_other(server, path, body):
    """No parameter is without effect in silence, and what is chosen at the end cannot be streamed."""
    for more, param, words in (
        ({"n": 3, "best_of": 2}, "best_of", "from 3 to 128"),
        ({"best_of": 2, "stream": True}, "best_of", "leave out stream or best_of"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search", "leave out stream or use_beam_search"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", "no effect with use_beam_search"),
        ({"use_beam_search": True, "n": 65}, "n", "from 1 to 64"),
        ({"use_beam_search": True, "n": 2, "best_of": 33}, "best_of", "from 1 to 32 (max-num-seqs)"),
    ):
        error = refused(server.post(path, **body | more))
        assert error["param"] == param and words in error["message"]
    for more in ({"n": 2, "best_of": 2, "stream": True}, {"best_of": 1, "stream": True}, {"priority": 0}):
        assert server.post(path, **body | more).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {}, "prompt", "required"),
        ("/v1/completions", {"prompt": ""}, "prompt", "at least one token"),
        ("/v1/completions", {"prompt": []}, "prompt", "1 to 256"),
        ("/v1/completions", {"prompt": ["a"] * 257}, "prompt", "1 to 256"),
        ("/v1/completions", {"prompt": ["a"] * 100, "n": 6}, "n", "at most 512"),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt", "list of strings"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt", "list of strings"),
        ("/v1/completions", {"prompt": [True]}, "prompt", "list of strings"),
        ("/v1/completions", {"prompt": [258]}, "prompt", "0 to 257"),
        ("/v1/completions", {"prompt": [[-1]]}, "prompt", "0 to 257"),
        ("/v1/completions", {"prompt": [10**30]}, "prompt", "0 to 257"),
        ("/v1/completions", TEXT | {"logprobs": 21}, "logprobs", "0 to 20"),
        ("/v1/completions", TEXT | {"logprobs": True}, "logprobs", "a whole number from 0 to 20"),
        ("/v1/completions", {"prompt": ["a"] * 30, "best_of": 20}, "best_of", "at most 512"),
        ("/v1/completions", TEXT | {"echo": True}, "echo", "not supported"),
        ("/v1/completions", TEXT | {"suffix": "x"}, "suffix", "not supported"),
        ("/v1/completions", TEXT | {"temperature": "0"}, "temperature", "number"),
        ("/v1/completions", TEXT | {"stream": "yes"}, "stream", "boolean"),
        ("/v1/completions", TEXT | {"stream_options": {}}, "stream_options", "stream: true"),
        ("/v1/completions", TEXT | {"stream": True, "stream_options": {"a": 1}}, "stream_options.a", "not a parameter"),
        ("/v1/completions", TEXT | {"temprature": 1}, "temprature", "not a parameter"),
        ("/v1/chat/completions", {}, "messages", "required"),
        ("/v1/chat/completions", {"messages": []}, "messages", "1 to 4096"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages", "list"),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "user"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
            "'image_url'",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0]",
            "tool_calls is not supported",
        ),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 21, "logprobs": True}, "top_logprobs", "0 to 20"),
        ("/v1/chat/completions", CHAT | {"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ("/v1/chat/completions", CHAT | {"tools": [{"type": "function"}]}, "tools", "not supported"),
        ("/v1/chat/completions", CHAT | {"tool_choice": "required"}, "tool_choice", "not supported"),
        ("/v1/chat/completions", CHAT | {"functions": [{}]}, "functions", "not supported"),
        (
            "/v1/chat/completions",
            CHAT | {"response_format": {"type": "json_object"}},
            "response_format",
            "{'type': 'text'}",
        ),
        ("/v1/chat/completions", CHAT | {"modalities": ["audio"]}, "modalities", "not supported"),
        ("/v1/chat/completions", CHAT | {"audio": {}}, "audio", "not supported"),
        ("/v1/chat/completions", CHAT | {"store": True}, "store", "not supported"),
        ("/v1/chat/completions", CHAT | {"service_tier": "flex"}, "service_tier", "not supported"),
        ("/v1/chat/completions", CHAT | {"max_completion_tokens": 3}, "max_tokens", "mean the same"),
        (
            "/v1/chat/completions",
            {"messages": CHAT["messages"], "max_completion_tokens": 0},
            "max_completion_tokens",
            "max_completion_tokens must be a whole number from 1",
        ),
    ],
)
def test_refused_by_name(server, path, body, param, words):
    error = refused(server.post(path, **body))
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_values_that_ask_for_nothing_are_accepted(server, path):
    neutral = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "logit_bias": None,
        "stop": None,
        "seed": None,
        "echo": False,
        "best_of": 1,
        "stream": None,
        "stream_options": None,
    }
    own = (
        {"suffix": None}
        if path == "/v1/completions"
        else {"tools": None, "tool_choice": "none", "modalities": ["text"]}
    )
    body = TEXT if path == "/v1/completions" else CHAT
    assert server.post(path, **body | neutral | own).status_code == 200


def test_roles_and_parts(server):
    """All roles without tools, text parts, and an assistant message as the client got it."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "y"},
    ]
    answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == len("system: s\nuser: a\nb\nassistant: x\nuser: y\n")


def test_prompt_and_output_must_fit_the_context(server):
    """C9: an asked length that does not fit is refused, with the limit and what to change; the default is cut."""
    error = refused(server.post("/v1/completions", prompt="x" * 250, max_tokens=7))
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert "257" in error["message"] and "256" in error["message"] and "lower max_tokens to 6" in error["message"]
    assert server.post("/v1/completions", prompt="x" * 250, max_tokens=6).status_code == 200
    assert server.post("/v1/completions", prompt="x" * 250).json()["usage"]["completion_tokens"] == 6
    error = refused(server.post("/v1/completions", prompt="x" * 256))
    assert error["param"] == "prompt" and "--max-model-len" in error["message"]
    chat = [{"role": "user", "content": "x" * 300}]
    assert refused(server.post("/v1/chat/completions", messages=chat))["param"] == "messages"


def test_what_the_whole_cache_cannot_hold_is_refused(start):
    """M1: 8 blocks of 16 tokens, and a context of 256."""
    server = start(kv_cache_memory="8")
    error = refused(server.post("/v1/completions", prompt="x" * 100, max_tokens=29))
    assert "129 tokens, which need 9 KV blocks, and the whole cache has 8" in error["message"]
    assert server.post("/v1/completions", prompt="x" * 100, max_tokens=28).status_code == 200


def test_the_room_is_that_of_all_groups(toy):
    """4 blocks of 16 positions in each of two full groups, and 4 in one with a window of 17."""
    engine = SimpleNamespace(epoch=0, send=lambda message: None)
    client = EngineClient(engine)
    service = Service(client, EngineConfig(), ["toy"], Metrics())
    service.tokenizer = toy.ToyTokenizer()

    def send(num_blocks):
        capacity = Capacity(num_blocks, 16, 1000, windows=(0, 17, 0))
        client._receive(ipc.Ready(0, capacity, {"max_num_batched_tokens": 16}))
        params = SamplingParams(max_tokens=24)
        service.generate("r", [[1] * 40], params, arrival=0.0, prompt_param="prompt", limit_param="max_tokens").close()

    send(12)
    with pytest.raises(ContextTooLong, match="64 tokens, which need 12 KV blocks, and the whole cache has 11"):
        send(11)


def test_a_refusal_of_the_scheduler_is_the_clients_fault(start):
    """With the reserve gate n samples need more than the cache: only the scheduler can tell."""
    server = start(kv_cache_memory="8", admission="reserve")
    error = refused(server.post("/v1/completions", prompt="x", max_tokens=60, n=3))
    assert "KV blocks" in error["message"]
    assert refused(server.post("/v1/completions", prompt="x", max_tokens=60, n=3, stream=True)) == error
    assert server.post("/v1/completions", prompt="x", max_tokens=40, n=2).status_code == 200


def test_unknown_model(server):
    error = refused(server.post("/v1/completions", prompt="x", model="gpt-9"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'toy'" in error["message"]


NUMERIC = {
    "n": "from 1 to",
    "max_tokens": "from 1 to",
    "min_tokens": "from 0 to",
    "temperature": "from 0 to 2",
    "top_p": "above 0 and at most 1",
    "top_k": "from -1 to",
    "min_p": "from 0 to 1",
    "seed": "from 0 to 18446744073709551615",
    "presence_penalty": "from -2 to 2",
    "frequency_penalty": "from -2 to 2",
    "repetition_penalty": "above 0 and at most 100",
    "stop_token_ids": "from 0 to 2147483647",
    "best_of": "from 1 to 128",
    "length_penalty": "from -10 to 10",
    "priority": "from -2147483648 to 2147483647",
    "ttft_ms": "above 0 and at most 1e+09",
    "deadline_ms": "above 0 and at most 1e+09",
    "logit_bias": "from -100 to 100",
}
CHAT_NUMERIC = {"max_completion_tokens": "from 1 to", "top_logprobs": "from 0 to 20"}
JSON_HEADERS = {"content-type": "application/json"}
NO_NUMBERS = ("NaN", "-Infinity", "1e999", '"1"', "true", "[1.5]", '{"1": NaN}', "9" * 5000, "-" + "9" * 4000)


@pytest.mark.parametrize("value", [*NO_NUMBERS, '["x"]'], ids=lambda value: value[:12])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_what_is_no_number_is_told_the_range(server, path, value):
    """A7: the type is wrong, and the message names the parameter, what is allowed, and a short form of the value."""
    base, own = (TEXT, {"logprobs": "from 0 to 20"}) if path == "/v1/completions" else (CHAT, CHAT_NUMERIC)
    for param, allowed in (NUMERIC | own).items():
        body = {name: other for name, other in base.items() if name != "max_tokens"}
        text = json.dumps(body)[:-1] + f', "{param}": {value}}}'
        error = refused(server.http.post(path, content=text, headers=JSON_HEADERS))
        assert error["param"] == param
        assert error["message"].count(param) and allowed in error["message"]
        assert len(error["message"]) < 250


def test_unknown_paths_and_methods(server):
    refused(server.http.get("/v1/nothing"), 404)
    refused(server.http.get("/v1/completions"), 405)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b'{"prompt": NaN}', b"[" * 100_000, b'{"a":1}{']
)
def test_malformed_bodies(server, body):
    refused(server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"prompt": "\xff"}', None, "not valid UTF-8: invalid start byte at byte 12"),
        (b'{"prompt": "x"', None, "not valid JSON: expecting ',' delimiter at line 1, column 15"),
        (b'{"prompt": ' + b"[" * 10**6, None, "nested too deeply"),
        (b'{"prompt": [' + b"9" * 5000 + b"]}", "prompt", "from 0 to 257, got 999"),
        (b'{"prompt": NaN}', "prompt", "list of token ids, or a list of such lists, got nan"),
        (b'{"prompt": "x", "best_of": ' + b"9" * 5000 + b"}", "best_of", "from 1 to 128, got 999"),
        (b'{"prompt": "x", "stream": "' + b"y" * 10**5 + b'"}', "stream", "valid boolean, got 'yyy"),
        (b'{"prompt": "x", "model": "' + b"y" * 10**5 + b'"}', "model", "'yyy"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_wrong_with_a_body_is_told(server, body, param, words):
    response = server.http.post("/v1/completions", content=body, headers=JSON_HEADERS)
    error = refused(response, response.status_code)
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and words in error["message"]
    assert len(error["message"]) < 300


def test_too_much_is_refused_before_it_is_looked_at(server):
    """S6: a list's length is checked first. Each element here is wrong, and none is named."""
    part, user = {"type": "none"}, {"role": "user"}
    many = dict.fromkeys(map(str, range(1000)), 1)
    for path, body, param, words in (
        ("/v1/completions", TEXT | {"stop_token_ids": ["x"] * 1025}, "stop_token_ids", "1025 tokens; at most 1024"),
        ("/v1/completions", TEXT | {"stop": [1] * 17}, "stop", "17 strings; at most 16"),
        ("/v1/completions", TEXT | {"logit_bias": dict.fromkeys(map(hex, range(1025)), "x")}, "logit_bias", "1024"),
        ("/v1/completions", {"prompt": [[]] * 257}, "prompt", "1 to 256 prompts, got 257"),
        ("/v1/completions", {"prompt": [1, "x"] * 2**19 + [1]}, "prompt", "1048577 tokens; at most 1048576"),
        ("/v1/completions", {"prompt": [["x"] * 2**20, ["x"]]}, "prompt", "1048577 tokens; at most 1048576"),
        ("/v1/chat/completions", {"messages": [1] * 4097}, "messages", "1 to 4096 messages, got 4097"),
        ("/v1/chat/completions", {"messages": [user | {"content": [part] * 2049}] * 2}, "messages", "4098 parts"),
        ("/v1/completions", TEXT | many, None, "1002 parameters; at most 128"),
        ("/v1/chat/completions", {"messages": [many]}, "messages[0]", "1000 parameters; at most 128"),
    ):
        error = refused(server.post(path, **body))
        assert error["param"] == param and words in error["message"]


def test_a_text_that_can_never_fit_is_not_tokenised(service, toy):
    """S6: its length alone tells, so that nobody waits for it."""

    class Never(toy.ToyTokenizer):
        longest_token = 100

        def encode(self, text, add_special_tokens=True):
            raise AssertionError("it is tokenised")

    service.tokenizer = Never()
    http = TestClient(create_app(service))
    text = "é" * 7_500_000
    for path, body, param in (
        ("completions", {"prompt": text}, "prompt"),
        ("completions", {"prompt": ["short", text]}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": text[: len(text) // 2]}] * 2}, "messages"),
    ):
        error = refused(http.post(f"/v1/{path}", json=body))
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert "at least 150000 tokens" in error["message"]
        assert "100000 tokens with at least one of output" in error["message"]
        assert "--max-model-len" in error["message"]


def test_health_answers_while_a_long_text_is_tokenised(service, toy):
    """S6: the tokenizer goes on only when /health has answered."""

    class Slow(toy.ToyTokenizer):
        begun, go_on = threading.Event(), threading.Event()

        def encode(self, text, add_special_tokens=True):
            self.begun.set()
            assert self.go_on.wait(30)
            raise ParameterError("prompt", "that was slow")

    service.tokenizer = slow = Slow()

    async def scenario():
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
            post = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x" * 5000}))
            assert await asyncio.to_thread(slow.begun.wait, 30)
            assert (await http.get("/health")).status_code == 200
            slow.go_on.set()
            assert refused(await post)["message"] == "that was slow"

    asyncio.run(scenario())


def test_lone_surrogates(server):
    for path, body, param in (
        ("completions", b'{"prompt": "\\ud800"}', "prompt"),
        ("completions", b'{"prompt": ["x", "\\ud800"]}', "prompt[1]"),
        ("completions", b'{"prompt": "x", "stop": "\\ud800"}', "stop"),
        ("completions", b'{"prompt": "x", "\\ud800": 1}', None),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "\\udfff"}]}', "messages[0].content"),
        ("chat/completions", b'{"messages": [{"role": "\\udfff", "content": ""}]}', "messages[0].role"),
    ):
        error = refused(server.http.post(f"/v1/{path}", content=body, headers={"content-type": "application/json"}))
        assert error["param"] == param


def test_not_a_number_in_a_parameter(server):
    body = b'{"prompt": "x", "temperature": NaN}'
    error = refused(server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"}))
    assert error["param"] == "temperature"


def test_missing_content_type_is_explained(server):
    error = refused(server.http.post("/v1/completions", content=b'{"prompt": "x"}'))
    assert "Content-Type: application/json" in error["message"]


def test_body_limit(server):
    """A declared length is enough to be refused; a body that only turns out to be too long is refused then."""
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    endings = (
        f"Content-Length: {app.MAX_BODY_BYTES + 1}\r\n\r\n".encode(),
        b"Transfer-Encoding: chunked\r\n\r\n" + chunk * (app.MAX_BODY_BYTES // 2**20) + b"1\r\n \r\n",
    )
    for ending in endings:  # neither body is complete
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(20)
            connection.sendall(head + ending)
            assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_garbage_instead_of_http(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00" * 100)
        connection.settimeout(10)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")
    assert server.post("/v1/completions", **TEXT).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({*schemas.CompletionRequest.model_fields, *schemas.ChatRequest.model_fields, "tools", "echo"})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), st.sampled_from(FIELDS), JSON)
def test_any_value_of_any_parameter_gives_an_answer(server, path, name, value):
    """A7: 200, or an error in shape; never a 5xx."""
    body = (TEXT if path == "/v1/completions" else CHAT) | {name: value}
    response = server.http.post(path, json=body)
    if response.status_code != 200:
        refused(response, response.status_code)
    assert response.status_code in (200, 400, 404)


@given(JSON)
def test_parsing_never_fails_in_another_way(value):
    """Only pydantic's error or our own comes out of the schemas."""
    from pydantic import ValidationError

    for model in (schemas.CompletionRequest, schemas.ChatRequest):
        for body in (value, {"prompt": value}, {"messages": value}, {"messages": [value]}):
            with suppress(ValidationError, ParameterError):
                model.model_validate(body).params()
