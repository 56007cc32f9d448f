"""Naming a process so that a reused pid is not mistaken for it, and asking whether that process still runs.

Knows only pids and, on Linux, the start time in `/proc/<pid>/stat`. A zombie counts as dead: it can do no work.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_HAS_PROC = Path("/proc/self/stat").exists()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """A process of this host. start_time: clock ticks since boot, 0 where the system has no /proc."""

    pid: int
    start_time: int

    @classmethod
    def current(cls) -> "ProcessIdentity":
        """The calling process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """The process that has this pid now.

        Raises:
            ProcessLookupError: no such process.
        """
        if not _HAS_PROC:
            os.kill(pid, 0)
            return cls(pid=pid, start_time=0)
        stat = _read_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"no process with pid {pid}")
        return cls(pid=pid, start_time=stat[1])

    def is_alive(self) -> bool:
        """Whether this very process still runs (not a zombie, not another process with its pid)."""
        if not _HAS_PROC:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return False
            except PermissionError:  # it exists and belongs to another user
                return True
            return True
        stat = _read_stat(self.pid)
        return stat is not None and stat[0] not in "ZX" and stat[1] == self.start_time

    def is_stopped(self) -> bool:
        """Whether this very process is held by a signal (SIGSTOP) or a debugger. Always False without /proc."""
        stat = _read_stat(self.pid) if _HAS_PROC else None
        return stat is not None and stat[0] in "Tt" and stat[1] == self.start_time


def _read_stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time) of a pid, None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, in parentheses, may hold spaces and parentheses; the fields count from the last one on.
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])
