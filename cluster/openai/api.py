"""The routes. Each reads its body, calls the service and wraps the result; everything else is elsewhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from cluster.admission import RETRY_AFTER_S
from cluster.openai.errors import model_not_found, unavailable
from cluster.openai.http import EnvelopeMiddleware, GenerationResponse, install_error_handlers, read_body
from cluster.openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from cluster.openai.service import OpenAIService
from cluster.version import DISTRIBUTION, version
from workers.engine_client import EngineDeadError


def create_app(
    service: OpenAIService,
    *,
    max_body_bytes: int,
    health_timeout_s: float,
    render_metrics: Callable[[], Awaitable[tuple[bytes, str]]],
    echoes_request_id: bool = True,
) -> FastAPI:
    """The ASGI application of one replica.

    Args:
        health_timeout_s: how long /health and /metrics wait for a round trip through the engine loop.
        render_metrics: body and content type of GET /metrics.
        echoes_request_id: False if the server in front answers with X-Request-Id itself.
    """
    app = FastAPI(title=DISTRIBUTION, version=version(), openapi_url=None)
    app.add_middleware(EnvelopeMiddleware, echoes_request_id=echoes_request_id, fabrication=service.model.fabrication)
    install_error_handlers(app)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Create a chat completion."""
        body = await read_body(request, ChatCompletionRequest, max_bytes=max_body_bytes)
        return GenerationResponse(await service.chat(body))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Create a completion."""
        body = await read_body(request, CompletionRequest, max_bytes=max_body_bytes)
        return GenerationResponse(await service.completion(body))

    @app.get("/v1/models")
    async def list_models() -> Response:
        """What this server serves."""
        return _json({"object": "list", "data": [service.model.card()]})

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        """One model."""
        if model_id != service.model.name:
            raise model_not_found(model_id)
        return _json(service.model.card())

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        body = await read_body(request, TokenizeRequest, max_bytes=max_body_bytes)
        return _json(await service.tokenize(body))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        body = await read_body(request, DetokenizeRequest, max_bytes=max_body_bytes)
        return _json(await service.detokenize(body))

    @app.get("/version")
    async def get_version() -> Response:
        """The server's version."""
        return _json({"version": version()})

    @app.get("/health")
    @app.get("/ready")
    async def health() -> Response:
        """200 if this replica takes requests and its engine's loop answers, else 503."""
        service.admission.check_available()
        async with _engine_answer(health_timeout_s):
            await service.engine.check_health()
        return Response(status_code=200)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics of this replica; 503 once its engine is gone or hangs."""
        async with _engine_answer(health_timeout_s):
            body, content_type = await render_metrics()
        return Response(body, headers={"content-type": content_type})

    return app


@contextlib.asynccontextmanager
async def _engine_answer(timeout_s: float) -> AsyncIterator[None]:
    """Around a call to the engine: a dead engine, or none heard of for timeout_s, is a 503."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (TimeoutError, EngineDeadError) as error:
        raise unavailable("The engine does not answer; try again.", retry_after_s=RETRY_AFTER_S) from error


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
