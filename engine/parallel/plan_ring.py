"""A bounded ring of messages in shared memory: one writer (rank 0), a fixed number of readers (ranks 1..), one host.

It carries step plans. It does not know what is in them. Every reader sees every message, in order. The writer blocks
while the slowest reader is a full ring behind; a side that waits first looks a few times, then sleeps in the kernel.
Either side notices that the other one's process has died. The memory's layout is in `ring_memory`.

Every record carries its sequence number and a checksum, because Python has no memory barriers: on a weakly ordered
processor a reader may see the new count before the bytes, and then looks again.
"""

import os
import time
import zlib

from engine.parallel.futex import SharedWord
from engine.parallel.process_identity import ProcessIdentity
from engine.parallel.ring_memory import (
    ALIGN,
    H_CAPACITY,
    H_CLOSED,
    H_COUNT,
    H_MAGIC,
    H_NUM_READERS,
    H_PID,
    H_START,
    H_WRITTEN,
    HEADER_BYTES,
    MAGIC,
    MAX_READERS,
    R_ATTACHED,
    R_COUNT,
    R_PID,
    R_READ,
    R_START,
    WRAP,
    PlanRingClosed,
    PlanRingError,
    RingMapping,
    new_ring_name,
    open_ring,
    ring_path,
    unlink_ring,
)

__all__ = ["PlanReader", "PlanRingClosed", "PlanRingError", "PlanWriter", "new_ring_name", "unlink_ring"]

DEFAULT_CAPACITY = 1 << 20
_SPIN_S = 50e-6  # looks without sleeping for this long, if the last wait was shorter than _SPIN_WORTH_S
_SPIN_WORTH_S = 200e-6
_LIVENESS_S = 0.05  # how often a sleeping side checks that the other one lives
_SETTLE_S = 1.0  # a record whose checksum does not match after this long is corrupt, not late


class _Pause:
    """Adaptive waiting on one word: spin shortly when waits have been short, then sleep in slices."""

    def __init__(self) -> None:
        self._last_wait_s = 0.0
        self._started = 0.0

    def begin(self) -> None:
        self._started = time.perf_counter()

    def end(self) -> None:
        self._last_wait_s = time.perf_counter() - self._started

    def wait(self, word: SharedWord, seen: int, limit_s: float) -> None:
        """Returns after a change of `word`, or after at most min(limit_s, the liveness interval)."""
        if self._last_wait_s < _SPIN_WORTH_S and time.perf_counter() - self._started < _SPIN_S:
            return
        word.wait(seen, max(0.0, min(limit_s, _LIVENESS_S)))


class PlanWriter:
    """The writing end; creates the ring. Not thread-safe.

    Args:
        name: from `new_ring_name`; readers attach by it.
        num_readers: 1 .. MAX_READERS.
        capacity: bytes of payload the ring holds, rounded up to 4096; the longest message is `max_message_bytes`.

    Raises:
        ValueError: an argument out of range.
        FileExistsError: the name is in use.
    """

    def __init__(self, name: str, *, num_readers: int, capacity: int = DEFAULT_CAPACITY) -> None:
        if not 1 <= num_readers <= MAX_READERS:
            raise ValueError(f"num_readers: {num_readers} is not in 1..{MAX_READERS}")
        if capacity < 4096:
            raise ValueError(f"capacity: {capacity} is below 4096 bytes")
        self.name = name
        self._capacity = -(-capacity // 4096) * 4096
        path = ring_path(name)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        size = HEADER_BYTES + self._capacity
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        self._map: RingMapping | None = RingMapping(fd, size)
        self._num_readers = num_readers
        self._linked = True
        self._count = 0
        self._written = 0
        self._pause = _Pause()
        words = self._map.words
        me = ProcessIdentity.current()
        words[H_CAPACITY], words[H_NUM_READERS] = self._capacity, num_readers
        words[H_PID], words[H_START] = me.pid, me.start_time
        words[H_MAGIC] = MAGIC  # last: a reader that sees it may use the rest

    @property
    def max_message_bytes(self) -> int:
        """The longest message: half of the ring, so that it fits whatever the position."""
        return self._capacity // 2 - 2 * ALIGN

    def reader_counts(self) -> tuple[int, ...]:
        """Messages each reader has taken: a rank that hangs is the one behind."""
        mapping = self._mapped()
        return tuple(mapping.words[mapping.reader_base(i) + R_COUNT] for i in range(self._num_readers))

    def wait_attached(self, timeout_s: float) -> None:
        """Waits for every reader, then removes the name: from here on nothing is left behind by any death.

        Raises:
            TimeoutError: naming the readers that are missing.
        """
        mapping = self._mapped()
        deadline = time.monotonic() + timeout_s
        while missing := [
            i for i in range(self._num_readers) if not mapping.words[mapping.reader_base(i) + R_ATTACHED]
        ]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"plan ring {self.name}: readers {missing} did not attach in {timeout_s:g} s")
            time.sleep(0.005)
        self._unlink()

    def send(self, payload: bytes, timeout_s: float | None = None) -> None:
        """Appends one message; blocks while the ring is full.

        Raises:
            ValueError: longer than `max_message_bytes`.
            TimeoutError: still full after `timeout_s`.
            PlanRingError: a reader that the ring waits for has died.
        """
        if len(payload) > self.max_message_bytes:
            raise ValueError(
                f"payload: {len(payload)} bytes exceed the plan ring's limit of {self.max_message_bytes}; "
                "use a ring with more capacity"
            )
        mapping = self._mapped()
        need = -(-(ALIGN + len(payload)) // ALIGN) * ALIGN
        at = self._written % self._capacity
        gap = self._capacity - at if at + need > self._capacity else 0
        self._wait_for_room(gap + need, timeout_s)
        if gap:
            self._put_record(at, self._count + 1, b"", length=WRAP)
            self._written += gap
            at = 0
        self._count += 1
        self._put_record(at, self._count, payload, length=len(payload))
        self._written += need
        mapping.words[H_WRITTEN] = self._written
        mapping.words[H_COUNT] = self._count
        mapping.writer_word.advance()

    def close(self) -> None:
        """Tells the readers that nothing follows and removes the name. Idempotent."""
        if self._map is None:
            return
        self._map.words[H_CLOSED] = 1
        self._map.writer_word.advance()
        self._unlink()
        self._map.close()
        self._map = None

    def _put_record(self, at: int, sequence: int, payload: bytes, *, length: int) -> None:
        mapping = self._mapped()
        base = HEADER_BYTES + at
        mapping.bytes[base + ALIGN : base + ALIGN + len(payload)] = payload
        mapping.words[base // 8 + 1] = length | (zlib.crc32(payload) << 32)
        mapping.words[base // 8] = sequence

    def _wait_for_room(self, need: int, timeout_s: float | None) -> None:
        mapping = self._mapped()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._pause.begin()
        for index in range(self._num_readers):
            base, word = mapping.reader_base(index), mapping.reader_word(index)
            while True:
                seen = word.value
                if self._written + need - mapping.words[base + R_READ] <= self._capacity:
                    break
                left = _LIVENESS_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"plan ring {self.name}: reader {index} left no room for {timeout_s:g} s")
                self._pause.wait(word, seen, left)
                if word.value == seen:
                    self._check_reader(index)
        self._pause.end()

    def _check_reader(self, index: int) -> None:
        mapping = self._mapped()
        base = mapping.reader_base(index)
        if not mapping.words[base + R_ATTACHED]:
            return
        reader = ProcessIdentity(pid=mapping.words[base + R_PID], start_time=mapping.words[base + R_START])
        if not reader.is_alive():
            raise PlanRingError(
                f"plan ring {self.name}: reader {index} (pid {reader.pid}) died after "
                f"{mapping.words[base + R_COUNT]} of {self._count} messages"
            )

    def _mapped(self) -> RingMapping:
        assert self._map is not None, "the ring is closed"
        return self._map

    def _unlink(self) -> None:
        if self._linked:
            self._linked = False
            unlink_ring(self.name)


class PlanReader:
    """A reading end. Not thread-safe.

    Args:
        name: the writer's name. The ring may not exist yet: it is waited for.
        index: 0 .. num_readers - 1; tensor-parallel rank - 1. Each index has one reader.
        attach_timeout_s: how long to wait for the writer to make the ring.

    Raises:
        TimeoutError: no such ring within `attach_timeout_s`.
        PlanRingError: not a ring of ours, no such reader index, or the index is taken.
    """

    def __init__(self, name: str, *, index: int, attach_timeout_s: float = 30.0) -> None:
        self.name = name
        self.index = index
        self._map: RingMapping | None = open_ring(name, attach_timeout_s)
        self._count = 0
        self._read = 0
        self._pause = _Pause()
        words, base = self._map.words, self._map.reader_base(index)
        try:
            if not 0 <= index < words[H_NUM_READERS]:
                raise PlanRingError(f"plan ring {name} has {words[H_NUM_READERS]} readers, not a reader {index}")
            if words[base + R_ATTACHED]:
                raise PlanRingError(f"plan ring {name}: reader {index} is attached already")
        except PlanRingError:
            del words
            self.close()
            raise
        self._capacity = words[H_CAPACITY]
        self._writer = ProcessIdentity(pid=words[H_PID], start_time=words[H_START])
        me = ProcessIdentity.current()
        words[base + R_PID], words[base + R_START] = me.pid, me.start_time
        words[base + R_ATTACHED] = 1

    @property
    def num_received(self) -> int:
        """Messages taken."""
        return self._count

    def recv(self, timeout_s: float | None = None) -> bytes:
        """The next message; blocks without using the processor. None waits for ever (but not for a dead writer).

        Raises:
            TimeoutError: nothing came within `timeout_s`; the reader stays usable.
            PlanRingClosed: the writer closed the ring and everything was read.
            PlanRingError: the writer died, or the ring is corrupt.
        """
        mapping = self._mapped()
        words, word = mapping.words, mapping.writer_word
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._pause.begin()
        while True:
            seen = word.value
            if words[H_COUNT] > self._count:
                break
            if words[H_CLOSED]:
                raise PlanRingClosed(f"plan ring {self.name} was closed after {self._count} messages")
            left = _LIVENESS_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"plan ring {self.name}: no message for {timeout_s:g} s")
            self._pause.wait(word, seen, left)
            # A writer may send, then die: its last messages come first.
            if word.value == seen and not self._writer.is_alive() and words[H_COUNT] <= self._count:
                raise PlanRingError(
                    f"plan ring {self.name}: the writer (pid {self._writer.pid}) died after {self._count} messages"
                )
        self._pause.end()
        payload = self._take()
        base = mapping.reader_base(self.index)
        words[base + R_COUNT] = self._count
        words[base + R_READ] = self._read
        mapping.reader_word(self.index).advance()
        return payload

    def close(self) -> None:
        """Unmaps the ring. Idempotent."""
        if self._map is not None:
            self._map.close()
            self._map = None

    def _take(self) -> bytes:
        mapping = self._mapped()
        deadline = time.monotonic() + _SETTLE_S
        while True:
            at = self._read % self._capacity
            base = HEADER_BYTES + at
            sequence, packed = mapping.words[base // 8], mapping.words[base // 8 + 1]
            length, checksum = packed & 0xFFFFFFFF, packed >> 32
            if sequence == self._count + 1:
                if length == WRAP:
                    self._read += self._capacity - at
                    continue
                if length <= self._capacity - at - ALIGN:
                    payload = bytes(mapping.bytes[base + ALIGN : base + ALIGN + length])
                    if zlib.crc32(payload) == checksum:
                        self._count += 1
                        self._read += -(-(ALIGN + length) // ALIGN) * ALIGN
                        return payload
            if time.monotonic() > deadline:
                raise PlanRingError(f"plan ring {self.name}: record {self._count + 1} at byte {at} is corrupt")
            time.sleep(0)

    def _mapped(self) -> RingMapping:
        assert self._map is not None, "the ring is closed"
        return self._map
