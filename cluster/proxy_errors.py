"""What Ray Serve's own proxy answers where it has no answer of a replica's, put into OpenAI's envelope.

`dflash serve` names `middlewares` to Serve (`cluster.cli.local_ray`), whose proxies call it as they start. It runs in
their processes, so it imports neither models nor tokenizers.
"""

import logging

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.admission import RETRY_AFTER_S
from cluster.openai.errors import ApiError, clip, error_response, internal_error, unavailable

logger = logging.getLogger(__name__)

_OWN_PATHS = "/-/"  # Serve's routes, which are no part of OpenAI's API
_MAX_TEXT_BYTES = 4096
_CODES = {429: "rate_limit_exceeded", 503: "overloaded"}  # of what may succeed later
_REQUEST_ID = "x-request-id"


def middlewares() -> list[Middleware]:
    """The value of RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this."""
    return [Middleware(ProxyErrors)]


class ProxyErrors:
    """Puts the proxy's errors, which are plain text, into the envelope; what a replica answers, of another
    application too, passes as it is.

    A proxy that has lost a request, as the replica died with it, starts no response at all, of which the HTTP server
    makes a bare 500. Here it is a 503: another replica, or the one that comes, can answer the same request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or scope["path"].startswith(_OWN_PATHS):
            await self._app(scope, receive, send)
            return
        refusal: Message | None = None
        text = b""
        is_started = False

        async def forward(message: Message) -> None:
            nonlocal refusal, text, is_started
            if refusal is not None:
                text = (text + message.get("body", b""))[:_MAX_TEXT_BYTES]
            elif message["type"] == "http.response.start" and _is_of_proxy(message):
                refusal = message
            else:
                is_started = True
                await send(message)

        try:
            await self._app(scope, receive, forward)
        except Exception:
            if is_started:
                raise  # the server closes the connection without a proper end, so the client sees the break
            error, kept = internal_error(), _kept(Headers(scope=scope), _REQUEST_ID)
            request_id = clip(kept.get(_REQUEST_ID, "without an id"))
            logger.exception("Serve's proxy failed with request %s to %s.", request_id, clip(scope["path"]))
        else:
            if is_started:
                return
            if refusal is None:  # Serve has put an id into a request that came without one
                error, kept = _lost(), _kept(Headers(scope=scope), _REQUEST_ID)
            else:
                error = _as_api_error(refusal["status"], text)
                kept = _kept(Headers(raw=refusal["headers"]), _REQUEST_ID, "retry-after")
        response = error_response(error)
        response.headers.update(kept)
        await response(scope, receive, send)


def _kept(headers: Headers, *names: str) -> dict[str, str]:
    return {name: headers[name] for name in names if name in headers}


def _is_of_proxy(start: Message) -> bool:
    """Whether Serve wrote this error itself: it states no length, which a replica's framework does."""
    headers = Headers(raw=start["headers"])
    is_text = headers.get("content-type", "").startswith("text/plain")
    return bool(start["status"] >= 400 and is_text and "content-length" not in headers)


def _lost() -> ApiError:
    return unavailable("The replica that worked on this request has ended; try again.", retry_after_s=RETRY_AFTER_S)


def _as_api_error(status: int, text: bytes) -> ApiError:
    if status == 500:
        return internal_error()  # the text may tell of the server's insides
    message = clip(text.decode("utf-8", "replace")) or f"The server answered with status {status}."
    code = _CODES.get(status)
    return ApiError(status, message, code=code, retry_after_s=None if code is None else RETRY_AFTER_S)
