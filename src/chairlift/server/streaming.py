"""An answer on its way to the client, whole or as server-sent events. A client that leaves ends its generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.core.request import FinishReason
from chairlift.errors import ChairliftError
from chairlift.server import errors
from chairlift.server.responses import Format
from chairlift.server.service import Generation

_encode = msgspec.json.Encoder().encode

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Answer(Response):
    """Owns a generation: runs it to its end, or ends it when the client disconnects.

    Nothing is sent before the first news from the engine, so that a request which fails at once gets a true status.
    """

    def __init__(self, generation: Generation, format: Format, *, stream: bool) -> None:
        super().__init__()
        self._generation = generation
        self._format = format
        self._stream = stream
        self._gone = False
        self._reason = FinishReason.ABORT  # why what still runs at the end of the answer was ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_events(send) if self._stream else self._send_whole(send))
        except ChairliftError:
            self._reason = FinishReason.ERROR
            raise
        finally:
            watcher.cancel()
            self._generation.close(self._reason)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._generation.close()

    async def _send_whole(self, send: Send) -> None:
        choices = await self._generation.choices()
        if self._gone:
            return
        content = _encode(self._format.whole(choices, self._generation.usage))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _send_events(self, send: Send) -> None:
        started = False
        events = self._events()
        async for event in events:
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
                started = True
            await send({"type": "http.response.body", "body": event, "more_body": True})
        if started:
            await send({"type": "http.response.body", "body": b""})

    async def _events(self) -> AsyncIterator[bytes]:
        """One piece of the response body per wake-up. An error after the first piece becomes the last event."""
        started = False
        try:
            async for gained in self._generation.deltas():
                chunks = [
                    event(self._format.chunk(choice, delta))
                    for choice, delta in gained.items()
                    if delta.token_ids or delta.text or delta.finish_reason
                ]
                if chunks:
                    started = True
                    yield b"".join(chunks)
        except ChairliftError as error:
            if not started:
                raise
            self._reason = FinishReason.ERROR
            yield event(errors.describe(error)[1])
            return
        if not self._gone:
            usage = event(self._format.usage_chunk(self._generation.usage)) if self._format.include_usage else b""
            yield usage + b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event that holds one JSON object, encoded once."""
    return b"data: " + _encode(content) + b"\n\n"
