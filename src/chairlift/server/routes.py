"""The endpoints."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from chairlift.server import errors, metrics
from chairlift.server.bodies import Route
from chairlift.server.responses import ChatFormat, CompletionFormat, Format
from chairlift.server.schemas import ChatRequest, CompletionRequest
from chairlift.server.service import DEFAULT_MAX_TOKENS, Service
from chairlift.server.streaming import Answer
from chairlift.server.tenants import tenant_of

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def json(content: dict[str, Any]) -> Response:
    """Encoded by msgspec: quick, and whatever number there is becomes valid JSON."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def create_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=Route)

    def get(path: str) -> Callable[[Endpoint], Endpoint]:
        """GET, and HEAD, with which load balancers and monitors probe."""

        def add(endpoint: Endpoint) -> Endpoint:
            router.get(path)(endpoint)
            router.head(path, include_in_schema=False)(endpoint)
            return endpoint

        return add

    async def answer(
        prefix: str,
        http: Request,
        request: CompletionRequest | ChatRequest,
        encode: Callable[[], Awaitable[list[list[int]]]],
        prompt_param: str,
        format: type[Format],
    ) -> Answer:
        arrival, params = time.monotonic(), request.params()
        tokenizer, _ = service.require_ready()
        service.require_model(request.model)
        request_id = f"{prefix}-{uuid.uuid4().hex}"
        generation = service.generate(
            request_id,
            await encode(),
            params,
            arrival=arrival,
            prompt_param=prompt_param,
            limit_param=request.limit_param,
            tenant=tenant_of(http.headers.get("authorization"), request.user),
            priority=0 if request.priority is None else request.priority,
        )
        shape = format(
            request_id,
            request.model or service.names[0],
            int(time.time()),
            tokenizer,
            logprobs=params.logprobs is not None,
            include_usage=request.include_usage,
        )
        return Answer(generation, shape, stream=bool(request.stream))

    @router.post("/v1/completions")
    async def completions(http: Request, request: CompletionRequest) -> Response:
        """Continues prompts. max_tokens defaults to 16; a larger number that does not fit the context is refused."""
        return await answer("cmpl", http, request, lambda: service.encode(request.prompts), "prompt", CompletionFormat)

    @router.post("/v1/chat/completions")
    async def chat_completions(http: Request, request: ChatRequest) -> Response:
        """Answers a conversation. Without max_tokens the answer may go on to the end of the context."""

        async def encode() -> list[list[int]]:
            return [await service.encode_chat([message.for_template() for message in request.messages])]

        return await answer("chatcmpl", http, request, encode, "messages", ChatFormat)

    def card() -> dict[str, Any]:
        ready = service.client.ready
        return {
            "id": service.names[0],
            "object": "model",
            "created": service.started,
            "owned_by": "chairlift",
            "max_model_len": ready.capacity.max_model_len if ready else None,
            "defaults": {"completions": {"max_tokens": DEFAULT_MAX_TOKENS}, "chat": {"max_tokens": None}},
        }

    @get("/v1/models")
    async def models() -> dict[str, Any]:
        """The served model, its context length, and the defaults of requests."""
        return {"object": "list", "data": [card()]}

    @get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.require_model(name)
        return card()

    @get("/v1/requests")
    async def requests() -> Response:
        """What runs and waits, and why it waits: one entry a sequence, the waiting by their position in the queue."""
        service.require_ready()
        return json(await service.requests.all())

    @get("/v1/requests/{request_id}")
    async def request(request_id: str) -> Response:
        """One request by its id (cmpl-... or chatcmpl-...), and its life as far back as the engine remembers. Of
        many prompts, `life` tells of those in `life_prompts` only: the live ones first, `MAX_LIVES` at most."""
        service.require_ready()
        return json(await service.requests.one(request_id))

    @get("/health")
    async def health() -> Response:
        """Liveness: 200 while the engine lives, loading or busy; 503 when it is dead, and a restart is due, or when the
        server is shutting down."""
        if service.client.failure is not None:
            return JSONResponse(errors.describe(service.client.failure)[1], 503)
        return JSONResponse({"status": "ok"})

    @get("/ready")
    async def ready() -> Response:
        """Readiness: 200 when requests are answered; 503 before, naming what the start is waiting for."""
        if service.phase is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "phase": service.phase}, 503)

    @get("/metrics")
    async def prometheus() -> Response:
        return Response(service.metrics.expose(), headers={"content-type": metrics.CONTENT_TYPE})

    return router
