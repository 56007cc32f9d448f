"""`EngineClient`: the replica's end of the socket to rank 0. One event loop, one thread, no torch.

Owns the open streams and the calls in flight. It holds every delta that its consumer has not taken, which is bounded
by the request's own length, so a slow consumer delays nobody else. Writing waits while more than `_HIGH_WATER` bytes
are unsent.
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar, cast

import msgspec

from engine.core import EngineStats
from engine.request import EngineRequest, TokenDelta
from engine.speculative.counters import CounterSnapshot, StepTime
from engine.speculative.schedule import ScheduleAck
from workers.errors import EngineDeadError, ProtocolError
from workers.protocol import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    ApplySchedule,
    Call,
    CallFailed,
    CallMethod,
    EngineFailed,
    FrameBuffer,
    Hello,
    Rejected,
    Reply,
    Shutdown,
    StepMessage,
    decode_from_engine,
    encode_frame,
)

__all__ = ["EngineClient", "EngineDeadError"]

_HIGH_WATER = 1 << 20
T = TypeVar("T")


class _Stream:
    """Deltas of one request between the socket and its consumer."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.is_sent = False
        self.is_abort_due = False  # `abort` was called while the request waited to be sent
        self.is_finished = False  # the engine will say nothing more about it
        self._deltas: deque[TokenDelta] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        self.is_finished = True
        self._error = error
        self._wake()

    async def next(self) -> TokenDelta:
        """The next delta; what arrived before a failure comes first."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._deltas.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient(asyncio.Protocol):
    """Made by `attach`. All methods belong to the event loop it was attached in.

    on_disconnect: called once when rank 0 failed or hung up, with what is known; the callee must then call `fail` with
        the root cause. Without it the client fails at once with what is known.
    """

    def __init__(self, *, on_disconnect: Callable[[EngineDeadError], None] | None = None) -> None:
        self._on_disconnect = on_disconnect
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer()
        self._streams: dict[str, _Stream] = {}
        self._draining: set[str] = set()  # dropped by their consumer, not yet ended by the engine
        self._calls: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._unanswered: set[int] = set()  # calls whose caller no longer waits
        self._next_call_id = 0
        self._num_messages = 0
        self._hello: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._is_disconnected = False
        self._dead: EngineDeadError | None = None

    @classmethod
    async def attach(
        cls, connection: socket.socket, *, on_disconnect: Callable[[EngineDeadError], None] | None = None
    ) -> "EngineClient":
        """Takes over a connected stream socket whose other end is an `EngineLoop` (perhaps a later one)."""
        connection.setblocking(False)
        _, client = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: cls(on_disconnect=on_disconnect), connection
        )
        return client

    # ------------------------------------------------------------------------------------------------------ requests

    async def submit(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one request, up to and including the one with a finish_reason.

        The request is sent at the first `anext`. Closing the iterator or cancelling the task that waits in it aborts
        the request in the engine. An id may be used again once the engine has ended it.

        Raises:
            ValueError: the engine refuses the request, or the id is in use; at the first `anext`.
            EngineDeadError: the engine is gone; raised once, after the deltas that had arrived.
        """
        self._check_alive()
        request_id = request.request_id
        if request_id in self._streams or request_id in self._draining:
            raise ValueError(f"request_id: {request_id!r} is in use by an unfinished request")
        frame = encode_frame(AddRequest(request=request))
        stream = _Stream(request_id)
        self._streams[request_id] = stream
        try:
            await self._may_write.wait()
            if not stream.is_finished:
                self._write(frame)
                stream.is_sent = True
                if stream.is_abort_due:
                    self.abort(request_id)
            while True:
                delta = await stream.next()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if not stream.is_finished:
                del self._streams[request_id]
                if stream.is_sent:
                    self._draining.add(request_id)
                    self._write(encode_frame(Abort(request_id=request_id)))

    def abort(self, request_id: str) -> None:
        """Asks the engine to end a request, whose stream then ends with finish_reason "abort". Unknown ids: no-op."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if stream.is_sent:
            self._write(encode_frame(Abort(request_id=request_id)))
        else:
            stream.is_abort_due = True

    # ------------------------------------------------------------------------------------------------------ calls

    async def stats(self) -> EngineStats:
        """Gauges of the engine now."""
        return msgspec.msgpack.decode(await self._call(CallMethod.STATS), type=EngineStats)

    async def counters(self) -> CounterSnapshot:
        """Cumulative counts since the engine started."""
        return msgspec.msgpack.decode(await self._call(CallMethod.COUNTERS), type=CounterSnapshot)

    async def check_health(self) -> None:
        """Returns after a round trip through the engine loop.

        Raises:
            EngineDeadError: the engine is gone. A loop that hangs does not answer: use a time-out.
        """
        await self._call(CallMethod.CHECK_HEALTH)

    async def check_integrity(self) -> None:
        """Raises RuntimeError with what has leaked or disagrees in the engine's bookkeeping."""
        await self._call(CallMethod.CHECK_INTEGRITY)

    async def reset_gate(self) -> None:
        """Lets a tripped speculation gate speculate again."""
        await self._call(CallMethod.RESET_GATE)

    async def reset_prefix_cache(self) -> None:
        """Makes the engine forget cached prefixes."""
        await self._call(CallMethod.RESET_PREFIX_CACHE)

    async def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> ScheduleAck:
        """Puts a draft-length schedule in force if its version is greater than the engine's.

        Raises:
            ValueError: an entry no schedule may have.
        """
        call_id = self._new_call_id()
        message = ApplySchedule(call_id=call_id, version=version, schedule=schedule)
        return msgspec.msgpack.decode(await self._round_trip(call_id, message), type=ScheduleAck)

    async def _call(self, method: CallMethod) -> msgspec.Raw:
        call_id = self._new_call_id()
        return await self._round_trip(call_id, Call(call_id=call_id, method=method))

    def _new_call_id(self) -> int:
        self._next_call_id += 1
        return self._next_call_id

    async def _round_trip(self, call_id: int, message: Call | ApplySchedule) -> msgspec.Raw:
        self._check_alive()
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            await self._may_write.wait()
            self._write(encode_frame(message))
            try:
                return await answer
            finally:
                if not answer.done() or answer.cancelled():
                    self._unanswered.add(call_id)
        finally:
            self._calls.pop(call_id, None)

    # ------------------------------------------------------------------------------------------------------ life

    @property
    def num_messages(self) -> int:
        """Messages received; the engine's heartbeat as seen from here (every step sends one)."""
        return self._num_messages

    @property
    def num_outstanding(self) -> int:
        """Requests and calls the engine owes an answer to. With some outstanding, a living engine keeps sending.

        A call whose caller gave up is owed all the same: otherwise an idle engine that hangs would owe nothing.
        """
        num_requests = sum(stream.is_sent for stream in self._streams.values()) + len(self._draining)
        return num_requests + len(self._calls) + len(self._unanswered)

    async def wait_ready(self) -> Hello:
        """Waits for the engine to be loaded.

        Raises:
            EngineDeadError: it failed instead.
        """
        self._check_alive()
        return await asyncio.shield(self._hello)

    @property
    def step_times(self) -> tuple[StepTime, ...]:
        """Measured before the engine served, if `EngineGroup.start` was told to. Valid after `wait_ready`."""
        return self._hello.result().step_times

    @property
    def device_name(self) -> str:
        """The model of rank 0's GPU; empty without one. Valid after `wait_ready`."""
        return self._hello.result().device_name

    def request_shutdown(self) -> None:
        """Asks the engine loop to end after the current step."""
        self._write(encode_frame(Shutdown()))

    def fail(self, error: EngineDeadError) -> None:
        """Ends everything: each open stream and call gets its own copy of `error`, once. Only the first call counts."""
        if self._dead is not None:
            return
        self._dead = error
        for stream in self._streams.values():
            stream.fail(_copy(error))
        for answer in [*self._calls.values(), cast(asyncio.Future[Any], self._hello)]:
            if not answer.done():
                answer.set_exception(_copy(error))
        if self._hello.done() and not self._hello.cancelled():
            self._hello.exception()  # mark as seen: nobody may be waiting for it
        self._streams.clear()
        self._draining.clear()
        self._unanswered.clear()
        self._may_write.set()
        if self._transport is not None:
            self._transport.abort()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise _copy(self._dead)

    def _write(self, frame: bytes) -> None:
        if self._dead is None and not self._is_disconnected:
            assert self._transport is not None
            self._transport.write(frame)

    def _disconnect(self, error: EngineDeadError) -> None:
        if self._is_disconnected or self._dead is not None:
            return
        self._is_disconnected = True
        if self._on_disconnect is None:
            self.fail(error)
        else:
            self._on_disconnect(error)

    # ---------------------------------------------------------------------------------------------- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)

    def pause_writing(self) -> None:
        """Called by asyncio above the high-water mark."""
        self._may_write.clear()

    def resume_writing(self) -> None:
        """Called by asyncio below the low-water mark."""
        self._may_write.set()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        try:
            for payload in self._frames.feed(data):
                self._dispatch(payload)
        except ProtocolError as error:
            self._disconnect(EngineDeadError(f"rank 0 sent what is not our protocol: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._may_write.set()
        reason = f": {exc}" if exc is not None else ""
        self._disconnect(EngineDeadError(f"rank 0 closed its socket{reason}"))

    def _dispatch(self, payload: bytes) -> None:
        message = decode_from_engine(payload)
        self._num_messages += 1
        match message:
            case StepMessage(deltas=deltas):
                for delta in deltas:
                    self._deliver(delta)
            case Rejected(request_id=request_id, message=text):
                self._draining.discard(request_id)
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.fail(ValueError(text))
            case Reply(call_id=call_id, value=value):
                self._unanswered.discard(call_id)
                answer = self._calls.get(call_id)
                if answer is not None and not answer.done():
                    answer.set_result(value.copy())
            case CallFailed(call_id=call_id, is_value_error=is_value_error, message=text):
                self._unanswered.discard(call_id)
                answer = self._calls.get(call_id)
                if answer is not None and not answer.done():
                    answer.set_exception(ValueError(text) if is_value_error else RuntimeError(text))
            case Hello(version=version):
                if version != PROTOCOL_VERSION:
                    raise ProtocolError(f"it speaks version {version}, this replica {PROTOCOL_VERSION}")
                if not self._hello.done():
                    self._hello.set_result(message)
            case EngineFailed(cause=cause, details=details):
                self._disconnect(EngineDeadError(cause, details))

    def _deliver(self, delta: TokenDelta) -> None:
        request_id = delta.request_id
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.put(delta)
            if delta.finish_reason is not None:
                stream.is_finished = True
                del self._streams[request_id]
        elif delta.finish_reason is not None:
            self._draining.discard(request_id)


def _copy(error: EngineDeadError) -> EngineDeadError:
    """An exception of its own for each who gets it: tracebacks grow on the object that is raised."""
    return type(error)(error.cause, error.details)
