"""Server-sent events: the frame, the end mark, and the pre-encoded chunks of one streamed response.

Chunks are assembled from bytes that are constant for the response plus the JSON of what changed, so a step costs one
small JSON encoding. Keys that OpenAI declares as required are always present, null where there is nothing to say.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
HEADERS: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_encode = msgspec.json.encode


def event(data: bytes) -> bytes:
    """One event around one line of JSON."""
    return b"data: " + data + b"\n\n"


class ChunkWriter:
    """Encodes the chunks of one response; `chat` decides between chat deltas and completion texts.

    Args:
        response_id, created, model: repeated in every chunk.
        chat: True for chat.completion.chunk, False for text_completion.
        include_usage: write `"usage": null` (or the usage so far) into every chunk.
        system_fingerprint: repeated in every chunk unless None.
    """

    def __init__(
        self,
        *,
        response_id: str,
        created: int,
        model: str,
        chat: bool,
        include_usage: bool,
        system_fingerprint: str | None = None,
    ) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        fields = {"id": response_id, "object": kind, "created": created, "model": model}
        if system_fingerprint is not None:
            fields["system_fingerprint"] = system_fingerprint
        head = _encode(fields)
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._chat = chat
        self._include_usage = include_usage

    def role(self, index: int, *, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """The first chunk of a chat choice."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        return self._finish(choice, None, prompt_token_ids)

    def content(
        self,
        index: int,
        text: str,
        *,
        logprobs: Any = None,
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        usage: Any = None,
    ) -> bytes:
        """What one engine step added to a choice."""
        encoded = _encode(text)
        body = b'"delta":{"content":' + encoded + b"}" if self._chat else b'"text":' + encoded
        tail = b"" if token_ids is None else b',"token_ids":' + _encode(token_ids)
        choice = b'{"index":%d,%b,"logprobs":%b,"finish_reason":null%b}' % (
            index,
            body,
            b"null" if logprobs is None else _encode(logprobs),
            tail,
        )
        return self._finish(choice, usage, prompt_token_ids)

    def terminal(self, index: int, *, finish_reason: str, stop_reason: int | str | None, usage: Any = None) -> bytes:
        """The last chunk of a choice; it carries no text."""
        choice = b'{"index":%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (
            index,
            b'"delta":{}' if self._chat else b'"text":""',
            _encode(finish_reason),
            _encode(stop_reason),
        )
        return self._finish(choice, usage, None)

    def usage(self, usage: Any, metrics: Any | None) -> bytes:
        """The chunk after the last choice that carries the usage (and, with one choice, the speculation statistics)."""
        tail = b"" if metrics is None else b',"metrics":' + _encode(metrics)
        return self._head + b'],"usage":' + _encode(usage) + tail + b"}\n\n"

    def _finish(self, choice: bytes, usage: Any, prompt_token_ids: Sequence[int] | None) -> bytes:
        tail = b',"usage":' + (b"null" if usage is None else _encode(usage)) if self._include_usage else b""
        if prompt_token_ids is not None:
            tail += b',"prompt_token_ids":' + _encode(prompt_token_ids)
        return self._head + choice + b"]" + tail + b"}\n\n"
