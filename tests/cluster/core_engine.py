"""A real engine behind the API, in this process: one thread runs the core's loop."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

from engine import LLM
from engine.request import EngineRequest, TokenDelta


class CoreEngine:
    """What the API needs of an engine, on the core of an `LLM`. Requests are kept for tests to look at."""

    def __init__(self, llm: LLM) -> None:
        self._core = llm.core
        self._lock = threading.Lock()
        self._streams: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Queue[TokenDelta]]] = {}
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.requests: list[EngineRequest] = []

    async def submit(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        queue: asyncio.Queue[TokenDelta] = asyncio.Queue()
        with self._lock:
            self._core.add_request(request)
            self._streams[request.request_id] = asyncio.get_running_loop(), queue
            self.requests.append(request)
        self._wake.set()
        while True:
            delta = await queue.get()
            yield delta
            if delta.finish_reason is not None:
                return

    def abort(self, request_id: str) -> None:
        with self._lock:
            self._core.abort(request_id)
        self._wake.set()

    async def check_health(self) -> None:
        pass

    def close(self) -> None:
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_closing:
            with self._lock:
                deltas: list[Any] = self._core.step() if self._core.has_work() else []
                busy = self._core.has_work()
            for delta in deltas:
                loop, queue = self._streams[delta.request_id]
                loop.call_soon_threadsafe(queue.put_nowait, delta)
            if not busy:
                self._wake.wait(timeout=1)
                self._wake.clear()
