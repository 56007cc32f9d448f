"""The plan ring's shared memory: its name, its layout, mapping and unmapping it. Knows no protocol.

header  | magic, capacity, readers, writer identity, closed flag, message count, bytes written, writer's futex word
readers | one 64-byte line each: identity, attached flag, messages read, bytes read, the reader's futex word
data    | records: sequence number u64, length u32, CRC-32 u32, payload, padding to 16; a record never wraps
"""

import mmap
import os
import re
import secrets
import tempfile
import time
from pathlib import Path

from engine.parallel.futex import SharedWord

MAGIC = 0x44464C5348520001  # the last two bytes are the layout version
HEADER_BYTES = 4096
ALIGN = 16
WRAP = 0xFFFFFFFF  # length of a record that says "continue at the start of the ring"
MAX_READERS = 32

# Indices of uint64 words in the header.
H_MAGIC, H_CAPACITY, H_NUM_READERS, H_PID, H_START, H_CLOSED = range(6)
H_COUNT, H_WRITTEN = 8, 9
# Indices of uint64 words in a reader's line.
R_PID, R_START, R_ATTACHED, R_COUNT, R_READ = range(5)

_WRITER_WORD_OFFSET = 128
_READERS_OFFSET = 256
_LINE_BYTES = 64
_READER_WORD_OFFSET = 48  # within the line
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class PlanRingError(RuntimeError):
    """The other side died, or the ring's content is not ours."""


class PlanRingClosed(EOFError):
    """The writer closed the ring and every message has been read."""


def new_ring_name() -> str:
    """A name nobody else uses."""
    return f"dflash-plans-{secrets.token_hex(8)}"


def ring_path(name: str) -> Path:
    """Where the ring of this name lives: shared memory where the system shows it as files.

    Raises:
        ValueError: the name is not 1..64 letters, digits, `_`, `.`, `-`.
    """
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise ValueError(f"name: {name!r} is not a ring name (1 to 64 letters, digits, '_', '.', '-')")
    shm = Path("/dev/shm")
    return (shm if shm.is_dir() else Path(tempfile.gettempdir())) / name


def unlink_ring(name: str) -> bool:
    """Removes the name (mappings stay valid). Returns whether there was one; for cleaning up after a dead writer."""
    try:
        ring_path(name).unlink()
    except FileNotFoundError:
        return False
    return True


class RingMapping:
    """The mapped file and its views."""

    def __init__(self, fd: int, size: int) -> None:
        try:
            self.memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.bytes = memoryview(self.memory)
        # Native 8-byte items are stored with one aligned store each, unlike struct's byte-order formats.
        self.words = self.bytes[: size - size % 8].cast("Q")
        self.writer_word = SharedWord(self.memory, _WRITER_WORD_OFFSET)
        self.reader_words: dict[int, SharedWord] = {}

    def reader_base(self, index: int) -> int:
        """Index of the first uint64 of a reader's line."""
        return (_READERS_OFFSET + index * _LINE_BYTES) // 8

    def reader_word(self, index: int) -> SharedWord:
        if index not in self.reader_words:
            self.reader_words[index] = SharedWord(
                self.memory, _READERS_OFFSET + index * _LINE_BYTES + _READER_WORD_OFFSET
            )
        return self.reader_words[index]

    def close(self) -> None:
        self.writer_word.release()
        for word in self.reader_words.values():
            word.release()
        self.words.release()
        self.bytes.release()
        self.memory.close()


def open_ring(name: str, timeout_s: float) -> RingMapping:
    path = ring_path(name)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = -1
        if fd >= 0:
            size = os.fstat(fd).st_size
            if size > HEADER_BYTES:
                mapping = RingMapping(fd, size)
                if mapping.words[H_MAGIC] == MAGIC:
                    return mapping
                foreign = mapping.words[H_MAGIC]
                mapping.close()
                if foreign:
                    raise PlanRingError(f"{path} is not a plan ring (magic {foreign:#x})")
            else:
                os.close(fd)  # created, not sized yet
        if time.monotonic() > deadline:
            raise TimeoutError(f"plan ring {name}: the writer did not create it in {timeout_s:g} s")
        time.sleep(0.005)
