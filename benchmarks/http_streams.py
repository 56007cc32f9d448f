"""Streamed completions over plain sockets: when the pieces of each came, and how it ended."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

from engine_load import Trace


class Stream(asyncio.Protocol):
    """One streamed request on a connection of its own: when pieces came, and how it ended."""

    def __init__(self, request: bytes) -> None:
        self._request, self._tail, self._began = request, b"", time.perf_counter()
        self.pieces: list[float] = []
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._began = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter() - self._began
        self.pieces += [now] * data.count(b'"text":')  # the last one, with the usage, has none
        self._tail = (self._tail + data)[-4096:]
        if b"data: [DONE]" in self._tail and not self.ended.done():
            self.ended.set_result("error event" if b'"error"' in self._tail else "done")
        elif (
            self._tail.startswith(b"HTTP/1.1 ") and not self._tail.startswith(b"HTTP/1.1 200") and not self.ended.done()
        ):
            self.ended.set_result(self._tail[:32].decode(errors="replace").splitlines()[0])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result("cut off")

    @property
    def num_tokens(self) -> int:
        match = re.search(rb'"completion_tokens":(\d+)', self._tail)
        return int(match[1]) if match else 0

    def trace(self) -> Trace:
        """Tokens are known for the whole alone: the last piece gets them, and times of single tokens mean nothing."""
        if not self.pieces:
            return Trace(start_s=0.0)
        counts = [0] * (len(self.pieces) - 1) + [self.num_tokens]
        return Trace(start_s=0.0, outputs=list(zip(self.pieces, counts, strict=True)))


def request_of(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    return head + data


async def streams_of(
    port: int, bodies: list[dict[str, Any]], after: Callable[[], None] | None = None
) -> tuple[list[Stream], float]:
    """All requests as streams side by side; after: called once half a second into them."""
    loop, started = asyncio.get_running_loop(), time.perf_counter()
    made = []
    for data in map(request_of, bodies):
        made.append(await loop.create_connection(lambda data=data: Stream(data), "127.0.0.1", port))
    if after is not None:
        await asyncio.sleep(0.5)
        after()
    for _, stream in made:
        await stream.ended
    seconds = time.perf_counter() - started
    for transport, _ in made:
        transport.close()
    return [stream for _, stream in made], seconds
