"""The ASGI application: routes, errors, and a limit on what a body may weigh."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server import errors, routes
from chairlift.server.service import Service

MAX_BODY_BYTES = 16 * 2**20


def create_app(service: Service) -> FastAPI:
    """The API over one served model."""
    app = FastAPI(title="Chairlift", redirect_slashes=False)
    app.include_router(routes.create_router(service))
    errors.install(app, service.metrics)
    app.add_middleware(BodyLimit)
    return app


class BodyLimit:
    """Refuses a body above MAX_BODY_BYTES as soon as that is known, with 413."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = int(dict(scope["headers"]).get(b"content-length", b"0"))  # the HTTP parser lets only digits pass
        received = 0
        too_large = HTTPException(413, f"the body is larger than {MAX_BODY_BYTES} bytes")

        async def limited() -> Message:
            nonlocal received
            if declared > MAX_BODY_BYTES:
                raise too_large
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise too_large
            return message

        await self._app(scope, limited, send)
