"""A replica's reports: what they hold, and what a replica does without a controller."""

import asyncio
import contextlib
from types import SimpleNamespace

import msgspec
import pytest

from cluster.control import reporter as module
from cluster.control.messages import CellCounts, ControlOptions, Registration, Reply, Report
from cluster.control.reporter import ReplicaFacts, Reporter
from engine.speculative.counters import StepCell
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
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    monkeypatch.setattr(module, "_RETRY_INTERVALS", 0.01)
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


class Controller:
    """Keeps the cells it is told; `fails`: the next report is not answered."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[tuple[int, int, int]]]] = []
        self.fails = False
        self.register, self.report = (SimpleNamespace(remote=call) for call in (self._register, self._report))

    async def _register(self, protocol: int, registration: bytes, rank0: object) -> bytes:
        return self._hear("registration", msgspec.msgpack.decode(registration, type=Registration).cells)

    async def _report(self, report: bytes) -> bytes:
        cells = msgspec.msgpack.decode(report, type=Report).cells
        if self.fails:
            self.fails = False
            raise ConnectionError("lost on the way")
        return self._hear("report", cells)

    def _hear(self, what: str, cells: tuple[CellCounts, ...]) -> bytes:
        self.told.append((what, [(cell.batch_bucket, cell.draft_len, cell.steps) for cell in cells]))
        return msgspec.msgpack.encode(Reply(interval_s=0.01))


class Counting(Engine):
    """One program goes on at every look, another one has come to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    async def stats(self) -> SimpleNamespace:
        facts = {"speculation_disabled": False, "draft_len": 1, "num_running": 1}
        return SimpleNamespace(schedule_version=(3, 8), schedule={8: 1}, **facts)

    async def counters(self) -> SimpleNamespace:
        self.steps += 1
        rests = {"shadow_at_risk": (), "shadow_accepted": (), "decode_steps": 0, "decode_time_s": 0.0, "rows": 0}
        cells = [
            StepCell(batch_bucket=bucket, draft_len=1, steps=steps, tokens=0, at_risk=(), accepted=(), **rests)
            for bucket, steps in ((1, 5), (2, self.steps))
        ]
        return SimpleNamespace(cells=tuple(cells), finished={"length": self.steps})


async def test_a_report_names_what_has_changed_since_the_last_one_that_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    monkeypatch.setattr(module, "_RETRY_INTERVALS", 0.01)
    controller = Controller()

    async def connect() -> Controller:
        return controller

    reporter = Reporter(
        facts=ReplicaFacts(
            replica_id="r",
            accelerator="toy",
            block_width=2,
            draft_lens=(0, 1),
            max_num_seqs=8,
            step_times=(),
            options=ControlOptions(),
        ),
        engine=Counting(),
        rank0=None,
        connect=connect,
        static_schedule=lambda: {8: 1},
        fallback_s=60.0,
    )
    task = asyncio.create_task(reporter.run())
    while len(controller.told) < 4:
        await asyncio.sleep(0.005)
    controller.fails = True
    while len(controller.told) < 8:
        await asyncio.sleep(0.005)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    told = [(what, [bucket for bucket, _, _ in cells]) for what, cells in controller.told]
    after = [what for what, _ in told].index("registration", 1)
    assert told[:4] == [("registration", [1, 2]), ("report", [1, 2]), ("report", [2]), ("report", [2])]
    assert told[after : after + 3] == [("registration", [1, 2]), ("report", [1, 2]), ("report", [2])]
