"""Progress of a long preparation step (download, conversion): what reports it and how it is shown."""

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn

logger = logging.getLogger(__name__)


class Task(Protocol):
    """One running stage."""

    def advance(self, amount: int) -> None:
        """Count `amount` more units (bytes) as done."""

    def set_total(self, total: int) -> None:
        """Say how many units there are, once known."""


class Progress(Protocol):
    """Shows stages. A stage with `total=None` has no known length."""

    def stage(self, label: str, total: int | None) -> AbstractContextManager[Task]:
        """Run one stage; it is over when the block is left."""
        ...


class _SilentTask:
    def advance(self, amount: int) -> None:
        return None

    def set_total(self, total: int) -> None:
        return None


class LogProgress:
    """One log line per stage: for output that is not a terminal."""

    @contextmanager
    def stage(self, label: str, total: int | None) -> Iterator[Task]:
        size = "" if total is None else f" ({total / 1e6:.0f} MB)"
        logger.info("%s%s", label, size)
        yield _SilentTask()


class RichProgress:
    """A bar per stage on standard error, in bytes."""

    @contextmanager
    def stage(self, label: str, total: int | None) -> Iterator[Task]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
        )
        with rich.progress.Progress(*columns, console=Console(stderr=True)) as bars:
            yield _RichTask(bars, bars.add_task(label, total=total))


class _RichTask:
    def __init__(self, bars: rich.progress.Progress, task_id: rich.progress.TaskID) -> None:
        self._bars = bars
        self._task_id = task_id

    def advance(self, amount: int) -> None:
        self._bars.advance(self._task_id, amount)

    def set_total(self, total: int) -> None:
        self._bars.update(self._task_id, total=total)


def default_progress() -> Progress:
    """Bars when standard error is a terminal, else log lines."""
    return RichProgress() if sys.stderr.isatty() else LogProgress()
