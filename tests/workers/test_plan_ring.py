"""The plan ring between processes: nothing lost, bounded, blocking without burning a core, deaths noticed."""

import hashlib
import multiprocessing as mp
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from engine.parallel.plan_ring import (
    PlanReader,
    PlanRingClosed,
    PlanRingError,
    PlanWriter,
    new_ring_name,
    unlink_ring,
)
from engine.parallel.process_identity import ProcessIdentity
from engine.parallel.ring_memory import ring_path

SPAWN = mp.get_context("spawn")


def payload(i: int) -> bytes:
    """Message i: deterministic content, length 0 .. 1500."""
    rng = random.Random(i)
    return rng.randbytes(rng.randrange(1500))


def read_all(name: str, index: int, delay_s: float, out: Connection) -> None:
    """Reader process: digest of everything until the ring is closed."""
    reader, digest = PlanReader(name, index=index), hashlib.sha256()
    try:
        while True:
            digest.update(reader.recv(timeout_s=20))
            if delay_s:
                time.sleep(delay_s)
    except PlanRingClosed:
        out.send((reader.num_received, digest.hexdigest()))
    reader.close()


def echo(name_in: str, name_out: str) -> None:
    """Reader process that answers every message over a second ring."""
    writer = PlanWriter(name_out, num_readers=1)
    reader = PlanReader(name_in, index=0)
    try:
        while True:
            writer.send(reader.recv(timeout_s=20))
    except PlanRingClosed:
        writer.close()
        reader.close()


def write_then_hang(name: str, count: int, out: Connection) -> None:
    writer = PlanWriter(name, num_readers=1)
    for i in range(count):
        writer.send(payload(i))
    out.send("sent")
    time.sleep(60)


def attach_then_hang(name: str, out: Connection) -> None:
    reader = PlanReader(name, index=0)
    reader.recv(timeout_s=20)
    out.send("attached")
    time.sleep(60)


def spawn_readers(name: str, delays: tuple[float, ...]) -> tuple[list, list[Connection]]:
    processes, pipes = [], []
    for index, delay in enumerate(delays):
        ours, theirs = SPAWN.Pipe(duplex=False)
        processes.append(SPAWN.Process(target=read_all, args=(name, index, delay, theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    return processes, pipes


def test_10000_messages_arrive_intact_at_every_reader_with_wrap_around() -> None:
    name, count = new_ring_name(), 10_000
    writer = PlanWriter(name, num_readers=2, capacity=16384)  # wraps about 450 times
    processes, pipes = spawn_readers(name, (0.0, 0.0))
    writer.wait_attached(20)
    assert not ring_path(name).exists(), "the name goes once everybody is attached"
    digest = hashlib.sha256()
    for i in range(count):
        digest.update(payload(i))
        writer.send(payload(i), timeout_s=20)
    writer.close()
    for process, pipe in zip(processes, pipes, strict=True):
        assert pipe.recv() == (count, digest.hexdigest())
        process.join(10)
        assert process.exitcode == 0


def test_slow_reader_holds_the_writer_back_and_loses_nothing() -> None:
    name, count = new_ring_name(), 40
    writer = PlanWriter(name, num_readers=1, capacity=4096)  # room for 4 messages of 1,000 bytes
    processes, pipes = spawn_readers(name, (0.01,))
    writer.wait_attached(20)
    started = time.monotonic()
    for i in range(count):
        writer.send(bytes([i]) * 1000, timeout_s=20)
        assert i + 1 - writer.reader_counts()[0] <= 4
    assert time.monotonic() - started > 0.3
    writer.close()
    assert pipes[0].recv()[0] == count
    processes[0].join(10)


def test_full_ring_times_out_and_stays_usable() -> None:
    name = new_ring_name()
    writer, reader = PlanWriter(name, num_readers=1, capacity=4096), PlanReader(name, index=0)
    for i in range(4):
        writer.send(bytes([i]) * 1000)
    with pytest.raises(TimeoutError, match="reader 0 left no room"):
        writer.send(b"x" * 1000, timeout_s=0.05)
    assert reader.recv(1) == bytes([0]) * 1000
    writer.send(b"y" * 1000, timeout_s=1)
    assert [reader.recv(1)[:1] for _ in range(4)] == [b"\x01", b"\x02", b"\x03", b"y"]
    with pytest.raises(TimeoutError, match="no message"):
        reader.recv(timeout_s=0.02)
    writer.close()
    with pytest.raises(PlanRingClosed):
        reader.recv(1)
    reader.close()


def test_dead_writer_is_noticed_after_its_last_message() -> None:
    name = new_ring_name()
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=write_then_hang, args=(name, 5, theirs), daemon=True)
    process.start()
    reader = PlanReader(name, index=0, attach_timeout_s=20)
    assert reader.recv(20) == payload(0)
    assert ours.recv() == "sent"
    os.kill(process.pid, signal.SIGKILL)
    started = time.monotonic()
    assert [reader.recv(5) for _ in range(4)] == [payload(i) for i in range(1, 5)]
    with pytest.raises(PlanRingError, match=rf"writer \(pid {process.pid}\) died after 5 messages"):
        reader.recv()  # no timeout: only the death can end it
    assert time.monotonic() - started < 2
    reader.close()
    process.join(5)
    assert unlink_ring(name), "a writer that dies before attachment leaves the name to its group"
    assert not unlink_ring(name)


def test_dead_reader_is_noticed_by_a_writer_that_waits_for_it() -> None:
    name = new_ring_name()
    writer = PlanWriter(name, num_readers=1, capacity=4096)
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=attach_then_hang, args=(name, theirs), daemon=True)
    process.start()
    writer.send(b"first")
    assert ours.recv() == "attached"
    os.kill(process.pid, signal.SIGKILL)
    for _ in range(3):  # fits without a reader
        writer.send(b"x" * 1000, timeout_s=10)
    with pytest.raises(PlanRingError, match=r"reader 0 .* died after 1 of"):
        writer.send(b"x" * 1900, timeout_s=10)
    writer.close()
    process.join(5)
    assert not ring_path(name).exists()


def test_round_trip_latency_and_idle_cost(record_property: Callable[[str, object], None]) -> None:
    to, back = new_ring_name(), new_ring_name()
    writer = PlanWriter(to, num_readers=1)
    process = SPAWN.Process(target=echo, args=(to, back), daemon=True)
    process.start()
    reader = PlanReader(back, index=0, attach_timeout_s=20)
    message, times = b"p" * 2000, []
    for _ in range(1000):
        started = time.perf_counter()
        writer.send(message)
        assert reader.recv(10) == message
        times.append(time.perf_counter() - started)
    times.sort()
    record_property("round_trip_us_p50", times[500] * 1e6)
    print(f"plan ring round trip: p50 {times[500] * 1e6:.0f} us, p99 {times[990] * 1e6:.0f} us")
    assert times[500] < 0.02
    before = _cpu_ticks(process.pid)
    cpu_before = time.process_time()
    with pytest.raises(TimeoutError):
        reader.recv(timeout_s=0.5)
    assert time.process_time() - cpu_before < 0.1, "an idle reader sleeps"
    assert _cpu_ticks(process.pid) - before <= 10  # of 50 ticks
    writer.close()
    process.join(10)
    reader.close()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "../evil", "num_readers": 1}, "name: '../evil' is not a ring name"),
        ({"name": "a/b", "num_readers": 1}, "name"),
        ({"name": "ok", "num_readers": 0}, "num_readers: 0 is not in 1..32"),
        ({"name": "ok", "num_readers": 33}, "num_readers"),
        ({"name": "ok", "num_readers": 1, "capacity": 100}, "capacity: 100 is below 4096"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanWriter(**arguments)


def test_limits_and_wrong_attachments() -> None:
    name = new_ring_name()
    writer = PlanWriter(name, num_readers=1, capacity=8192)
    with pytest.raises(FileExistsError):
        PlanWriter(name, num_readers=1)
    with pytest.raises(ValueError, match=r"payload: 5000 bytes exceed the plan ring's limit of 4064"):
        writer.send(b"x" * 5000)
    with pytest.raises(TimeoutError, match=r"readers \[0\] did not attach"):
        writer.wait_attached(0.02)
    with pytest.raises(PlanRingError, match="not a reader 1"):
        PlanReader(name, index=1)
    reader = PlanReader(name, index=0)
    with pytest.raises(PlanRingError, match="attached already"):
        PlanReader(name, index=0)
    for i in range(200):  # the longest message fits whatever the position
        message = os.urandom(writer.max_message_bytes - (i % 17))
        writer.send(message, timeout_s=1)
        assert reader.recv(1) == message
    writer.close()
    writer.close()
    reader.close()
    with pytest.raises(TimeoutError, match="did not create"):
        PlanReader(name, index=0, attach_timeout_s=0.02)
    stray = ring_path(name)
    stray.write_bytes(b"\x01" * 8192)
    try:
        with pytest.raises(PlanRingError, match="not a plan ring"):
            PlanReader(name, index=0)
    finally:
        stray.unlink()


def test_identity_is_not_fooled_by_another_process_with_the_pid() -> None:
    me = ProcessIdentity.current()
    assert me.is_alive()
    assert not ProcessIdentity(pid=me.pid, start_time=me.start_time + 1).is_alive()
    process = SPAWN.Process(target=time.sleep, args=(30,), daemon=True)
    process.start()
    child = ProcessIdentity.of(process.pid)
    assert child.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while child.is_alive() and time.monotonic() < deadline:  # a zombie until joined, and dead all the same
        time.sleep(0.01)
    assert not child.is_alive()
    process.join(5)
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(process.pid)
