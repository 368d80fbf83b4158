"""A streaming client of OpenAI's /v1/completions, as light as can be: it shares the processor with the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.figures import Answer
from peers.workloads import Request

TIMEOUT = 900.0  # seconds for a whole run
QUEUE_GAP = 0.0005  # seconds between requests due at once: their order is the workload's


@dataclass
class Stream:
    """What the events of one answer have told so far.

    Fields:
        times: of each event with text. One without, such as that of the usage or of the finish reason, is no token.
        tokens: how many the server itself counted.
        done: the last event has come.
    """

    times: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int | None = None
    done: bool = False
    _begun: bytes = b""  # a line whose end has not come yet

    def feed(self, piece: bytes, now: float) -> None:
        *lines, self._begun = (self._begun + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"the server answered {event['error']}")
        if event.get("usage"):
            self.tokens = event["usage"]["completion_tokens"]
        text = "".join(choice.get("text") or "" for choice in event.get("choices") or ())
        if text:
            self.times.append(now)
            self.text += text


def send(port: int, requests: Sequence[Request], extra: dict[str, Any]) -> list[Answer]:
    """Sends each request when it is due, and returns all answers. ``extra``: more fields for the server."""
    return asyncio.run(asyncio.wait_for(_send(port, requests, extra), TIMEOUT))


async def _send(port: int, requests: Sequence[Request], extra: dict[str, Any]) -> list[Answer]:
    begin = time.perf_counter()

    async def one(request: Request, due: float) -> Answer:
        await asyncio.sleep(begin + due - time.perf_counter())
        stream = await _stream(port, request, extra)
        times = tuple(moment - begin for moment in stream.times)
        return Answer(due, times, len(times) if stream.tokens is None else stream.tokens, stream.text)

    due = [request.due or QUEUE_GAP * i for i, request in enumerate(requests)]
    return list(await asyncio.gather(*map(one, requests, due)))


async def _stream(port: int, request: Request, extra: dict[str, Any]) -> Stream:
    body = {"prompt": request.ids, "max_tokens": request.output, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | extra
    stream = Stream()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_post(json.dumps(body).encode()))
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        if head.split(" ", 2)[1] != "200":
            raise RuntimeError(f"the server answered {head.splitlines()[0]}: {(await reader.read(1000)).decode()}")
        async for piece in _body(reader, chunked="transfer-encoding: chunked" in head.lower()):
            stream.feed(piece, time.perf_counter())
            if stream.done:
                break
    finally:
        writer.close()
    return stream


def _post(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def _body(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    while chunked and (size := int(await reader.readline(), 16)):
        yield (await reader.readexactly(size + 2))[:-2]
    while not chunked and (piece := await reader.read(65536)):
        yield piece
