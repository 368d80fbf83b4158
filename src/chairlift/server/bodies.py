"""JSON bodies, parsed so that whatever is wrong with one is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

MAX_DIGITS = 4000  # Python reads no whole number of more than 4300


class Route(APIRoute):
    """A route whose requests are parsed by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return handle


class _Request(Request):
    async def json(self) -> Any:
        return parse(await self.body())


def parse(body: bytes) -> Any:
    """The value a body holds. Raises HTTPException with status 400 if it is no JSON.

    NaN and infinities are read, as by Python's own parser: the parameter that gets one can then be named.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the body is not valid UTF-8: {error.reason} at byte {error.start}") from None
    try:
        return _parse(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise HTTPException(400, f"the body is not valid JSON: {error.msg.lower()} at {where}") from None
    except RecursionError:
        raise HTTPException(400, "the body holds lists or objects that are nested too deeply") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        # A number of thousands of digits. It is cut, which leaves it out of every range, and so named by its parameter.
        return json.loads(text, parse_int=lambda digits: int(digits[:MAX_DIGITS]))
