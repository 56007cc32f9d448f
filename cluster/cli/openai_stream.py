"""A streaming client of the server's own API, shared by `dflash chat` and `dflash bench`.

Times are `time.perf_counter` seconds, taken when an event's bytes are read. It insists on the protocol: a stream that
ends without a finish reason or without `[DONE]` is an error, never a short answer.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

# Until the response head: the server sends it with the first token, so this covers queueing and prefill.
HEAD_TIMEOUT_S = 600.0
# Error bodies are shown to a person; more than this helps nobody.
_MAX_ERROR_LEN = 500


class ApiError(Exception):
    """The server refused or broke a request. `kind` groups errors of one cause, such as "HTTP 429" or "connection"."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecCounts:
    """Speculation counts of one request, from the response's `metrics.speculative_decoding`.

    histogram: entry i counts the verify steps that accepted i drafts; empty where the server does not say.
    """

    num_steps: int
    num_drafted: int
    num_accepted: int
    histogram: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float | None:
        """Tokens committed per verify step, the target's own included; None before any verify step."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamEvent:
    """One server-sent event. `text` is new output; the rest is set on the events that carry it."""

    at_s: float
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    spec: SpecCounts | None = None


def normalise_url(url: str) -> str:
    """The server's root, without a trailing slash or /v1.

    Raises:
        ValueError: not an http or https URL.
    """
    url = url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--url: must start with http:// or https://, got {url!r}")
    return url.removesuffix("/v1").rstrip("/")


def open_session(*, connections: int) -> aiohttp.ClientSession:
    """A session for up to `connections` parallel requests. The caller closes it."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=connections),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=HEAD_TIMEOUT_S),
    )


async def list_models(session: aiohttp.ClientSession, url: str) -> list[str]:
    """Ids of the served models.

    Raises:
        ApiError: the server cannot be reached or does not answer as an OpenAI API.
    """
    data = await get_json(session, f"{url}/v1/models")
    try:
        return [model["id"] for model in data["data"]]
    except (KeyError, TypeError) as error:
        raise ApiError("protocol", f"{url}/v1/models is not an OpenAI model list") from error


async def get_json(session: aiohttp.ClientSession, address: str) -> Any:
    """The JSON answer of a GET.

    Raises:
        ApiError: no connection, a status other than 200, or a body that is not JSON.
    """
    try:
        async with session.get(address, timeout=aiohttp.ClientTimeout(total=30)) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ApiError("connection", f"cannot reach {address}: {_reason(error)}") from error
    if response.status != 200:
        raise ApiError(f"HTTP {response.status}", f"{address}: HTTP {response.status}: {_error_message(body)}")
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ApiError("protocol", f"{address}: the answer is not JSON") from error


async def stream(session: aiohttp.ClientSession, address: str, body: dict[str, Any]) -> AsyncIterator[StreamEvent]:
    """POST `body` and yield the events of the answer; returns after `[DONE]`.

    Raises:
        ApiError: no connection, a refusal, an error event, or a stream that ends before its end.
    """
    finished = False
    try:
        async with session.post(address, data=msgspec.json.encode(body), headers=_HEADERS) as response:
            if response.status != 200:
                message = _error_message(await response.read())
                raise ApiError(f"HTTP {response.status}", f"HTTP {response.status}: {message}")
            buffer = b""
            async for chunk in response.content.iter_any():
                now_s = time.perf_counter()
                buffer += chunk
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data.startswith(b"[DONE]"):
                        if not finished:
                            raise ApiError("protocol", "the stream ended without a finish_reason")
                        return
                    event = _parse_event(data, now_s)
                    finished = finished or event.finish_reason is not None
                    yield event
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ApiError("connection", f"{address}: {_reason(error)}") from error
    raise ApiError("protocol", "the connection closed before [DONE]")


_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


def _parse_event(data: bytes, at_s: float) -> StreamEvent:
    try:
        event = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ApiError("protocol", f"an event is not JSON: {data[:_MAX_ERROR_LEN]!r}") from error
    if event.get("error"):
        raise ApiError("error event", str(event["error"].get("message", event["error"]))[:_MAX_ERROR_LEN])
    choice = event["choices"][0] if event.get("choices") else {}
    text = choice["delta"].get("content") if "delta" in choice else choice.get("text")
    usage = event.get("usage") or {}
    spec = (event.get("metrics") or {}).get("speculative_decoding")
    return StreamEvent(
        at_s=at_s,
        text=text or "",
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        spec=None
        if not spec
        else SpecCounts(
            num_steps=spec["num_spec_steps"],
            num_drafted=spec["num_draft_tokens"],
            num_accepted=spec["num_accepted_draft_tokens"],
            histogram=tuple(spec.get("acceptance_histogram", ())),
        ),
    )


def _error_message(body: bytes) -> str:
    """The message of an OpenAI error body, or the start of whatever came instead."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"])[:_MAX_ERROR_LEN]
    except (msgspec.DecodeError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:_MAX_ERROR_LEN] or "no body"


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
