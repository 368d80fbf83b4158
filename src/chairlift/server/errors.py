"""Every error of the API in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from chairlift import log
from chairlift.errors import (
    ChairliftError,
    ContextTooLong,
    EngineDead,
    ModelNotFound,
    NotReady,
    ParameterError,
    RequestRefused,
    show,
)
from chairlift.server.client import ShuttingDown
from chairlift.server.inspection import RequestNotFound
from chairlift.server.metrics import Metrics

_log = log.get("server")

_STATUS: tuple[tuple[type[Exception], int, str | None], ...] = (  # the first that fits counts
    (ContextTooLong, 400, "context_length_exceeded"),
    (ParameterError, 400, None),
    (RequestRefused, 400, None),
    (ModelNotFound, 404, "model_not_found"),
    (RequestNotFound, 404, "request_not_found"),
    (NotReady, 503, "not_ready"),
    (ShuttingDown, 503, "server_shutting_down"),
    (EngineDead, 500, "engine_dead"),
    (ChairliftError, 500, None),
)


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an error. What is not meant for the client stays in the log."""
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            param = "model" if kind is ModelNotFound else getattr(error, "param", None)
            return status, body(status, str(error), param, code)
    return 500, body(500, "internal error; the server's log has the details")


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install(app: FastAPI, metrics: Metrics) -> None:
    """Makes the app answer every exception in this shape."""

    def answer(status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
        metrics.refused.labels(str(status)).inc()
        return Response(msgspec.json.encode(content), status, headers, media_type="application/json")

    async def on_error(request: Request, error: Exception) -> Response:
        status, content = describe(error)
        if not isinstance(error, ChairliftError):
            _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        elif status == 500 and not isinstance(error, EngineDead):  # that befalls many at once, and is told once
            _log.error("%s %s failed: %s", request.method, request.url.path, error)
        return answer(status, content, {"retry-after": "1"} if status == 503 else None)

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        param, message = _first_problem(error)
        return answer(400, body(400, message, param))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = {404: f"there is no {request.url.path[:200]} here", 405: f"{request.method} is not allowed here"}.get(
            error.status_code, str(error.detail)
        )
        return answer(error.status_code, body(error.status_code, message), dict(error.headers or {}))

    app.add_exception_handler(ChairliftError, on_error)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_error)


def _first_problem(error: RequestValidationError) -> tuple[str | None, str]:
    """The parameter at fault, written as in messages[0].content, and what is wrong with it."""
    problem = max(error.errors(), key=lambda problem: len(problem["loc"]))  # of a union's, the one that got furthest
    kind, place = problem["type"], problem["loc"][1:]
    if kind == "extra_forbidden":
        name = str(place[-1])[:80].encode(errors="backslashreplace").decode()
        path = ".".join(filter(None, (_param(place[:-1]), name)))
        return path, f"{path} is not a parameter of this endpoint; leave it out"
    if kind == "string_unicode" and not place:
        return None, "the name of a parameter holds half of a surrogate pair, which is no character"
    param = _param(place)
    if kind == "value_error":
        return param, f"{param or 'the body'}: {problem['ctx']['error']}"
    if param is None:
        return None, "the body must be a JSON object, sent with Content-Type: application/json"
    if kind == "missing":
        return param, f"{param} is required"
    return param, f"{param}: {problem['msg'].lower()}, got {show(problem.get('input'))}"


def _param(place: tuple[str | int, ...]) -> str | None:
    """The path of a parameter, without pydantic's names for the members of a union."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "TextPart"):
            path += f".{part}" if path else part
    return path or None
