"""Serve's proxy has no answer of a replica's: what clients read is OpenAI's envelope, whatever the reason."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from ray.exceptions import ActorDiedError, ActorUnavailableError, TaskCancelledError, WorkerCrashedError
from ray.serve._private import constants
from ray.serve._private.common import DeploymentID
from ray.serve._private.http_util import (
    RequestIdMiddleware,
    convert_object_to_asgi_messages,
    get_http_response_status,
    send_http_response_on_exception,
    validate_http_proxy_callback_return,
)
from ray.serve._private.utils import call_function_from_import_path
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.cli import local_ray
from cluster.openai.errors import ApiError, error_response
from cluster.openai.generation import Generation
from cluster.openai.http import EnvelopeMiddleware, GenerationResponse, install_error_handlers
from cluster.proxy_errors import ProxyErrors

LOST = "The replica that worked on this request has ended; try again."
INSIDE = "The server failed to process the request; its log holds the cause."


def proxy_that_failed_with(error: BaseException) -> ASGIApp:
    """Sends what Serve's proxy does when a request ends with this error: for most errors nothing at all."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in send_http_response_on_exception(get_http_response_status(error, 5.0, "r1"), False):
            await send(message)

    return app


def proxy_that_says(text: str, status: int) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in convert_object_to_asgi_messages(text, status_code=status):
            await send(message)

    return app


async def ask(app: ASGIApp, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        return await client.post(path, json={}, headers=headers)


def error_of(reply: httpx.Response) -> dict[str, Any]:
    assert reply.headers["content-type"] == "application/json"
    assert int(reply.headers["content-length"]) == len(reply.content)
    body = reply.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("app", "status", "code", "message"),
    [
        (proxy_that_failed_with(ActorDiedError()), 503, "overloaded", LOST),
        (proxy_that_failed_with(ActorUnavailableError("gone", None)), 503, "overloaded", LOST),
        (proxy_that_failed_with(WorkerCrashedError()), 503, "overloaded", LOST),
        (proxy_that_failed_with(TaskCancelledError()), 503, "overloaded", LOST),
        (proxy_that_failed_with(ReplicaUnavailableError("r")), 503, "overloaded", LOST),
        (proxy_that_failed_with(asyncio.CancelledError()), 503, "overloaded", LOST),
        (proxy_that_failed_with(RuntimeError("a secret")), 503, "overloaded", LOST),
        (
            proxy_that_failed_with(BackPressureError(3, 2)),
            503,
            "overloaded",
            "Request dropped due to backpressure (num_queued_requests=3, max_queued_requests=2).",
        ),
        (
            proxy_that_failed_with(BackPressureError(3, 2, status_code=429)),
            429,
            "rate_limit_exceeded",
            "Request dropped due to backpressure (num_queued_requests=3, max_queued_requests=2).",
        ),
        (
            proxy_that_failed_with(DeploymentUnavailableError(DeploymentID(name="d", app_name="a"))),
            503,
            "overloaded",
            "Deployment(name='d', app='a') is unavailable because it failed to deploy.",
        ),
        (proxy_that_failed_with(TimeoutError()), 408, None, "Request r1 timed out after 5.0s."),
        (proxy_that_says("Path '/x' not found.", 404), 404, None, "Path '/x' not found."),
        (proxy_that_says("Internal Server Error", 500), 500, "internal_error", INSIDE),
        (proxy_that_says("x" * 9999, 503), 503, "overloaded", "x" * 197 + "..."),
        (proxy_that_says("", 502), 502, None, "The server answered with status 502."),
    ],
)
async def test_an_answer_of_the_proxy_s_own_is_in_the_envelope(
    app: ASGIApp, status: int, code: str | None, message: str
) -> None:
    reply = await ask(ProxyErrors(app))
    assert reply.status_code == status
    error = error_of(reply)
    assert (error["code"], error["message"]) == (code, message)
    assert error["type"] == {408: "invalid_request_error", 404: "invalid_request_error", 429: "rate_limit_error"}.get(
        status, "server_error"
    )
    assert reply.headers.get("retry-after") == ("1" if status in (429, 503) else None)


async def test_how_long_to_wait_is_the_proxy_s_where_it_says_so() -> None:
    reply = await ask(ProxyErrors(proxy_that_failed_with(BackPressureError(3, 2, retry_after_s=7))))
    assert reply.headers.get_list("retry-after") == ["7"]


@pytest.mark.parametrize("error", [ActorDiedError(), BackPressureError(3, 2)])
async def test_a_request_keeps_its_id(error: Exception) -> None:
    app = ProxyErrors(RequestIdMiddleware(proxy_that_failed_with(error)))
    assert (await ask(app, **{"x-request-id": "abc"})).headers.get_list("x-request-id") == ["abc"]
    assert len((await ask(app)).headers.get_list("x-request-id")) == 1


@pytest.mark.parametrize("fails", [False, True], ids=["lost", "raises"])
async def test_of_the_client_s_headers_an_answer_keeps_the_id_alone(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if fails:
            raise RuntimeError("a secret")

    reply = await ask(ProxyErrors(app), **{"x-request-id": "abc", "retry-after": "99"})
    assert reply.status_code == (500 if fails else 503) and "secret" not in reply.text
    assert reply.headers.get_list("x-request-id") == ["abc"]
    assert reply.headers.get_list("retry-after") == ([] if fails else ["1"])
    assert ("request abc" in caplog.text and "a secret" in caplog.text) == fails


async def test_a_proxy_that_raises_is_a_500() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a secret")

    reply = await ask(ProxyErrors(app))
    assert (reply.status_code, error_of(reply)["message"]) == (500, INSIDE)


@pytest.mark.parametrize("failure", [None, RuntimeError("inside")])
async def test_what_a_replica_has_begun_is_left_alone(failure: Exception | None) -> None:
    sent: list[dict[str, Any]] = []
    messages = [
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain; charset=utf-8")]},
        {"type": "http.response.body", "body": b"a", "more_body": True},
    ]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)
        if failure is not None:
            raise failure

    async def keep(message: Any) -> None:
        sent.append(message)

    call = ProxyErrors(app)({"type": "http", "path": "/", "headers": []}, keep, keep)  # type: ignore[arg-type]
    if failure is None:
        await call
    else:
        with pytest.raises(RuntimeError, match="inside"):
            await call
    assert sent == messages


async def test_errors_of_a_replica_and_serve_s_own_routes_pass() -> None:
    refusal = ApiError(400, "n: too many", param="n")
    reply = await ask(ProxyErrors(error_response(refusal)))
    assert (reply.status_code, reply.json()) == (400, refusal.body())
    plain = PlainTextResponse("short and stout", 418, headers={"x-mine": "1"})  # of an application beside it
    reply = await ask(ProxyErrors(plain))
    assert (reply.status_code, reply.text, reply.headers["x-mine"]) == (418, "short and stout", "1")
    without_length = StreamingResponse(iter(['{"mine":1}']), 400, media_type="application/json")
    assert (await ask(ProxyErrors(without_length))).json() == {"mine": 1}
    reply = await ask(ProxyErrors(proxy_that_says("draining", 503)), path="/-/healthz")
    assert (reply.status_code, reply.text) == (503, "draining")


async def test_a_websocket_is_answered_by_nobody_else() -> None:
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    async def keep(message: Any) -> None:
        sent.append(message)

    await ProxyErrors(app)({"type": "websocket", "path": "/v1/completions", "headers": []}, keep, keep)  # type: ignore
    assert sent == []


def test_serve_finds_it_by_the_name_that_dflash_serve_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(local_ray, "_init", lambda **options: None)
    local_ray.start(num_cpus=1, dashboard=True, verbose=True)
    name = os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    assert hasattr(
        constants, "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    )  # a name that Serve no longer reads does nothing
    (middleware,) = validate_http_proxy_callback_return(call_function_from_import_path(name))
    assert middleware.cls is ProxyErrors
    monkeypatch.setattr(os, "environ", {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mine.own"})
    local_ray.start(num_cpus=1, dashboard=True, verbose=True)
    assert os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == "mine.own"


# -------------------------------------------------------------------------------------------------- inside a replica


class Pending:
    """A generation that waits for a future which may be cancelled under it."""

    stream = False
    form = None

    def __init__(self, start: Any) -> None:
        self._start = start
        self.is_closed = False

    def open(self) -> "Pending":
        return self

    async def start(self) -> None:
        await self._start()

    async def close(self) -> None:
        self.is_closed = True


async def cancelled_future() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def test_a_cancellation_that_is_not_the_request_s_is_a_503() -> None:
    pending = Pending(cancelled_future)
    reply = await ask(EnvelopeMiddleware(GenerationResponse(pending), echoes_request_id=True))  # type: ignore[arg-type]
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert error_of(reply)["message"] == "The server stopped working on this request; try again."
    assert pending.is_closed


async def test_a_cancellation_behind_the_head_starts_no_second_response() -> None:
    sent: list[Any] = []
    head = {"type": "http.response.start", "status": 200, "headers": []}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(head)
        await cancelled_future()

    async def keep(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/completions", "headers": []}
    with pytest.raises(asyncio.CancelledError):
        await EnvelopeMiddleware(app, echoes_request_id=False)(scope, keep, keep)  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["http.response.start"]


async def test_a_request_that_is_cancelled_stays_cancelled() -> None:
    pending = Pending(asyncio.Event().wait)
    app = EnvelopeMiddleware(GenerationResponse(pending), echoes_request_id=True)  # type: ignore[arg-type]
    task = asyncio.create_task(ask(app))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pending.is_closed


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (TaskCancelledError(), "TaskCancelledError: "),  # Serve's, for most clients that leave before the first byte
        (RuntimeError("no such stream\nand more"), "RuntimeError: no such stream"),
    ],
)
async def test_a_connection_that_cannot_be_watched_is_a_503_and_a_line_of_why(
    error: Exception, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    pending = Pending(asyncio.Event().wait)
    app = FastAPI()
    app.add_middleware(EnvelopeMiddleware, echoes_request_id=True)
    install_error_handlers(app)
    app.add_route("/v1/completions", lambda request: GenerationResponse(pending), methods=["POST"])  # type: ignore
    sent: list[Any] = []

    async def receive() -> Any:
        raise error

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    with caplog.at_level(logging.INFO):
        await app(scope, receive, send)
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["code"] == "overloaded"
    assert pending.is_closed
    assert f"cannot be watched: {line}" in caplog.text
    assert "and more" not in caplog.text
    assert not any(record.exc_info or record.levelno > logging.INFO for record in caplog.records)


async def test_a_reader_that_leaves_does_not_wait_for_choices_that_wait_for_it() -> None:
    async def endless(choice: int) -> AsyncIterator[SimpleNamespace]:
        while True:
            yield SimpleNamespace(finish_reason=None)

    generation = object.__new__(Generation)
    generation.choices = [1, 2]  # type: ignore[list-item]
    generation._single = endless  # type: ignore
    updates = generation._merged()
    await anext(updates)
    await asyncio.sleep(0.01)  # the queue is full
    await asyncio.wait_for(updates.aclose(), 5)
