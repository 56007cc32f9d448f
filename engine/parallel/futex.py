"""Blocking on a 32-bit word of shared memory: the Linux futex system call, or short sleeps where there is none.

A waiter hands in the value it saw; the call returns at once if the word has changed since. Both sides map the same
memory, so the non-private form is used. Callers re-check their condition after every return: a return means nothing.
"""

import ctypes
import platform
import sys
import time
from mmap import mmap

_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_WAKE_ALL = 2**31 - 1
_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_POLL_S = 0.0005  # without a futex: wake-up delay at most this, about 1 % of a core while idle


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class SharedWord:
    """The aligned uint32 at `offset` of a shared mapping. `release()` before the mapping is closed."""

    def __init__(self, memory: mmap, offset: int) -> None:
        assert offset % 4 == 0, offset
        self._word: ctypes.c_uint32 | None = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.addressof(self._word)
        number = _SYSCALL_NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        self._number = None if number is None else ctypes.c_long(number)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall if number is not None else None

    @property
    def value(self) -> int:
        """The word as it is now."""
        assert self._word is not None, "released"
        return self._word.value

    def advance(self) -> None:
        """Adds one (modulo 2**32) and wakes every waiter. Only one process may write a word."""
        assert self._word is not None, "released"
        self._word.value = (self._word.value + 1) & 0xFFFFFFFF
        if self._syscall is not None:
            self._syscall(self._number, ctypes.c_void_p(self._address), ctypes.c_long(_FUTEX_WAKE),
                          ctypes.c_long(_WAKE_ALL), None, None, ctypes.c_long(0))  # fmt: skip

    def wait(self, seen: int, timeout_s: float) -> None:
        """Returns when the word is no longer `seen`, after a signal, or after `timeout_s` seconds."""
        if self._syscall is None:
            deadline = time.monotonic() + timeout_s
            while self.value == seen and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            return
        whole = int(timeout_s)
        limit = _Timespec(whole, int((timeout_s - whole) * 1e9))
        # ctypes drops the interpreter lock for the call. EAGAIN (changed), EINTR and ETIMEDOUT all mean "look again".
        self._syscall(self._number, ctypes.c_void_p(self._address), ctypes.c_long(_FUTEX_WAIT), ctypes.c_long(seen),
                      ctypes.byref(limit), None, ctypes.c_long(0))  # fmt: skip

    def release(self) -> None:
        """Drops the reference into the mapping, which cannot be closed while it exists."""
        self._word = None
