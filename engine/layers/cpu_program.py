"""Many CPU kernels as one call: the threads go from one to the next by themselves, without Python in between.

A kernel is a `void f(i64* job)` that any number of threads may run at once on one job, sharing its work out through
counters in the job that are 0 at the start; it returns when all of it is taken, and does nothing if that was before. A
program holds every job in one array of 64-bit words.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.layers.cpu_jit import compile_ir
from engine.layers.cpu_program_ir import (
    MODULE,
    PHASE_JOB,
    PHASE_KERNEL,
    PHASE_WORDS,
    PROGRAM_NUM_PHASES,
    PROGRAM_PHASES,
)

_LINE = 8  # words of a cache line


@functools.cache
def _runner() -> tuple[Any, Any]:
    """(run(program, threads), the owner of its code)."""
    engine = compile_ir(MODULE)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)  # the GIL is free meanwhile
    return kind(engine.get_function_address("run")), engine


class TeamProgram:
    """Built by `add` and `close`; then `run` any number of times, by one caller at a time.

    words: all of them; `run` leaves what the kernels counted, so the caller puts them back before the next one.
    """

    words: np.ndarray[Any, np.dtype[np.int64]]

    def __init__(self, *, threads: int) -> None:
        self.threads = threads
        self._run, self._code = _runner()
        self._jobs: list[int] = []  # the words of all jobs, counted from the end of the list of phases
        self._addresses: list[int] = []  # those that hold an index of another one, to become its address
        self._phases: list[tuple[int, int]] = []

    def reserve(self, num_words: int, *, first: Sequence[int] = ()) -> int:
        """Room in a cache line of its own, zero behind `first`; the index of its first word until `close`."""
        at = len(self._jobs)
        size = -(-max(num_words, len(first)) // _LINE) * _LINE
        self._jobs += [*first, *[0] * (size - len(first))]
        return at

    def add(self, kernel: int, job: Sequence[int], *, own: Sequence[tuple[int, int]] = ()) -> int:
        """Appends a phase; the index of its job until `close`.

        own: (word of the job, index of reserved room): words that are to hold the room's address.
        """
        at = self.reserve(len(job), first=job)
        for word, room in own:
            self._jobs[at + word] = room
            self._addresses.append(at + word)
        self._phases.append((kernel, at))
        return at

    def close(self) -> int:
        """Lays the program out; what to add to indices given before."""
        head = PROGRAM_PHASES + PHASE_WORDS * len(self._phases)
        room = np.zeros(head + len(self._jobs) + _LINE, dtype=np.int64)
        skip = -(room.ctypes.data // 8) % _LINE
        self.words = room[skip : skip + head + len(self._jobs)]
        base = self.words.ctypes.data
        self._address = base
        self.words[PROGRAM_NUM_PHASES] = len(self._phases)
        self.words[head:] = self._jobs
        for at in self._addresses:
            self.words[head + at] = base + 8 * (head + self._jobs[at])
        for i, (kernel, at) in enumerate(self._phases):
            phase = PROGRAM_PHASES + PHASE_WORDS * i
            self.words[phase + PHASE_KERNEL] = kernel
            self.words[phase + PHASE_JOB] = base + 8 * (head + at)
        return head

    def run(self) -> None:
        """All phases, in order. The words must be as at the start: jobs' counters and the program's own 0."""
        self._run(self._address, self.threads)
