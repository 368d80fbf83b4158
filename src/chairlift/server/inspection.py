"""Live requests and the life of one, as GET /v1/requests shows them. Never what they say: no text, no tokens.

Each prompt of a client's request is a request of its own to the engine: prompt i of ``ID`` is ``ID-i`` there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from chairlift.core.ports import Report, RequestView
from chairlift.errors import ChairliftError, show
from chairlift.server.client import EngineClient

MAX_REMEMBERED = 2**16


class RequestNotFound(ChairliftError):
    """No request of this id is known, or nothing of it any more."""


def engine_id(request_id: str, prompt: int) -> str:
    return f"{request_id}-{prompt}"


class Requests:
    """The requests of one server, by the ids that clients know. It remembers the last `MAX_REMEMBERED`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._num_prompts: dict[str, int] = {}  # in the order of arrival

    def remember(self, request_id: str, num_prompts: int) -> None:
        self._num_prompts[request_id] = num_prompts
        if len(self._num_prompts) > MAX_REMEMBERED:
            del self._num_prompts[next(iter(self._num_prompts))]

    async def all(self) -> dict[str, Any]:
        """All live sequences: the running in boarding order, then the waiting in the queue's."""
        report = await self._client.inspect()
        return {"object": "list", "data": _views(report.requests)}

    async def one(self, request_id: str) -> dict[str, Any]:
        """The live sequences of a request, and its life so far. Raises RequestNotFound."""
        num_prompts = self._num_prompts.get(request_id, 0)
        ids = [engine_id(request_id, prompt) for prompt in range(num_prompts)]
        reports: list[Report] = await asyncio.gather(*map(self._client.inspect, ids))
        if not any(report.requests or report.life for report in reports):
            raise RequestNotFound(
                f"no request {show(request_id)} is known here: it never came, or ended too long ago; "
                "GET /v1/requests lists those that live"
            )
        return {
            "id": request_id,
            "object": "request",
            "requests": [view for report in reports for view in _views(report.requests)],
            "life": [
                msgspec.to_builtins(line) | {"prompt": prompt}
                for prompt, report in enumerate(reports)
                for line in report.life
            ],
        }


def _views(views: Sequence[RequestView]) -> list[dict[str, Any]]:
    shown = []
    for view in views:
        request_id, _, prompt = view.id.rpartition("-")
        shown.append(msgspec.to_builtins(view) | {"id": request_id, "prompt": int(prompt)})
    return shown
