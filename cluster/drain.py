"""The end of a replica's service: no new requests, time for those in progress, an answer to those it cuts.

`Drain` ends the service, once. `StopNotice` notices that Ray Serve is stopping the replica: Serve itself tells the
replica only afterwards, when it has waited for every request.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator

from cluster.admission import Admission, ReplicaState

_POLL_S = 0.1
_ANSWER_S = 1.0  # for a cut request to see that the engine is gone
_FLUSH_S = 0.3  # for the last bytes of an answer to leave this process
_SILENCE_PERIODS = 3  # without a health check: somebody else is slow, or this replica is being stopped


class Drain:
    """Ends the service of one replica.

    Args:
        close_engine: ends the engine; every open request then fails with EngineClosedError and is answered with it.
    """

    def __init__(self, *, admission: Admission, close_engine: Callable[[], Awaitable[None]]) -> None:
        self._admission = admission
        self._close_engine = close_engine
        self._run: asyncio.Task[int] | None = None

    async def run(self, limit_s: float) -> int:
        """Give open requests `limit_s`, then end the engine and with it what still runs. Later calls join the first.

        Returns:
            The number of requests that were cut.
        """
        if self._run is None:
            self._run = asyncio.create_task(self._drain(limit_s), name="drain")
        return await asyncio.shield(self._run)

    async def _drain(self, limit_s: float) -> int:
        self._admission.state = ReplicaState.DRAINING
        await self._wait_idle(limit_s)
        num_cut = self._admission.num_requests
        await self._close_engine()
        await self._wait_idle(_ANSWER_S)
        await asyncio.sleep(_FLUSH_S)
        return num_cut

    async def _wait_idle(self, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while self._admission.num_requests and (left_s := deadline_s - time.monotonic()) > 0:
            await asyncio.sleep(min(_POLL_S, left_s))


class StopNotice:
    """Notices that Serve stops this replica: it checks a replica's health for as long as it wants it, and no longer.

    Silence begins at the end of a check: Serve begins no other one while it waits for the answer, which takes as long
    as a step of the engine. Silence alone may be a slow or dead controller, so it only leads to the question whether
    Serve stops replicas.

    Args:
        period_s: time between two health checks.
        is_stopping: asks Serve, blocking, whether replicas of this deployment are being stopped; any exception means
            that nobody knows.
    """

    def __init__(self, *, period_s: float, is_stopping: Callable[[], bool]) -> None:
        self._period_s = period_s
        self._is_stopping = is_stopping
        self._num_checks = 0  # in progress
        self._last_check_s = time.monotonic()  # when the last one ended

    @contextlib.contextmanager
    def health_check(self) -> Iterator[None]:
        """Serve wants this replica, from here to the check's end."""
        self._num_checks += 1
        try:
            yield
        finally:
            self._num_checks -= 1
            self._last_check_s = time.monotonic()

    async def wait(self) -> float:
        """Returns when this replica is being stopped, with the seconds since that may have begun."""
        while True:
            await asyncio.sleep(self._period_s / 4)
            silence_s = time.monotonic() - self._last_check_s
            if self._num_checks or silence_s < _SILENCE_PERIODS * self._period_s:
                continue
            asked_at_s = self._last_check_s
            try:
                is_stopping = await asyncio.to_thread(self._is_stopping)
            except Exception:  # whatever Ray raises while its controller is away
                is_stopping = False
            if is_stopping and not self._num_checks and self._last_check_s == asked_at_s:
                return max(0.0, silence_s - self._period_s)
