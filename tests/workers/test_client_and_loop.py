"""EngineClient and EngineLoop over a real socket pair, with a scripted core: order, aborts, errors, idleness."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.workers.fakes import FakeCore
from workers import protocol
from workers.engine_client import EngineClient, EngineDeadError
from workers.engine_loop import EngineLoop
from workers.gpu_worker import device_name


def request(request_id: str, first: int = 100, num: int = 10) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=(first,), params=SamplingParams(max_tokens=num, temperature=0.0)
    )


class Engine:
    """A loop in a thread and a client for it."""

    def __init__(self, core: FakeCore, client: EngineClient, loop: EngineLoop) -> None:
        self.core, self.client, self.loop = core, client, loop
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error

    async def tokens(self, req: EngineRequest) -> list[int]:
        got: list[int] = []
        async for delta in self.client.submit(req):
            got += delta.token_ids
        return got

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(core: FakeCore, *, device_name: str = "", **kwargs: object) -> AsyncIterator[Engine]:
    ours, theirs = socket.socketpair()
    client = await EngineClient.attach(ours, **kwargs)
    engine = Engine(core, client, EngineLoop(core, theirs, device_name=device_name))
    engine.thread.start()
    await client.wait_ready()
    try:
        yield engine
    finally:
        client.fail(EngineDeadError("test over"))
        await asyncio.to_thread(engine.thread.join, 5)
        assert not engine.thread.is_alive()


async def test_many_streams_interleave_and_each_gets_its_own_tokens() -> None:
    async with running(FakeCore(0.001)) as engine:
        requests = [request(f"r{i}", 1000 * i, 5 + i % 7) for i in range(100)]
        results = await asyncio.gather(*[engine.tokens(r) for r in requests])
        for i, tokens in enumerate(results):
            assert tokens == list(range(1000 * i + 1, 1000 * i + 1 + 5 + i % 7))
        assert engine.client.num_outstanding == 0
        assert engine.core.num_steps < 100, "requests share steps"


async def test_closing_the_iterator_aborts_in_the_engine_and_frees_the_id() -> None:
    async with running(FakeCore(0.002)) as engine:
        async with aclosing(engine.client.submit(request("a", num=100_000))) as stream:
            await anext(stream)
            with pytest.raises(ValueError, match="request_id: 'a' is in use"):
                await anext(engine.client.submit(request("a")))
        await engine.until(lambda: engine.core.aborted == ["a"])
        await engine.until(lambda: engine.client.num_outstanding == 0)
        assert await engine.tokens(request("a", 5, 3)) == [6, 7, 8]


async def test_cancelling_the_waiting_task_aborts() -> None:
    async with running(FakeCore(0.002)) as engine:
        task = asyncio.create_task(engine.tokens(request("a", num=100_000)))
        await engine.until(lambda: "a" in engine.core.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.until(lambda: engine.core.aborted == ["a"] and engine.client.num_outstanding == 0)


async def test_abort_by_id_ends_the_stream_with_a_finish_reason() -> None:
    async with running(FakeCore(0.002)) as engine:
        reasons = []
        async for delta in engine.client.submit(request("a", num=100_000)):
            reasons.append(delta.finish_reason)
            engine.client.abort("a")
        assert reasons[-1] == "abort"
        engine.client.abort("a")
        engine.client.abort("never seen")


async def test_an_iterator_never_started_sends_nothing() -> None:
    async with running(FakeCore()) as engine:
        await engine.client.submit(request("a")).aclose()
        await engine.client.check_health()
        assert engine.core.num_steps == 0
        assert engine.client.num_outstanding == 0


async def test_a_refused_request_is_a_value_error_and_others_go_on() -> None:
    async with running(FakeCore(0.001)) as engine:
        other = asyncio.create_task(engine.tokens(request("b", 0, 20)))
        bad = EngineRequest(request_id="a", prompt_token_ids=(), params=SamplingParams())
        with pytest.raises(ValueError, match="prompt_token_ids: the prompt is empty"):
            await anext(engine.client.submit(bad))
        assert await other == list(range(1, 21))
        assert await engine.tokens(request("a", 1, 1)) == [2]


async def test_a_prompt_above_the_frame_limit_is_a_value_error() -> None:
    async with running(FakeCore()) as engine:
        huge = EngineRequest(
            request_id="a", prompt_token_ids=(100_000,) * (protocol.MAX_FRAME_BYTES // 5 + 1), params=SamplingParams()
        )
        with pytest.raises(ValueError, match=r"AddRequest: .* exceed the limit"):
            await anext(engine.client.submit(huge))
        assert await engine.tokens(request("a", 1, 2)) == [2, 3]


async def test_a_slow_consumer_delays_nobody_and_loses_nothing() -> None:
    async with running(FakeCore()) as engine:
        slow = engine.client.submit(request("slow", 0, 3000))
        got = list((await anext(slow)).token_ids)
        started = time.monotonic()
        for i in range(5):
            assert len(await engine.tokens(request(f"fast{i}", 0, 50))) == 50
        assert time.monotonic() - started < 5
        await engine.until(lambda: not engine.core.requests)
        async for delta in slow:
            got += delta.token_ids
        assert got == list(range(1, 3001))


async def test_a_replica_that_does_not_read_holds_the_engine_back() -> None:
    core = FakeCore()
    core.tokens_per_step = 500
    async with running(core) as engine:
        task = asyncio.create_task(engine.tokens(request("a", 0, 1_000_000)))
        await engine.until(lambda: core.num_steps > 3)
        time.sleep(0.3)
        before = core.num_steps
        time.sleep(0.2)
        assert core.num_steps == before < 2000, "the socket's buffer is the bound"
        assert await task == list(range(1, 1_000_001))


async def test_an_engine_error_reaches_every_stream_and_call_once() -> None:
    core = FakeCore(0.01)
    core.raise_step = 8
    async with running(core) as engine:
        streams = [engine.client.submit(request(f"r{i}", num=1000)) for i in range(5)]
        await asyncio.gather(*[anext(stream) for stream in streams])
        for stream in streams:
            with pytest.raises(EngineDeadError, match="RuntimeError: the device is on fire") as caught:
                async for _ in stream:
                    pass
            assert "in step" in caught.value.details
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        for attempt in (engine.client.stats(), anext(engine.client.submit(request("late")))):
            with pytest.raises(EngineDeadError, match="on fire"):
                await attempt
        await asyncio.to_thread(engine.thread.join, 5)
        assert isinstance(engine.error, RuntimeError)


async def test_a_broken_socket_fails_streams_with_the_owners_root_cause() -> None:
    seen: list[EngineDeadError] = []
    ours, theirs = socket.socketpair()
    client = await EngineClient.attach(ours, on_disconnect=seen.append)
    stream = client.submit(request("a"))
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    theirs.close()
    await asyncio.sleep(0.05)
    assert [str(error)[:24] for error in seen] == ["rank 0 closed its socket"]  # perhaps with an errno behind it
    assert not first.done(), "the owner is still looking for the cause"
    client.fail(EngineDeadError("rank 1 died"))
    client.fail(EngineDeadError("something later"))
    with pytest.raises(EngineDeadError, match="rank 1 died"):
        await first


async def test_garbage_from_rank_0_is_a_failure_not_a_hang() -> None:
    for data in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", protocol.encode_frame(protocol.Hello(version=99, pid=1))):
        ours, theirs = socket.socketpair()
        client = await EngineClient.attach(ours)
        theirs.sendall(data)
        with pytest.raises(EngineDeadError, match="not our protocol"):
            await asyncio.wait_for(client.wait_ready(), 5)
        theirs.close()


def test_garbage_from_the_replica_ends_the_loop_with_its_cause() -> None:
    ours, theirs = socket.socketpair()
    loop = EngineLoop(FakeCore(), theirs)
    ours.sendall(b"\0\0\0\2\xff\xff")
    with pytest.raises(protocol.ProtocolError):
        loop.run()
    messages = [protocol.decode_from_engine(payload) for payload in protocol.FrameBuffer().feed(ours.recv(1 << 16))]
    assert [type(message) for message in messages] == [protocol.Hello, protocol.EngineFailed]
    ours.close()


async def test_the_replica_hears_which_gpu_rank_0_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    assert (device_name("cpu"), device_name("simulated")) == ("", "")
    async with running(FakeCore(), device_name=device_name("cuda")) as engine:
        assert engine.client.device_name == "NVIDIA H200"


async def test_calls_run_through_the_loop() -> None:
    core = FakeCore()
    async with running(core) as engine:
        client = engine.client
        assert (await client.stats()).schedule == {8: 3}
        assert (await client.counters()).prompt_tokens == 11
        await client.check_health()
        ack = await client.apply_schedule((2, 5), {4: 7})
        assert (ack.applied, ack.version, ack.schedule) == (True, (2, 5), {4: 7})
        with pytest.raises(ValueError, match="schedule: a batch size below 1"):
            await client.apply_schedule((2, 6), {0: 7})
        await client.check_integrity()
        core.broken = "block 3 has no owner"
        with pytest.raises(RuntimeError, match="block 3 has no owner"):
            await client.check_integrity()
        await client.reset_gate()
        await client.reset_prefix_cache()
        await client.check_integrity()


async def test_an_answer_is_owed_also_to_a_caller_that_gave_up() -> None:
    async with running(FakeCore(0.3)) as engine:
        stream = asyncio.create_task(engine.tokens(request("a", num=3)))
        await engine.until(lambda: "a" in engine.core.requests)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.client.check_health(), 0.05)
        assert engine.client.num_outstanding == 2
        await stream
        await engine.client.check_health()
        assert engine.client.num_outstanding == 0


async def test_idle_blocks_and_stop_wakes_it() -> None:
    async with running(FakeCore()) as engine:
        await engine.client.check_health()
        before = time.thread_time_ns(), time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before[1] < 0.1, "an idle loop uses no processor"
        assert engine.loop.beats == 0
        engine.loop.request_stop()
        await asyncio.to_thread(engine.thread.join, 2)
        assert not engine.thread.is_alive()
        engine.loop.request_stop()
        assert engine.error is None
        with pytest.raises(EngineDeadError, match="rank 0 closed its socket"):
            await engine.client.check_health()


async def test_the_engine_checks_itself_once_when_it_falls_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine_loop._IDLE_CHECK_S", 0.05)
    core = FakeCore()
    checks: list[int] = []
    monkeypatch.setattr(core, "check_integrity", lambda: checks.append(core.num_steps))
    async with running(core) as engine:
        await asyncio.sleep(0.2)
        assert not checks, "nothing has run yet"
        await engine.tokens(request("a", num=3))
        await engine.until(lambda: checks == [3])
        await asyncio.sleep(0.2)
        assert checks == [3], "once, not again and again"
        await engine.client.check_health()


async def test_a_leak_found_when_idle_ends_the_engine_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.engine_loop._IDLE_CHECK_S", 0.05)
    core = FakeCore()
    core.broken = "block 3: 1 references, 0 owners"
    async with running(core) as engine:
        assert len(await engine.tokens(request("a", num=3))) == 3
        await engine.until(lambda: engine.error is not None)
        with pytest.raises(EngineDeadError, match="the engine loop failed: RuntimeError: block 3: 1 references"):
            await engine.client.check_health()


async def test_stop_interrupts_a_write_that_nobody_reads() -> None:
    core = FakeCore()
    core.tokens_per_step = 5000
    ours, theirs = socket.socketpair()
    loop = EngineLoop(core, theirs)
    core.add_request(request("a", 0, 10_000_000))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    await asyncio.sleep(0.3)
    loop.request_stop()
    await asyncio.to_thread(thread.join, 2)
    assert not thread.is_alive()
    ours.close()


async def test_shutdown_message_ends_the_loop() -> None:
    async with running(FakeCore(0.001)) as engine:
        with contextlib.suppress(EngineDeadError):
            stream = engine.client.submit(request("a", num=10_000))
            await anext(stream)
            engine.client.request_shutdown()
            async for _ in stream:
                pass
        await asyncio.to_thread(engine.thread.join, 2)
        assert not engine.thread.is_alive()


def test_a_replica_process_does_not_import_torch() -> None:
    code = "import sys, workers.engine_client, workers.protocol, workers.engine_group; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


async def test_other_threads_call_between_two_steps_of_a_busy_and_of_an_idle_loop() -> None:
    async with running(FakeCore(0.002)) as engine:

        def where(core: FakeCore) -> tuple[str, int]:
            return threading.current_thread().name, core.num_steps

        name, _ = await asyncio.to_thread(engine.loop.call, where)  # idle
        assert name == engine.thread.name
        tokens = asyncio.create_task(engine.tokens(request("a", num=200)))
        await engine.until(lambda: engine.core.num_steps > 5)
        calls = await asyncio.gather(*[asyncio.to_thread(engine.loop.call, where) for _ in range(20)])
        assert {caller for caller, _ in calls} == {engine.thread.name}
        assert not tokens.done()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(engine.loop.call, lambda core: 1 // 0)
        assert await tokens == list(range(101, 301))
    with pytest.raises(RuntimeError, match="over"):
        engine.loop.call(where)


async def test_a_call_wakes_a_loop_that_waits_for_its_reader_and_a_stop_still_ends_it() -> None:
    core = FakeCore()
    core.tokens_per_step = 5000
    ours, theirs = socket.socketpair()  # nobody reads `ours`
    loop = EngineLoop(core, theirs)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    ours.sendall(protocol.encode_frame(protocol.AddRequest(request=request("a", num=10**8))))
    beats = -1
    while beats != loop.beats or not beats:  # until its write blocks
        beats = loop.beats
        await asyncio.sleep(0.1)
    blocked = asyncio.create_task(asyncio.to_thread(loop.call, lambda core: "done"))
    await asyncio.sleep(0.1)
    assert not blocked.done() and thread.is_alive()
    loop.request_stop()
    with pytest.raises(RuntimeError, match="over"):
        await asyncio.wait_for(blocked, 5)
    thread.join(5)
    assert not thread.is_alive()
    ours.close()
