"""`Reporter`: a replica's side of the control loop, a background task of its process.

Tells the controller what the engine counted, and puts in force what a reply asks for. Never on anybody's way: without a
controller the replica serves on with its schedule, after `fallback_s` with its configured one.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from ray.exceptions import RayError

from cluster.control.messages import (
    PROTOCOL_VERSION,
    CellCounts,
    ControlOptions,
    Order,
    Registration,
    Reply,
    Report,
    cell_counts,
    report_interval_s,
)
from cluster.error_text import first_line
from engine.core import EngineStats
from engine.speculative.counters import CounterSnapshot, StepTime
from engine.speculative.schedule import ScheduleAck, Version
from workers.errors import EngineDeadError

logger = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 5.0
_RETRY_S = 1.0  # first pause after a failure
_RETRY_INTERVALS = 2.0  # of reports: the longest pause, so that few replicas are back in seconds and many are no flood
_JITTER = 0.1  # so that replicas started together do not report together for ever


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaFacts:
    """What a controller must know of a replica once. accelerator: replicas that name the same one share step times."""

    replica_id: str
    accelerator: str
    block_width: int
    draft_lens: tuple[int, ...]
    max_num_seqs: int
    step_times: tuple[StepTime, ...]
    options: ControlOptions


class CountingEngine(Protocol):
    """The engine client as the reporter uses it. All raise EngineDeadError once the engine is dead."""

    async def stats(self) -> EngineStats:
        """Gauges."""
        ...

    async def counters(self) -> CounterSnapshot:
        """Cumulative counts."""
        ...

    async def apply_schedule(self, version: Version, schedule: dict[int, int]) -> ScheduleAck:
        """Puts a newer schedule in force."""
        ...


class Reporter:
    """One replica's reports. `run` is the task.

    rank0: the actor handle that the controller pushes to. connect: finds or makes the controller.
    static_schedule: the configured one, which may change while serving.
    """

    def __init__(
        self,
        *,
        facts: ReplicaFacts,
        engine: CountingEngine,
        rank0: Any,
        connect: Callable[[], Awaitable[Any]],
        static_schedule: Callable[[], dict[int, int]],
        fallback_s: float,
    ) -> None:
        self._facts = facts
        self._engine = engine
        self._rank0 = rank0
        self._connect = connect
        self._static_schedule = static_schedule
        self._fallback_s = fallback_s
        self._incarnation = time.time_ns()
        self._sequence = 0
        self._controller: Any = None
        self._is_registered = False
        self._known: dict[tuple[int, int], CellCounts] = {}  # cells of reports that were answered
        self._order: Order | None = None
        self._heard_at = time.monotonic()
        self._fallback: tuple[Version, dict[int, int]] | None = None  # what was put in force without a controller
        self._reply = msgspec.msgpack.Decoder(Reply)
        self._encoder = msgspec.msgpack.Encoder()

    @property
    def is_connected(self) -> bool:
        """Whether the controller answered the last message."""
        return self._is_registered

    async def run(self) -> None:
        """Reports until cancelled, or until the engine is dead."""
        try:
            await self._run()
        except EngineDeadError:
            return  # the replica ends, and says why

    async def _run(self) -> None:
        pause_s, interval_s = 0.0, report_interval_s(1)
        retry_s = _RETRY_S
        was_lost = False
        while True:
            await asyncio.sleep(pause_s * random.uniform(1 - _JITTER, 1 + _JITTER))
            stats, counters = await self._engine.stats(), await self._engine.counters()
            try:
                reply = await self._exchange(stats, counters)
            except Exception as error:  # nothing that is wrong with a controller may end the reports
                if not was_lost:
                    logger.warning(
                        "The speculation controller does not answer (%s); this replica goes on without it",
                        first_line(error),
                    )
                was_lost, self._is_registered, self._controller = True, False, None
                await self._maybe_fall_back()
                pause_s, retry_s = retry_s, min(2 * retry_s, _RETRY_INTERVALS * interval_s)
                continue
            if was_lost:
                logger.info("The speculation controller answers again")
            was_lost, retry_s, interval_s = False, _RETRY_S, reply.interval_s
            pause_s = await self._follow(reply)

    async def leave(self) -> None:
        """Tells the controller that this replica ends; without waiting long, and for its convenience only."""
        if not self._is_registered:
            return
        self._is_registered = False
        try:
            async with asyncio.timeout(1.0):
                await self._controller.leave.remote(self._facts.replica_id, self._incarnation)
        except (RayError, TimeoutError) as error:
            logger.info("The controller did not take note of this replica's end: %s", type(error).__name__)

    async def _exchange(self, stats: EngineStats, counters: CounterSnapshot) -> Reply:
        """Registers or reports."""
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            if self._controller is None:
                self._controller = await self._connect()
            if self._is_registered:
                self._sequence += 1
                report = self._report(stats, counters)
                answer = await self._controller.report.remote(self._encoder.encode(report))
                self._known |= {(cell.batch_bucket, cell.draft_len): cell for cell in report.cells}
            else:
                self._known = {}
                registration = self._encoder.encode(self._registration(stats, counters))
                answer = await self._controller.register.remote(PROTOCOL_VERSION, registration, self._rank0)
        return self._reply.decode(answer)

    async def _follow(self, reply: Reply) -> float:
        """Puts in force what the reply asks for. Returns the seconds to the next message."""
        self._is_registered = not reply.must_register
        self._heard_at = time.monotonic()
        if reply.must_register:
            return 0.0
        if reply.order is not None:
            self._order = reply.order
        if reply.version is not None and reply.schedule is not None:
            await self._apply(reply.version, reply.schedule)
        return reply.interval_s

    async def _maybe_fall_back(self) -> None:
        """Puts the configured schedule in force when a controller's is and nobody has been heard of for long."""
        if time.monotonic() - self._heard_at < self._fallback_s:
            return
        epoch, number = (await self._engine.stats()).schedule_version
        schedule = self._static_schedule()
        if epoch == 0 or ((epoch, number), schedule) == self._fallback:
            return
        logger.warning(
            "No speculation controller for %g s: the configured draft lengths %s are in force again",
            self._fallback_s,
            schedule,
        )
        self._fallback = (epoch, number + 1), dict(schedule)
        await self._apply((epoch, number + 1), schedule)

    async def _apply(self, version: Version, schedule: dict[int, int]) -> None:
        try:
            await self._engine.apply_schedule(version, schedule)
        except ValueError as error:
            logger.error("The engine refuses schedule %s, version %s: %s", schedule, version, error)

    def _registration(self, stats: EngineStats, counters: CounterSnapshot) -> Registration:
        facts = self._facts
        return Registration(
            protocol=PROTOCOL_VERSION,
            replica_id=facts.replica_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            accelerator=facts.accelerator,
            block_width=facts.block_width,
            draft_lens=facts.draft_lens,
            max_num_seqs=facts.max_num_seqs,
            static_schedule=self._static_schedule(),
            version=stats.schedule_version,
            schedule=stats.schedule,
            step_times=facts.step_times,
            cells=cell_counts(counters),
            order=self._order,
            options=facts.options,
        )

    def _report(self, stats: EngineStats, counters: CounterSnapshot) -> Report:
        cells = cell_counts(counters)
        return Report(
            replica_id=self._facts.replica_id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            version=stats.schedule_version,
            gate_disabled=stats.speculation_disabled,
            cells=tuple(cell for cell in cells if cell != self._known.get((cell.batch_bucket, cell.draft_len))),
            draft_len=stats.draft_len,
            num_running=stats.num_running,
            num_ended=sum(counters.finished.values()),
        )
