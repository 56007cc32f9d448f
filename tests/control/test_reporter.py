"""A replica without a controller: the configured schedule, also one that is changed meanwhile."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from cluster.control import reporter as module
from cluster.control.reporter import Reporter
from engine.speculative.schedule import ScheduleAck


class Engine:
    """Keeps what is put in force; an earlier controller has set a schedule."""

    def __init__(self) -> None:
        self.applied = [((3, 8), {8: 1})]

    async def stats(self) -> SimpleNamespace:
        version, schedule = self.applied[-1]
        return SimpleNamespace(schedule_version=version, schedule=schedule)

    async def counters(self) -> SimpleNamespace:
        return SimpleNamespace(cells=())

    async def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> ScheduleAck:
        self.applied.append((version, schedule))
        return ScheduleAck(applied=True, version=version, schedule=schedule)


async def nobody() -> object:
    raise ConnectionError("no controller")


async def test_a_schedule_configured_without_a_controller_is_put_in_force_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", (0.01, 0.01))
    engine, configured = Engine(), {8: 3}
    reporter = Reporter(
        facts=SimpleNamespace(),
        engine=engine,
        rank0=None,
        connect=nobody,
        static_schedule=lambda: dict(configured),
        fallback_s=0.0,
    )
    task = asyncio.create_task(reporter.run())
    await asyncio.sleep(0.2)
    assert engine.applied[1:] == [((3, 9), {8: 3})]
    configured[8] = 5
    await asyncio.sleep(0.2)
    assert engine.applied[1:] == [((3, 9), {8: 3}), ((3, 10), {8: 5})]
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
