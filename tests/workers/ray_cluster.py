"""A small local Ray cluster for a test module."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

REPO_ROOT = Path(__file__).resolve().parents[2]


def children(pid: int) -> set[int]:
    """All descendants of a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(errors="replace")
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(text[text.rindex(")") + 2 :].split()[1])
    found, frontier = set(), {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


@contextmanager
def local_ray() -> Iterator[None]:
    """A cluster of our own, unless the session has one already. What was started for it is ended by pid."""
    if ray.is_initialized():
        yield
        return
    before = children(os.getpid())
    # In the environment, not in a runtime_env: workers that Ray starts ahead of time can then be used.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("PYTHONPATH", f"{REPO_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        logging_level="error",
    )
    started = children(os.getpid()) - before
    yield
    ray.shutdown()
    monkeypatch.undo()
    for pid in started & children(os.getpid()):
        os.kill(pid, signal.SIGKILL)
