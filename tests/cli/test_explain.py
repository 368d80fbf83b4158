"""`chairlift explain` against a server that the test plays."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from chairlift.cli.explain import explain
from chairlift.core.recorder import EXPLANATIONS, REASONS
from chairlift.errors import ChairliftError

VIEW = {
    "id": "cmpl-a",
    "prompt": 0,
    "index": 1,
    "state": "running",
    "tenant": "",
    "priority": 0,
    "num_prompt": 11,
    "num_output": 22,
    "num_computed": 32,
    "num_blocks": 3,
    "num_host_blocks": 0,
    "num_preemptions": 0,
    "waited": 1.25,
    "position": None,
    "reason": None,
    "estimated_start": None,
}
WAITING = VIEW | {"id": "cmpl-b", "state": "waiting", "position": 2, "reason": "blocks", "estimated_start": 4.5}


def line(what: str, step: int, last_step: int, detail: str = "") -> dict[str, Any]:
    return {
        "seconds": step / 100,
        "step": step,
        "last_step": last_step,
        "prompt": 0,
        "index": 0,
        "what": what,
        "detail": detail,
    }


LIFE = [
    line("queued", 10, 10),
    line("waits", 11, 11, "slots"),
    line("boarded", 12, 12),
    line("decode", 12, 95, "beside 10 others"),
    line("decode", 96, 98, "beside 0 others"),
]


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    """``serve(body, status)`` answers everything so; it returns the address. ``serve.asked``: the last path."""
    reply: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply["asked"] = self.path
            self.send_response(reply["status"])
            self.end_headers()
            self.wfile.write(reply["body"])

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def serve(body: Any, status: int = 200) -> str:
        reply.update(body=body if isinstance(body, bytes) else json.dumps(body).encode(), status=status)
        return f"http://127.0.0.1:{server.server_port}"

    serve.reply = reply  # type: ignore[attr-defined]
    yield serve
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``shown(url, id)``: what the command prints."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "dumb")

    def shown(url: str, id: str | None = None) -> str:
        explain(id, url)
        return capsys.readouterr().out

    return shown


@pytest.fixture
def terminal(shown: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The same on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def terminal(url: str, id: str | None = None) -> str:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # of the stream that takes what the test prints
        return shown(url, id)

    return terminal


def test_all_that_live(serve: Callable[..., str], shown: Callable[..., str]) -> None:
    header, running, waiting = shown(serve({"object": "list", "data": [VIEW, WAITING]}) + "/").splitlines()
    assert serve.reply["asked"] == "/v1/requests"
    heads = ["Request", "Sample", "State", "Age", "Position", "Boards in", "Prompt", "Output", "Blocks", "Waits, since"]
    assert header.split() == " ".join(heads).split(), "nobody was preempted, and all have one priority and no tenant"
    assert running.split() == ["cmpl-a", "0.1", "running", "1.250", "s", "11", "22", "3"]
    assert waiting.split()[:9] == ["cmpl-b", "0.1", "waiting", "1.250", "s", "2", "4.500", "s", "11"]
    assert waiting.endswith(f"  {EXPLANATIONS['blocks']}")
    assert waiting.index(" 2 ") + 1 == header.index("Position")
    assert shown(serve({"object": "list", "data": []})) == "nothing runs or waits\n"


def many() -> list[dict[str, Any]]:
    """All that can be said of a request, for each reason; with the longest ids."""
    return [
        WAITING | {"id": f"chatcmpl-{k:032x}", "reason": reason, "num_preemptions": 1, "num_host_blocks": 5}
        for k, reason in enumerate(REASONS)
    ]


def test_no_id_and_no_reason_is_cut(serve: Callable[..., str], terminal: Callable[..., str]) -> None:
    """On 80 columns two lines or more tell of each; what is folded is folded between words."""
    views = many()
    header, *lines = terminal(serve({"data": views})).splitlines()
    assert header.split() == ["Request", "Sample", "State", "Age"]
    assert max(map(len, lines)) <= 80 and not any(line != line.rstrip() for line in lines)
    first = [line for line in lines if not line.startswith(" ")]
    assert [line.split() for line in first] == [[view["id"], "0.1", "waiting", "1.250", "s"] for view in views]
    text = " ".join(" ".join(lines).split())
    for view in views:
        assert f"preempted 1; waits, since {EXPLANATIONS[view['reason']]}" in text
    assert "position 2; boards in 4.500 s; prompt 11; output 22; blocks 3; swapped out 5; preempted 1; " in text
    for word in "--kv-cache-memory", "--scheduler-policy", "--max-num-batched-tokens":
        assert any(word in line for line in lines), word


def test_a_line_is_enough_where_it_fits(serve: Callable[..., str], terminal: Callable[..., str]) -> None:
    header, line = terminal(serve({"data": [VIEW | {"index": 0}]})).splitlines()
    assert header.split() == ["Request", "State", "Age", "Prompt", "Output", "Blocks"]
    assert line.split() == ["cmpl-a", "running", "1.250", "s", "11", "22", "3"]


def test_a_pipe_gets_whole_lines(serve: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    views = many()
    explain(None, serve({"data": views}))
    _, *lines = capsys.readouterr().out.splitlines()
    for text, view in zip(lines, views, strict=True):
        assert text.startswith(view["id"]) and EXPLANATIONS[view["reason"]] in text
    explain("x", serve({"requests": views, "life": [line("waits", 1, 1, reason) for reason in REASONS]}))
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(REASONS) + 1


def test_a_life(serve: Callable[..., str], shown: Callable[..., str]) -> None:
    state, header, *lines = shown(serve({"requests": [WAITING], "life": LIFE}), "cmpl-b").splitlines()
    assert serve.reply["asked"] == "/v1/requests/cmpl-b"
    assert state.startswith("prompt 0, sample 1: waiting, number 2 in the queue, boards in about 4.5 s: ")
    assert EXPLANATIONS["blocks"] in state and "11 prompt tokens, 22 generated, 3 KV blocks" in state
    assert header.split() == ["Time", "Steps", "Sample", "What", "Detail"]
    assert [line.split()[0] for line in lines] == ["0.100", "0.110", "0.120", "0.120", "0.960"]
    assert "step 10 " in lines[0] and "steps 12-95" in lines[3] and "decode" in lines[3]
    assert lines[3].split()[-3:] == ["beside", "10", "others"] and lines[4].split()[-2:] == ["decode", "alone"]
    assert EXPLANATIONS["slots"] in lines[1]


def test_a_life_that_is_over(serve: Callable[..., str], shown: Callable[..., str]) -> None:
    assert shown(serve({"requests": [], "life": LIFE}), "cmpl-b").startswith("it has ended\n")


def test_a_word_that_is_new_is_shown_as_it_is(serve: Callable[..., str], shown: Callable[..., str]) -> None:
    assert "weather" in shown(serve({"data": [WAITING | {"reason": "weather"}]}))


def test_what_a_client_calls_itself_is_shown_but_not_obeyed(
    serve: Callable[..., str], shown: Callable[..., str]
) -> None:
    """No control sequence and no markup reaches the terminal."""
    out = shown(serve({"data": [VIEW | {"tenant": "/\x1b[2J\x07[bold]me[/bold]\n🚠"}]}))
    assert "/\ufffd[2J\ufffd[bold]me[/bold]\ufffd🚠" in out
    assert not {"\x1b", "\x07"} & set(out)
    with pytest.raises(ChairliftError, match=r"^.\[2Jno$"):
        shown(serve({"error": {"message": "\x1b[2Jno"}}, 404), "x")


def test_an_id_is_quoted(serve: Callable[..., str], shown: Callable[..., str]) -> None:
    url = serve({"error": {"message": "unknown"}}, 404)
    for id, path in (("a b?c#d%2F", "a%20b%3Fc%23d%252F"), ("ü", "%C3%BC")):
        with pytest.raises(ChairliftError, match=r"^unknown$"):
            shown(url, id)
        assert serve.reply["asked"] == f"/v1/requests/{path}"


@pytest.mark.parametrize("id", ["a b/c?d#e", "../x", "/", ".", "..", ""])
def test_what_can_be_no_id_is_not_known(serve: Callable[..., str], shown: Callable[..., str], id: str) -> None:
    """A server sees another path, and would say that there is none."""
    with pytest.raises(ChairliftError, match=f"^no request {re.escape(repr(id))} is known at http"):
        shown(serve({"error": {"message": "there is no such path here"}}, 404), id)


@pytest.mark.parametrize("body", [b"<html>", b"", b"[1]", b"null", {}, {"data": 5}, {"data": [1]}, {"data": [{}]}])
@pytest.mark.parametrize("status", [200, 502])
def test_another_server(serve: Callable[..., str], shown: Callable[..., str], body: Any, status: int) -> None:
    with pytest.raises(ChairliftError, match=r"^what answers at http://127.0.0.1:\d+ is no chairlift server.*--url$"):
        shown(serve(body, status))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://127.0.0.1:99999999"])
def test_no_server(shown: Callable[..., str], url: str) -> None:
    with pytest.raises(ChairliftError, match=f"^no server answers at {url} .*chairlift serve") as error:
        shown(url, "cmpl-a")
    assert "\n" not in str(error.value)


def test_the_command() -> None:
    command = [sys.executable, "-m", "chairlift.cli", "explain", "cmpl-a", "--url", "http://127.0.0.1:1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("error: no server answers at http://127.0.0.1:1 ")
