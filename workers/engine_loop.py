"""The engine loop of rank 0: requests in, `EngineCore.step`, one message out per step. Runs in its own thread.

It owns the socket to the replica from `run` on. It never looks into a delta. Idle, it blocks in the kernel on
the socket and on a wake pipe, and checks the engine's integrity once: a leak ends the engine while nobody waits for it.
"""

import os
import select
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, cast

from engine.request import EngineRequest, TokenDelta
from engine.speculative.counters import StepTime
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
    FromEngine,
    Hello,
    Rejected,
    Reply,
    Shutdown,
    StepMessage,
    ToEngine,
    decode_to_engine,
    encode_frame,
    encode_value,
)

_READ_BYTES = 1 << 18  # one read between two steps: a flood of requests cannot keep the engine from stepping
_IDLE_CHECK_S = 1.0  # idle for so long, the check of a large cache (some 0.1 s) delays hardly anyone
_CALL_TIMEOUT_S = 60.0  # of a call from another thread: far above any step
_FAREWELL_S = 1.0  # time given to the last message; the replica also learns the cause from the rank's own report

T = TypeVar("T")


class Core(Protocol):
    """`engine.core.EngineCore` as the loop uses it."""

    def add_request(self, request: EngineRequest) -> None:
        """Raises ValueError for a request it cannot serve."""

    def abort(self, request_id: str) -> None:
        """Unknown ids are no error."""

    def step(self) -> list[TokenDelta]:
        """One step."""

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> Any:
        """ScheduleAck."""

    def reset_gate(self) -> None:
        """Speculate again."""

    def reset_prefix_cache(self) -> None:
        """Forget cached prefixes."""

    def counters(self) -> Any:
        """CounterSnapshot."""

    def stats(self) -> Any:
        """EngineStats."""

    def check_integrity(self) -> None:
        """Raises RuntimeError or AssertionError when state has leaked."""


class _PeerGone(Exception):
    """The replica closed the socket."""


class _Stopped(Exception):
    """`request_stop` interrupted a blocked write."""


class EngineLoop:
    """Drives `core` for the replica at the other end of `connection`, which the loop takes over and closes.

    step_times, device_name: what the engine measured before, and its GPU's model, for the replica to know.
    """

    def __init__(
        self,
        core: Core,
        connection: socket.socket,
        *,
        step_times: tuple[StepTime, ...] = (),
        device_name: str = "",
    ) -> None:
        self._core = core
        self._hello = Hello(version=PROTOCOL_VERSION, pid=os.getpid(), step_times=step_times, device_name=device_name)
        self._connection = connection
        self._frames = FrameBuffer()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._calls: deque[tuple[Callable[[Core], Any], Future[Any]]] = deque()
        self._wake_lock = threading.Lock()
        self._is_over = False
        self._stop = False
        self._beats = 0
        self._is_checked = True  # nothing has run since the last integrity check
        # poll, not select: a rank that maps many weight files may have descriptors above select's limit.
        self._until_readable = select.poll()
        self._until_readable.register(connection, select.POLLIN)
        self._until_readable.register(self._wake_read, select.POLLIN)
        self._until_writable = select.poll()
        self._until_writable.register(connection, select.POLLOUT)
        self._until_writable.register(self._wake_read, select.POLLIN)

    @property
    def beats(self) -> int:
        """Steps completed; the heartbeat. May be read from any thread."""
        return self._beats

    def request_stop(self) -> None:
        """Makes `run` return after the current step. From any thread, any number of times."""
        self._stop = True
        with self._wake_lock:
            if not self._is_over:
                os.write(self._wake_write, b"\0")

    def call(self, work: Callable[[Core], T]) -> T:
        """`work` of the core, between two steps of the loop; from any other thread.

        Raises:
            RuntimeError: the loop is over.
            TimeoutError: no step ended in time.
            Exception: whatever `work` raised; the loop goes on.
        """
        result: Future[Any] = Future()
        with self._wake_lock:
            if self._is_over:
                raise RuntimeError("the engine loop is over")
            self._calls.append((work, result))
            os.write(self._wake_write, b"\0")
        return cast(T, result.result(timeout=_CALL_TIMEOUT_S))

    def run(self) -> None:
        """Serves until the replica says so, hangs up, or `request_stop`.

        Raises:
            Exception: whatever `core` raised; the replica has been told (`EngineFailed`).
        """
        self._connection.setblocking(False)
        try:
            self._send(self._hello)
            while not self._stop:
                self._do_calls()
                self._receive(block=not self._core.has_work())
                if not self._stop and self._core.has_work():
                    deltas = self._core.step()
                    self._beats += 1
                    self._is_checked = False
                    self._send(StepMessage(beat=self._beats, deltas=tuple(deltas)))
        except (_PeerGone, _Stopped):
            return
        except Exception as error:
            self._say_farewell(error)
            raise
        finally:
            self._connection.close()
            with self._wake_lock:
                self._is_over = True
                os.close(self._wake_read)
                os.close(self._wake_write)
            for _, result in self._calls:
                result.set_exception(RuntimeError("the engine loop is over"))

    def _do_calls(self) -> None:
        """What other threads asked for. They wait, so a failure is theirs."""
        while self._calls:
            work, result = self._calls.popleft()
            try:
                result.set_result(work(self._core))
            except Exception as error:
                result.set_exception(error)

    def _drain_wake_pipe(self, ready: list[tuple[int, int]]) -> None:
        """Whoever woke the loop has left a flag or a call, which is looked at before the next wait."""
        if self._wake_read in [fd for fd, _ in ready]:
            os.read(self._wake_read, 4096)

    # ------------------------------------------------------------------------------------------------------ inbound

    def _receive(self, *, block: bool) -> None:
        if block and not self._wait_for_messages():
            return
        try:
            data = self._connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise _PeerGone from error
        if not data:
            raise _PeerGone
        for payload in self._frames.feed(data):
            self._handle(decode_to_engine(payload))

    def _wait_for_messages(self) -> bool:
        """Blocks while the engine is idle. False: woken up by another thread.

        Raises:
            RuntimeError: the engine's bookkeeping has leaked or disagrees.
        """
        ready = self._until_readable.poll(None if self._is_checked else _IDLE_CHECK_S * 1e3)
        if not ready:
            self._core.check_integrity()
            self._is_checked = True
            ready = self._until_readable.poll()
        self._drain_wake_pipe(ready)
        return self._connection.fileno() in [fd for fd, _ in ready]

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest(request=request):
                try:
                    self._core.add_request(request)
                except ValueError as error:
                    self._send(Rejected(request_id=request.request_id, message=str(error)))
            case Abort(request_id=request_id):
                self._core.abort(request_id)
            case Call(call_id=call_id, method=method):
                self._answer(call_id, method)
            case ApplySchedule(call_id=call_id, version=version, schedule=schedule):
                try:
                    value = encode_value(self._core.apply_schedule(version, schedule))
                except ValueError as error:
                    self._send(CallFailed(call_id=call_id, is_value_error=True, message=str(error)))
                else:
                    self._send(Reply(call_id=call_id, value=value))
            case Shutdown():
                self._stop = True

    def _answer(self, call_id: int, method: CallMethod) -> None:
        core = self._core
        value: object = None
        match method:
            case CallMethod.STATS:
                value = core.stats()
            case CallMethod.COUNTERS:
                value = core.counters()
            case CallMethod.CHECK_HEALTH:
                value = self._beats
            case CallMethod.RESET_GATE:
                core.reset_gate()
            case CallMethod.RESET_PREFIX_CACHE:
                core.reset_prefix_cache()
            case CallMethod.CHECK_INTEGRITY:
                try:
                    core.check_integrity()
                except (AssertionError, RuntimeError) as error:
                    # The caller asked whether the state is sound; the answer is no, with the reason.
                    message = f"{type(error).__name__}: {error}"
                    self._send(CallFailed(call_id=call_id, is_value_error=False, message=message))
                    return
        self._send(Reply(call_id=call_id, value=encode_value(value)))

    # ------------------------------------------------------------------------------------------------------ outbound

    def _send(self, message: FromEngine, timeout_s: float | None = None) -> None:
        """Writes one frame; blocks while the replica does not read, but not beyond `request_stop` or `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        rest = memoryview(encode_frame(message))
        while rest:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                if self._stop and deadline is None:
                    raise _Stopped from None
                left_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1e3)
                ready = self._until_writable.poll(left_ms)
                self._drain_wake_pipe(ready)
                if not ready:
                    raise _Stopped from None
            except ConnectionError as error:
                raise _PeerGone from error

    def _say_farewell(self, error: Exception) -> None:
        cause = f"the engine loop failed: {type(error).__name__}: {error}"[:4000]
        details = "".join(traceback.format_exception(error))[-20000:]
        try:
            self._send(EngineFailed(cause=cause, details=details), timeout_s=_FAREWELL_S)
        except (_PeerGone, _Stopped):
            return  # nobody reads any more; the rank's own report carries the same cause
