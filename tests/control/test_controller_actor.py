"""The controller as an actor: made by replicas, pushing to rank 0, gone when it should be, and never needed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import ray
from ray.experimental import internal_kv

from cluster.control.controller import (
    NAMESPACE,
    SpeculationController,
    find_controller,
    find_or_make_controller,
    remove_controller,
)
from cluster.control.messages import PROTOCOL_VERSION, ControlOptions, Order
from cluster.control.reporter import ReplicaFacts, Reporter
from cluster.control.status import ControllerStatus
from engine.core import EngineStats
from engine.speculative.counters import CounterSnapshot, StepCell
from engine.speculative.schedule import DraftLengthSchedule, ScheduleAck
from tests.control.messages import DRAFT_LENS, STEP_TIMES, CountingReplica
from tests.stats import engine_stats

EASY, HARD = [0.95] * 7, [0.1] * 7
STATIC = {2: 7, 8: 3}


class Engine:
    """An engine of made-up counts, in the process of the test; `RankZero` reaches it through an actor's state."""

    def __init__(self, replica_id: str, *, seed: int) -> None:
        self.replica = CountingReplica(replica_id, seed=seed, static=STATIC)
        self.hazards = EASY
        self.rank0 = RankZero.remote()
        self.is_gate_tripped = True

    async def stats(self) -> EngineStats:
        version, schedule, self.is_gate_tripped = await self.rank0.get.remote()
        return engine_stats(
            num_running=8,
            draft_len=DraftLengthSchedule(schedule).draft_len(8),
            schedule_version=version,
            schedule=schedule,
            speculation_disabled=self.is_gate_tripped,
        )

    async def counters(self) -> CounterSnapshot:
        draft_len = (await self.stats()).draft_len
        self.replica.decode(rows=8, draft_len=draft_len, hazards=self.hazards, steps=20, scored=7)
        cells = tuple(
            StepCell(tokens=0, **{name: getattr(cell, name) for name in cell.__struct_fields__})
            for cell in self.replica.cells
        )
        return CounterSnapshot(
            cells=cells, **{name: 0 for name in CounterSnapshot.__struct_fields__ if name not in EMPTY}, **EMPTY_VALUES
        )

    async def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> ScheduleAck:
        return await self.rank0.apply_schedule.remote(version, schedule)


EMPTY_VALUES = {"num_accepted_tokens_per_pos": (), "finished": {}}
EMPTY = {"cells", *EMPTY_VALUES}


@ray.remote(num_cpus=0)
class RankZero:
    """What the controller sees of a replica."""

    def __init__(self) -> None:
        self.version, self.schedule, self.is_gate_tripped = (0, 0), dict(STATIC), True
        self.versions: list[tuple[int, int]] = []

    def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> ScheduleAck:
        applied = version > self.version
        if applied:
            self.version, self.schedule = version, schedule
            self.versions.append(version)
        return ScheduleAck(applied=applied, version=self.version, schedule=self.schedule)

    def reset_gate(self) -> None:
        self.is_gate_tripped = False

    def be_busy(self, seconds: float) -> None:
        time.sleep(seconds)

    def get(self) -> tuple[tuple[int, int], dict[int, int], bool]:
        return self.version, self.schedule, self.is_gate_tripped

    def history(self) -> list[tuple[int, int]]:
        return self.versions


class Broken(SpeculationController):
    """A controller whose constructor fails."""

    def __init__(self, app: str, deployment: str) -> None:
        raise RuntimeError("out of order")


class Replicas:
    """Reporters of one application in this process."""

    def __init__(self, app: str, num: int, *, fallback_s: float = 60.0, actor_class: list[type] | None = None) -> None:
        self.app = app
        self.engines = [Engine(f"{app}-{n}", seed=n) for n in range(num)]
        self.actor_class = actor_class
        self.reporters = [
            Reporter(
                facts=ReplicaFacts(
                    replica_id=engine.replica.replica_id,
                    accelerator="toy",
                    block_width=8,
                    draft_lens=DRAFT_LENS,
                    max_num_seqs=8,
                    step_times=STEP_TIMES,
                    options=ControlOptions(),
                ),
                engine=engine,
                rank0=engine.rank0,
                connect=self.connect,
                static_schedule=lambda: dict(STATIC),
                fallback_s=fallback_s,
            )
            for engine in self.engines
        ]
        self.tasks = [asyncio.create_task(reporter.run()) for reporter in self.reporters]

    async def connect(self) -> object:
        classes = {} if self.actor_class is None else {"actor_class": self.actor_class[0]}
        return await asyncio.to_thread(lambda: find_or_make_controller(self.app, "d", **classes))

    async def until(self, condition: Callable[[list[dict[int, int]]], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            schedules = [(await engine.rank0.get.remote())[1] for engine in self.engines]
            if condition(schedules):
                return
            for task in self.tasks:
                assert not task.done(), task.exception()
            assert time.monotonic() < deadline, schedules
            await asyncio.sleep(0.2)

    async def until_registered(self) -> None:
        deadline = time.monotonic() + 60
        while not all(reporter.is_connected for reporter in self.reporters):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    async def status(self) -> ControllerStatus:
        return msgspec.msgpack.decode(await find_controller(self.app, "d").status.remote(), type=ControllerStatus)


@contextlib.asynccontextmanager
async def replicas(app: str, num: int = 2, **options: object) -> AsyncIterator[Replicas]:
    running = Replicas(app, num, **options)
    try:
        yield running
    finally:
        for task in running.tasks:
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)
        for engine in running.engines:
            ray.kill(engine.rank0)
        remove_controller(app, "d")


@pytest.fixture(autouse=True)
def cluster(ray_cluster: None) -> Iterator[None]:
    yield
    left = [a for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE]
    assert left == []


def all_have(draft_len: int) -> Callable[[list[dict[int, int]]], bool]:
    return lambda schedules: all(schedule.get(8) == draft_len for schedule in schedules)


async def test_replicas_make_one_controller_that_pushes_and_obeys_operators() -> None:
    async with replicas("push") as running:
        await running.until(all_have(7))
        for engine in running.engines:
            engine.hazards = HARD
        await running.until(all_have(0))
        # Replicas of a mind of their own may be there before the line of both, which waits out its dwell time.
        bound, deadline = None, time.monotonic() + 30
        while (bound is None or bound.draft_len != 0) and time.monotonic() < deadline:
            status = await running.status()
            (bound,) = [bound for bound in status.lines[0].bounds if bound.batch_size == 8]
            await asyncio.sleep(0.2)
        assert {replica.replica_id for replica in status.replicas} == {"push-0", "push-1"}
        assert status.epoch == 1 and status.lines[0].num_replicas == 2
        assert bound.draft_len == 0 and "gains" in bound.reason and bound.changed_s_ago is not None
        controller = find_controller("push", "d")
        assert set(await controller.reset_gates.remote()) == {"push-0", "push-1"}
        assert not any([(await engine.stats()).speculation_disabled for engine in running.engines])
        running.engines[0].rank0.be_busy.remote(1.0)
        waiting = controller.reset_gates.remote()
        await asyncio.sleep(0.3)
        with pytest.raises(ValueError, match="are being reset already"):  # calls that wait would keep reports waiting
            await controller.reset_gates.remote()
        assert set(await waiting) == {"push-0", "push-1"}
        order = Order(mode="pin", issued_at=time.time(), schedule={8: 2})
        await controller.give.remote(msgspec.msgpack.encode(order))
        await running.until(all_have(2))
        with pytest.raises(ValueError, match="max_draft_len"):
            await controller.give.remote(msgspec.msgpack.encode(Order(mode="pin", issued_at=9e9, schedule={8: 9})))


async def test_applications_do_not_hear_of_each_other() -> None:
    async with replicas("one", num=1) as one, replicas("two", num=1) as two:
        await one.until_registered()
        await two.until_registered()
        order = Order(mode="pin", issued_at=time.time(), schedule={8: 2})
        await find_controller("one", "d").give.remote(msgspec.msgpack.encode(order))
        await one.until(all_have(2))
        seen, other = await one.status(), await two.status()
        assert (seen.app, [r.replica_id for r in seen.replicas], seen.order) == ("one", ["one-0"], order)
        assert (other.app, [r.replica_id for r in other.replicas], other.order) == ("two", ["two-0"], None)
        assert (await two.engines[0].rank0.get.remote())[1] != {8: 2}


async def test_a_killed_controller_returns_with_a_later_epoch_and_what_was_ordered() -> None:
    async with replicas("kill") as running:
        await running.until_registered()
        order = Order(mode="pin", issued_at=time.time(), schedule={8: 2})
        await find_controller("kill", "d").give.remote(msgspec.msgpack.encode(order))
        await running.until(all_have(2))
        await asyncio.sleep(1.5)  # replicas hear of the order
        endless = Order(mode="release", issued_at=float("inf"))
        with pytest.raises(ValueError, match="issued_at: must be a finite"):
            await find_controller("kill", "d").give.remote(msgspec.msgpack.encode(endless))
        order = Order(mode="pin", issued_at=time.time(), schedule={8: 3})
        await find_controller("kill", "d").give.remote(msgspec.msgpack.encode(order))  # of this one they do not
        ray.kill(find_controller("kill", "d"), no_restart=False)

        async def have_taken_over() -> bool:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                found = (await running.status()).replicas
                return len(found) == 2 and all(r.version == r.target and r.version[0] == 2 for r in found)
            return False

        deadline = time.monotonic() + 60
        while not await have_taken_over():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        assert (await running.status()).order == order
        for engine in running.engines:
            versions = await engine.rank0.history.remote()
            assert versions == sorted(set(versions)) and versions[-1][0] == 2
        await running.until(all_have(3))


async def test_a_kept_order_that_cannot_be_read_keeps_no_controller_from_starting() -> None:
    internal_kv._internal_kv_put(b"order/torn/d", b"\xc1", overwrite=True, namespace=b"dflash")
    async with replicas("torn", num=1) as running:
        await running.until_registered()
        assert (await running.status()).order is None
    assert internal_kv._internal_kv_get(b"order/torn/d", namespace=b"dflash") is None


async def test_without_a_controller_replicas_go_on_fall_back_and_are_found_again() -> None:
    classes: list[type] = [Broken]
    async with replicas("absent", actor_class=classes, fallback_s=3.0) as running:
        for n, engine in enumerate(running.engines):  # as an earlier controller left them
            await engine.apply_schedule((4, 2 + n), {8: 5})
        await running.until(lambda schedules: all(schedule == STATIC for schedule in schedules))
        classes[0] = SpeculationController
        await running.until(all_have(7))
        assert (await running.status()).epoch == 5
        assert not any(task.done() for task in running.tasks)


async def test_a_controller_before_a_newer_protocol_and_one_without_application_ends() -> None:
    async with replicas("old", num=1) as running:
        await running.until_registered()
        before = find_controller("old", "d")
        with pytest.raises(ray.exceptions.RayError):
            await before.register.remote(PROTOCOL_VERSION + 1, b"", None)
    # No Serve runs here, so once the last replica has left, the application is gone.
    async with replicas("gone", num=1) as running:
        await running.until_registered()
        running.tasks[0].cancel()
        await running.reporters[0].leave()
        deadline = time.monotonic() + 60
        while True:
            try:
                find_controller("gone", "d")
            except ValueError:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
