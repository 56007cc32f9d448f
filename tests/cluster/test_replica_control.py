"""A replica's way to its controller: when it begins, what it says first, and what it may hold up."""

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest

from cluster import replica_control
from cluster.admission import Admission
from cluster.config_sections import ControllerSection
from cluster.control import reporter
from cluster.control.messages import Registration, Reply
from cluster.live_settings import LiveSettings
from cluster.model_server import ModelServer
from cluster.replica_control import ReplicaControl
from cluster.replica_engine import ControlFacts, ReplicaEngine, accelerator_name
from engine.core import EngineStats
from engine.speculative.schedule import ScheduleAck
from tests.stats import engine_stats

DEFAULT = {4: 7}


class Client:
    """The engine's side of schedules."""

    def __init__(self) -> None:
        self.version, self.schedule = (0, 0), dict(DEFAULT)

    async def apply_schedule(self, version: tuple[int, int], schedule: dict[int, int]) -> ScheduleAck:
        applied = version > self.version
        if applied:
            self.version, self.schedule = version, schedule
        return ScheduleAck(applied=applied, version=self.version, schedule=self.schedule)

    async def counters(self) -> SimpleNamespace:
        return SimpleNamespace(cells=())

    async def stats(self) -> EngineStats:
        return engine_stats(schedule_version=self.version, schedule=self.schedule)


class Controller:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.registrations: list[Registration] = []
        self.register, self.leave = (SimpleNamespace(remote=call) for call in (self._register, self._leave))

    async def _register(self, protocol: int, registration: bytes, rank0: object) -> bytes:
        self.registrations.append(msgspec.msgpack.decode(registration, type=Registration))
        return msgspec.msgpack.encode(Reply(interval_s=60.0))

    async def _leave(self, replica_id: str, incarnation: int) -> None:
        pass


def parts() -> tuple[ReplicaControl, LiveSettings]:
    engine = ReplicaEngine(
        group=SimpleNamespace(client=Client()),
        tokenizer=None,
        model_dir=tempfile.gettempdir(),
        max_model_len=100,
        vocab_size=10,
        max_draft_len=7,
        static_schedule=dict(DEFAULT),
        control=ControlFacts(rank0=None, accelerator="toy", block_width=8, draft_lens=(0, 3, 7)),
    )
    live = LiveSettings(engine=engine, admission=Admission(max_num_seqs=4, queue_limit=1), drain_s=2.0)
    control = ReplicaControl(
        config=SimpleNamespace(controller=ControllerSection(enabled=True), engine=SimpleNamespace(max_num_seqs=4)),
        engine=engine,
        live=live,
        replica=SimpleNamespace(replica_id=SimpleNamespace(unique_id="r"), app_name="a", deployment="d"),
    )
    return control, live


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_controller_hears_first_of_the_configured_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = Controller()
    monkeypatch.setattr(replica_control, "find_or_make_controller", lambda app, deployment: controller)
    control, live = parts()
    await asyncio.sleep(0.1)
    assert controller.registrations == [] and control.is_connected is False
    server = SimpleNamespace(_live=live, _control=control)
    for _ in range(2):  # the second one starts nothing
        values = {"queue_limit": 1, "drain_s": 2.0, "draft_len_schedule": {"2": 3}}
        await ModelServer.reconfigure(server, values)
    await until(lambda: control.is_connected)
    (told,) = controller.registrations
    assert (told.static_schedule, told.schedule, told.version) == ({2: 3}, {2: 3}, (0, 1))
    await control.stop()


async def test_a_head_that_does_not_answer_holds_one_thread_and_none_of_the_loop_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    released = threading.Event()

    def hang(app: str, deployment: str) -> object:
        calls.append(app)
        released.wait(10)
        raise ConnectionError("no head")

    monkeypatch.setattr(replica_control, "find_or_make_controller", hang)
    monkeypatch.setattr(reporter, "_CALL_TIMEOUT_S", 0.02)
    monkeypatch.setattr(reporter, "_RETRY_S", 0.01)
    monkeypatch.setattr(reporter, "_RETRY_INTERVALS", 0.01)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=2))
    control, _ = parts()
    control.start()
    try:
        await asyncio.sleep(0.3)
        assert calls == ["a"]
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 1) == "free"
    finally:
        released.set()
        await control.stop()


def test_what_takes_other_times_for_a_step_has_another_name() -> None:
    drafter = SimpleNamespace(block_size=16)
    values = {"device": "cuda", "dtype": "bfloat16", "tensor_parallel_size": 1, "target": "T", "drafter": drafter}

    def named(device_name: str = "NVIDIA H200", **changes: object) -> str:
        return accelerator_name(SimpleNamespace(block_width=16, **(values | changes)), device_name)

    assert named() == named()
    assert named().startswith("NVIDIA H200, bfloat16, TP 1, model ")
    others = [named("NVIDIA A100"), named(tensor_parallel_size=2), named(target="T2"), named(drafter=None)]
    assert len({named(), *others}) == 5
    assert accelerator_name(SimpleNamespace(block_width=8, **values), "NVIDIA H200") == named() + ", block of 8"
    cpu = named("", device="cpu", num_threads=4)
    assert cpu.startswith("cpu, 4 threads, bfloat16, TP 1, model ")
