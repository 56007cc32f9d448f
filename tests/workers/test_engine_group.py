"""EngineGroup on a real local Ray cluster, with ranks that have no model: life, faults, and nothing left behind."""

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from engine.config.engine import EngineConfig
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.workers.fakes import FakeConfig
from tests.workers.ray_cluster import local_ray
from workers import engine_group
from workers.engine_group import EngineGroup
from workers.errors import EngineDeadError, EngineStartError
from workers.gpu_worker import RankInfo

FACTORY = "tests.workers.fakes:build_fake_rank"
RINGS = f"dflash-plans-of-{os.getpid()}"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray():
        yield


@pytest.fixture(autouse=True)
def own_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What groups of this process leave is told from what other processes' groups have just now."""
    with tempfile.TemporaryDirectory(prefix="t-") as directory:  # short: a socket's path has a limit
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setattr(engine_group, "new_ring_name", lambda: f"{RINGS}-{secrets.token_hex(8)}")
        yield


def traces() -> dict[str, Any]:
    """What a group could leave behind."""
    tables = ray.util.placement_group_table()
    return {
        "actors": sorted(key for key, actor in ray._private.state.actors().items() if actor["State"] not in ("DEAD",)),
        "placement groups": sorted(key for key, table in tables.items() if table["state"] != "REMOVED"),
        "shared memory": sorted(str(path) for path in Path("/dev/shm").glob(f"{RINGS}-*")),
        "sockets": sorted(
            str(path) for path in Path(tempfile.gettempdir()).glob("dflash-*") if (path / "rank0").exists()
        ),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def leaks(before: dict[str, Any]) -> dict[str, Any]:
    """What differs from before. Ray's internals and the event loop open a few descriptors when first used."""
    now = traces()
    few = now["descriptors"] - before["descriptors"] < 8
    return {k: v for k, v in now.items() if v != before[k] and not (k == "descriptors" and few)}


async def assert_nothing_left(before: dict[str, Any], pids: tuple[int, ...]) -> None:
    deadline = time.monotonic() + 3  # the cluster's own tables follow a little later
    while leaks(before) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert not leaks(before)
    assert not [pid for pid in pids if is_running(pid)]


async def start(config: FakeConfig, **kwargs: Any) -> EngineGroup:
    return await EngineGroup.start(cast(EngineConfig, config), factory=FACTORY, **kwargs)


@asynccontextmanager
async def running(config: FakeConfig, **kwargs: Any) -> AsyncIterator[EngineGroup]:
    group = await start(config, **kwargs)
    try:
        yield group
    finally:
        await group.close()


def request(request_id: str, num: int = 10) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=(100,), params=SamplingParams(max_tokens=num, temperature=0.0)
    )


async def consume(group: EngineGroup, req: EngineRequest) -> list[int]:
    tokens: list[int] = []
    async for delta in group.client.submit(req):
        tokens += delta.token_ids
    return tokens


async def long_streams(group: EngineGroup, count: int) -> list["asyncio.Task[list[int]]"]:
    """`count` running streams that would take for ever."""
    before = group.client.num_messages
    tasks = [asyncio.create_task(consume(group, request(f"long{i}", 10**6))) for i in range(count)]
    while group.client.num_messages < before + 3:
        await asyncio.sleep(0.01)
    return tasks


async def assert_all_fail(tasks: list["asyncio.Task[list[int]]"], message: str, within_s: float) -> None:
    started = time.monotonic()
    done, pending = await asyncio.wait(tasks, timeout=within_s + 5)
    assert not pending
    assert time.monotonic() - started < within_s
    for task in done:
        with pytest.raises(EngineDeadError, match=message):
            task.result()


@pytest.mark.parametrize("size", [1, 2])
async def test_start_stream_abort_close(size: int) -> None:
    before, phases = traces(), []
    group = await start(
        FakeConfig(tensor_parallel_size=size, step_s=0.002),
        on_progress=lambda rank, phase: phases.append((rank, phase)),
    )
    assert {(rank, "ready") for rank in range(size)} <= set(phases)
    results = await asyncio.gather(*[consume(group, request(f"r{i}")) for i in range(20)])
    assert results == [list(range(101, 111))] * 20
    async with aclosing(group.client.submit(request("long", 10**6))) as stream:
        await anext(stream)
    await group.client.check_health()
    while (await group.client.stats()).num_running:
        await asyncio.sleep(0.01)
    pids = group.processes
    assert len(set(pids)) == size
    frozen = [actor.__ray_call__.remote(lambda _: gc.get_freeze_count()) for actor in group._actors]
    assert min(ray.get(frozen)) > 10_000, "no collection walks through what a rank has imported"
    tasks = await long_streams(group, 2)
    started = time.monotonic()
    await group.close()
    assert time.monotonic() - started < 5
    await assert_all_fail(tasks, "the engine was shut down", 1)
    await group.close()
    await assert_nothing_left(before, pids)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_killed_rank_fails_everything_with_the_root_cause_logged_once(
    victim: int, caplog: pytest.LogCaptureFixture
) -> None:
    before = traces()
    group = await start(FakeConfig(tensor_parallel_size=2, step_s=0.005))
    tasks = await long_streams(group, 8)
    pids = group.processes
    os.kill(pids[victim], signal.SIGKILL)
    with caplog.at_level(logging.WARNING, logger="workers"):
        await assert_all_fail(tasks, rf"rank {victim} \(pid {pids[victim]}\) died", 3)
        assert f"rank {victim} (pid {pids[victim]}) died" in await asyncio.wait_for(group.wait_dead(), 1)
        with pytest.raises(EngineDeadError, match=f"rank {victim}"):
            await group.client.check_health()
        await group.close()
    assert [record.levelname for record in caplog.records if record.name.startswith("workers")] == ["ERROR"]
    await assert_nothing_left(before, pids)


@pytest.mark.parametrize("hang_up_first", [False, True])
async def test_clients_that_hang_up_while_a_rank_dies_harm_no_other(
    hang_up_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = traces()
    group = await start(FakeConfig(tensor_parallel_size=2, step_s=0.005))
    tasks = await long_streams(group, 9)
    pids = group.processes
    hung_up, others = tasks[::3], [task for index, task in enumerate(tasks) if index % 3]
    with caplog.at_level(logging.WARNING, logger="workers"):
        for action in ("hang up", "kill") if hang_up_first else ("kill", "hang up"):
            if action == "kill":
                os.kill(pids[1], signal.SIGKILL)
            else:
                for task in hung_up:
                    task.cancel()
            await asyncio.sleep(0)
        await assert_all_fail(others, rf"rank 1 \(pid {pids[1]}\) died", 3)
        for result in await asyncio.gather(*hung_up, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError)
        assert f"rank 1 (pid {pids[1]}) died" in await asyncio.wait_for(group.wait_dead(), 1)
        await group.close()
    assert [record.levelname for record in caplog.records if record.name.startswith("workers")] == ["ERROR"]
    await assert_nothing_left(before, pids)


async def test_a_hung_rank_is_found_by_the_stall_timeout() -> None:
    before = traces()
    config = FakeConfig(tensor_parallel_size=2, step_s=0.002, hang_rank=1, hang_step=20)
    group = await start(config, stall_timeout_s=1.0)
    pids = group.processes
    await asyncio.sleep(1.5)  # idle for longer than the time-out is no stall
    task = asyncio.create_task(consume(group, request("long", 10**6)))
    await assert_all_fail(
        [task], r"the engine hangs: no step completed for 1 s with 1 requests outstanding \(rank 0: 19", 6
    )
    started = time.monotonic()
    await group.close()
    assert time.monotonic() - started < 8
    await assert_nothing_left(before, pids)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_that_stands_still_while_idle_is_found_and_named(victim: int) -> None:
    """Nothing runs; only health calls come, as Serve makes them, and their caller gives up before the time-out."""
    before = traces()
    group = await start(FakeConfig(tensor_parallel_size=2), stall_timeout_s=1.0)
    pids = group.processes
    os.kill(pids[victim], signal.SIGSTOP)
    death = asyncio.create_task(group.wait_dead())
    deadline = time.monotonic() + 5
    while not death.done() and time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError, EngineDeadError):
            await asyncio.wait_for(group.client.check_health(), 0.2)
        await asyncio.sleep(0.1)
    assert await asyncio.wait_for(death, 0.1) == (
        f"rank {victim} (pid {pids[victim]}) stood still for 1 s: stopped by a signal (SIGSTOP) or a debugger"
    )
    await group.close()
    await assert_nothing_left(before, pids)


async def test_a_short_stop_ends_nothing() -> None:
    group = await start(FakeConfig(), stall_timeout_s=1.5)
    for _ in range(2):
        os.kill(group.processes[0], signal.SIGSTOP)
        await asyncio.sleep(0.9)
        os.kill(group.processes[0], signal.SIGCONT)
        await asyncio.wait_for(group.client.check_health(), 2)
        await asyncio.sleep(0.3)
    assert await consume(group, request("a")) == list(range(101, 111))
    await group.close()


async def test_a_watch_that_breaks_off_declares_the_engine_dead(caplog: pytest.LogCaptureFixture) -> None:
    before = traces()
    group = await start(FakeConfig(step_s=0.005))
    tasks = await long_streams(group, 2)
    pids = group.processes
    with caplog.at_level(logging.WARNING, logger="workers"):
        group._infos.append(cast(RankInfo, None))  # has no process to ask
        cause = await asyncio.wait_for(group.wait_dead(), 3)
        group._infos.pop()
        assert cause.startswith("the watch over the ranks failed: AttributeError")
        await assert_all_fail(tasks, "the watch over the ranks failed: AttributeError", 3)
        await group.close()
    assert [record.levelname for record in caplog.records if record.name.startswith("workers")] == ["ERROR"]
    assert "in _watch" in caplog.text
    await assert_nothing_left(before, pids)


async def test_an_exception_in_the_loop_carries_its_traceback() -> None:
    async with running(FakeConfig(raise_step=10)) as group:
        task = asyncio.create_task(consume(group, request("long", 10**6)))
        await assert_all_fail([task], "rank 0 failed: RuntimeError: the device is on fire", 3)
        error = task.exception()
        assert isinstance(error, EngineDeadError)
        assert "in step" in error.details


async def test_a_rank_that_cannot_be_built_ends_the_start_with_its_cause() -> None:
    before = traces()
    with pytest.raises(EngineStartError, match="rank 1 failed: ValueError: dtype: this checkpoint does not fit rank 1"):
        await asyncio.wait_for(start(FakeConfig(tensor_parallel_size=2, fail_rank=1)), 30)
    await assert_nothing_left(before, ())


async def test_a_start_that_hangs_or_cannot_be_placed_says_where() -> None:
    before = traces()
    # Long enough for a process to start on a busy machine: what is asked for is the limit behind that.
    with pytest.raises(EngineStartError, match=r"the readiness request got no answer \(waited 4 s\)"):
        await start(FakeConfig(hang_rank=0, hang_step=1), start_timeout_s=4.0)
    with pytest.raises(
        EngineStartError, match=r"64 ranks were not placed on one node within 0\.5 s: bundle \d+ \{CPU: 1"
    ):
        await start(FakeConfig(tensor_parallel_size=64), place_timeout_s=0.5)
    with pytest.raises(EngineStartError, match="factory: 'nowhere:nothing' cannot be loaded"):
        await EngineGroup.start(cast(EngineConfig, FakeConfig()), factory="nowhere:nothing")
    await assert_nothing_left(before, ())


async def test_a_cancelled_start_leaves_nothing() -> None:
    before = traces()
    task = asyncio.create_task(start(FakeConfig(tensor_parallel_size=2, hang_rank=1, hang_step=1)))
    await asyncio.sleep(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_nothing_left(before, ())


async def test_three_cycles_leave_nothing() -> None:
    """In a placement group of our own, in a given one, and with processes that no longer react."""
    given = placement_group([{"CPU": 1}, {"CPU": 1}], strategy="STRICT_PACK")
    before = traces()
    for cycle in range(3):
        group = await start(FakeConfig(tensor_parallel_size=2), placement_group=given if cycle == 1 else None)
        assert await consume(group, request("a")) == list(range(101, 111))
        pids = group.processes
        if cycle == 2:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        await group.close()
        assert time.monotonic() - started < 10
        await assert_nothing_left(before, pids)
    remove_placement_group(given)
