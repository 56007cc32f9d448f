"""Phases of a program that may be cut: limits hold, also in an event loop's callbacks, and are told."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def phases(repo_root: Path) -> ModuleType:
    sys.path.insert(0, str(repo_root / "benchmarks"))
    try:
        import phases
    finally:
        sys.path.pop(0)
    return phases


@pytest.fixture
def make(phases: ModuleType) -> Iterator[Callable[..., Any]]:
    """Phases whose lines go to `lines`; the signals' handlers are put back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGTERM)}

    def make(**options: Any) -> Any:
        lines: list[str] = []
        made = phases.Phases(say=lines.append, **{"limit_s": 60.0, "beat_s": 0.05} | options)
        made.lines = lines
        return made

    yield make
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_phase_is_announced_looked_at_and_ended(make: Callable[..., Any]) -> None:
    run = make()
    with run.phase("load", 5.0, lambda: "half of it"):
        time.sleep(0.2)
    assert run.lines[0].endswith("] load (limit 5 s)")
    assert "half of it" in run.lines[1] and run.lines[-1].partition("] ")[2].startswith("load: done after 0.")
    (done,) = run.done
    assert done["phase"] == "load" and done["end"] == "done" and 0.1 <= done["seconds"] < 2
    time.sleep(0.1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # nothing breaks in later


def test_a_phase_over_its_limit_is_cut_and_says_so(make: Callable[..., Any], phases: ModuleType) -> None:
    run, began = make(), time.perf_counter()
    with pytest.raises(phases.CutError, match=r"^hang: over its limit after 0\.[1-9]"), run.phase("hang", 0.15):
        time.sleep(20)
    assert time.perf_counter() - began < 5 and run.done[0]["end"] == "cut"


def test_the_limit_of_all_phases_ends_one_and_begins_no_other(make: Callable[..., Any], phases: ModuleType) -> None:
    run = make(limit_s=0.2)
    with pytest.raises(phases.CutError, match="first: over"), run.phase("first", 50.0):
        time.sleep(20)
    with pytest.raises(phases.CutError, match="second: no time left"), run.phase("second", 50.0):
        pytest.fail("begun")
    with run.phase("last", 5.0, beyond=True):
        pass


def test_an_event_loop_that_swallows_the_cut_is_cut_again(make: Callable[..., Any], phases: ModuleType) -> None:
    swallowed: list[Any] = []

    async def wait() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: swallowed.append(context["exception"]))
        loop.call_soon(time.sleep, 0.5)  # what breaks in here is the callback's, to the loop
        await asyncio.sleep(30)

    began, run = time.perf_counter(), make()
    with pytest.raises(phases.CutError), run.phase("streams", 0.2):
        asyncio.run(wait())
    assert len(swallowed) == 1 and time.perf_counter() - began < 10


def test_an_order_to_end_breaks_into_the_phase(make: Callable[..., Any], phases: ModuleType) -> None:
    run = make()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(phases.CutError, match="serve: asked to end"), run.phase("serve", 30.0):
        time.sleep(20)
