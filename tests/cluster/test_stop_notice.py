"""A replica takes silence about its health for its end, and a check that waits for a long step for no silence."""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from cluster.drain import StopNotice
from cluster.model_server import ModelServer

PERIOD_S = 0.02
LONG_S = 12 * PERIOD_S  # four times the silence that leads to the question


class Replica:
    """What `ModelServer.check_health` reads; the engine answers once `step_ends`."""

    def __init__(self, notice: StopNotice, *, stall_timeout_s: float = 30.0) -> None:
        self.step_ends = asyncio.Event()
        client = SimpleNamespace(check_health=self.step_ends.wait)
        self._parts = SimpleNamespace(
            _stop_notice=notice,
            _is_dead=False,
            _config=SimpleNamespace(deployment=SimpleNamespace(stall_timeout_s=stall_timeout_s)),
            _engine=SimpleNamespace(group=SimpleNamespace(client=client)),
        )

    async def check_health(self) -> None:
        await ModelServer.check_health(self._parts)


async def test_a_check_that_waits_for_a_long_step_is_no_silence() -> None:
    notice = StopNotice(period_s=PERIOD_S, is_stopping=lambda: True)
    replica = Replica(notice)
    noticed = asyncio.create_task(notice.wait())
    check = asyncio.create_task(replica.check_health())
    await asyncio.sleep(LONG_S)
    assert not noticed.done()
    ended_s = time.monotonic()
    replica.step_ends.set()
    await check
    await asyncio.wait_for(noticed, 10)
    assert time.monotonic() - ended_s >= 3 * PERIOD_S  # a whole silence, from the end of the check


async def test_a_check_that_fails_has_ended_too() -> None:
    notice = StopNotice(period_s=PERIOD_S, is_stopping=lambda: True)
    with pytest.raises(TimeoutError):
        await Replica(notice, stall_timeout_s=PERIOD_S).check_health()
    await asyncio.wait_for(notice.wait(), 10)


async def test_a_check_that_begins_while_serve_is_asked_says_that_the_replica_is_wanted() -> None:
    asked, answer = threading.Event(), threading.Event()
    num_asked = 0

    def is_stopping() -> bool:
        nonlocal num_asked
        num_asked += 1
        asked.set()
        return answer.wait(10)

    notice = StopNotice(period_s=PERIOD_S, is_stopping=is_stopping)
    replica = Replica(notice)
    noticed = asyncio.create_task(notice.wait())
    assert await asyncio.to_thread(asked.wait, 10)
    check = asyncio.create_task(replica.check_health())
    await asyncio.sleep(0)
    answer.set()
    await asyncio.sleep(LONG_S)
    assert (noticed.done(), num_asked) == (False, 1)
    replica.step_ends.set()
    await check
    await asyncio.wait_for(noticed, 10)
