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
MAX_LIVES = 16  # that are told of one request; each is a question to the engine


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
        """The live sequences of a request, and its life so far: of `MAX_LIVES` prompts at most, which it names. Raises
        RequestNotFound."""
        num_prompts = self._num_prompts.get(request_id, 0)
        ids = [engine_id(request_id, prompt) for prompt in range(num_prompts)]
        views = await self._views_of(ids) if ids else []
        alive = {view.id for view in views}
        # The live first, and of the others the last, which are the most likely to be remembered.
        order = sorted(range(num_prompts), key=lambda prompt: (0, prompt) if ids[prompt] in alive else (1, -prompt))
        prompts = sorted(order[:MAX_LIVES])
        reports: list[Report] = await asyncio.gather(*(self._client.inspect(ids[prompt]) for prompt in prompts))
        if not views and not any(report.life for report in reports):
            raise RequestNotFound(
                f"no request {show(request_id)} is known here: it never came, or ended too long ago; "
                "GET /v1/requests lists those that live"
            )
        return {
            "id": request_id,
            "object": "request",
            "num_prompts": num_prompts,
            "requests": _views(views),
            "life_prompts": prompts,
            "life": [
                msgspec.to_builtins(line) | {"prompt": prompt}
                for prompt, report in zip(prompts, reports, strict=True)
                for line in report.life
            ],
        }

    async def _views_of(self, ids: Sequence[str]) -> list[RequestView]:
        """By prompt and sample. One question about all that live, however many prompts a request has."""
        place = {id: prompt for prompt, id in enumerate(ids)}
        views = [view for view in (await self._client.inspect()).requests if view.id in place]
        return sorted(views, key=lambda view: (place[view.id], view.index))


def _views(views: Sequence[RequestView]) -> list[dict[str, Any]]:
    shown = []
    for view in views:
        request_id, _, prompt = view.id.rpartition("-")
        shown.append(msgspec.to_builtins(view) | {"id": request_id, "prompt": int(prompt)})
    return shown
