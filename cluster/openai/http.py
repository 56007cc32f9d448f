"""HTTP under the routes: reading a bounded body, sending a generation, request ids, errors of the framework."""

import asyncio
import logging
import re
import uuid
from collections.abc import Mapping
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.admission import RETRY_AFTER_S
from cluster.error_text import first_line
from cluster.openai.errors import (
    ApiError,
    body_too_large,
    clip,
    error_response,
    from_validation,
    internal_error,
    unavailable,
)
from cluster.openai.generation import Generation
from cluster.openai.responses import response_body, response_chunks
from cluster.openai.service import PendingGeneration
from cluster.openai.sse import HEADERS as SSE_HEADERS

logger = logging.getLogger(__name__)
BodyT = TypeVar("BodyT", bound=BaseModel)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


async def read_body(request: Request, model: type[BodyT], *, max_bytes: int) -> BodyT:
    """The body as `model`, whatever its content type says.

    Raises:
        ApiError: 413 above max_bytes, 400 for malformed JSON or a body that breaks a rule.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise body_too_large(max_bytes)
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > max_bytes:
            raise body_too_large(max_bytes)
    try:
        return model.model_validate_json(bytes(data))
    except ValidationError as error:
        raise from_validation(error.errors(include_input=False, include_url=False)) from error


class GenerationResponse(Response):
    """Runs a generation and sends it: as one JSON body, or as events.

    The head is sent with the first token; up to then a failure is an ordinary HTTP error. When the client hangs up, or
    the handler is cancelled, the generation is closed, which aborts it in the engine.
    """

    def __init__(self, pending: PendingGeneration) -> None:
        self._pending = pending
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError as long as nothing was sent."""
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            await (work if work.done() else gone)  # raises what either failed with
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _run(self, send: Send) -> None:
        async def reply(message: Message) -> None:
            try:
                await send(message)
            except OSError as error:  # from the server alone; an OSError of our own must not pass for a hang-up
                raise ClientDisconnect from error

        generation = self._pending.open()
        try:
            await generation.start()
            if self._pending.stream:
                await self._send_events(generation, reply)
            else:
                await self._send_body(generation, reply)
        except ClientDisconnect:
            logger.debug("The client of %s hung up.", self._pending.form.response_id)
        finally:
            await generation.close()

    async def _send_body(self, generation: Generation, send: Send) -> None:
        async for _ in generation.updates():
            pass
        body = response_body(generation, self._pending.form)
        await send(_head({"content-type": "application/json", "content-length": str(len(body))}))
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, generation: Generation, send: Send) -> None:
        await send(_head(SSE_HEADERS))
        async for chunk in response_chunks(generation, self._pending.form):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _head(headers: Mapping[str, str]) -> Message:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has hung up.

    Raises:
        ApiError: whether it has cannot be told any more.
    """
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception as error:
        # The server in front has given the request up, whose client is gone as a rule: a line says what it was.
        logger.info("A request is given up that cannot be watched: %s", first_line(error))
        logger.debug("Why it cannot be watched:", exc_info=True)
        text = "The server lost sight of this request; try again."
        raise unavailable(text, retry_after_s=RETRY_AFTER_S) from error


class EnvelopeMiddleware:
    """Turns what no handler caught into the envelope, 500 as a rule, and echoes X-Request-Id (or makes one).

    echoes_request_id: False where the server in front writes the header itself, as Ray Serve does.
    fabrication: mark every response, errors too, with `x-dflash-<fabrication>: 1`; None: with nothing.
    """

    def __init__(self, app: ASGIApp, *, echoes_request_id: bool, fabrication: str | None = None) -> None:
        self._app = app
        self._echoes_request_id = echoes_request_id
        self._fabrication = fabrication

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                if self._echoes_request_id:
                    MutableHeaders(scope=message)["X-Request-Id"] = request_id
                if self._fabrication is not None:
                    MutableHeaders(scope=message)[f"x-dflash-{self._fabrication}"] = "1"
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.debug("The client of request %s hung up while sending its body.", request_id)
        except Exception:
            if is_started:
                raise  # the server closes the connection without a proper end, so the client sees the break
            logger.exception("Request %s to %s failed.", request_id, clip(scope["path"]))
            await error_response(internal_error())(scope, receive, send_with_id)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if is_started or task is None or task.cancelling():
                raise
            # Nobody cancelled the request, but something that it waited for.
            logger.exception("What request %s to %s waited for was cancelled.", request_id, clip(scope["path"]))
            error = unavailable("The server stopped working on this request; try again.", retry_after_s=RETRY_AFTER_S)
            await error_response(error)(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(text):
                return text
    return uuid.uuid4().hex


def install_error_handlers(app: FastAPI) -> None:
    """Every error of the app and of the framework leaves in OpenAI's envelope."""

    async def on_api_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error_response(error)

    async def on_validation_error(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_response(from_validation(error.errors()))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {
            404: f"Unknown path {clip(request.url.path)}; this server has /v1/chat/completions, /v1/completions "
            "and /v1/models.",
            405: f"The method {clip(request.method, 16)} is not allowed for {clip(request.url.path)}.",
        }
        message = messages.get(error.status_code, clip(str(error.detail)))
        response = error_response(ApiError(error.status_code, message))
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)
