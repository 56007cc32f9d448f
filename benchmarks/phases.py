"""The phases of a program that may be cut: each is announced, has a limit, and says every so often how it stands.

For the main thread alone: a phase over its limit is broken into by a signal. SIGTERM breaks into it in the same way.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_AGAIN_S = 1.0  # an event loop takes an exception that breaks into a callback for the callback's own, and goes on


class CutError(Exception):
    """A phase ran over its limit, or this process was asked to end; the message says which and after how long."""


class Phases:
    """Seconds count from when this was made.

    Args:
        limit_s: of all phases together, but for those with `beyond=True`.
        beat_s: seconds between two lines about a phase that still runs.
        say: where lines go.
    """

    def __init__(self, *, limit_s: float, beat_s: float = 10.0, say: Callable[[str], None] | None = None) -> None:
        self._began = time.perf_counter()
        self._limit_s = limit_s
        self._beat_s = beat_s
        self._say = say if say is not None else lambda line: print(line, flush=True)
        self._now: tuple[str, float] | None = None  # the phase that runs, and since when
        self._is_asked = False
        self.done: list[dict[str, Any]] = []
        signal.signal(signal.SIGALRM, self._break)
        signal.signal(signal.SIGTERM, self._break)

    @property
    def left_s(self) -> float:
        """Of the limit of all phases."""
        return self._limit_s - self._elapsed_s()

    @contextlib.contextmanager
    def phase(
        self, name: str, limit_s: float, look: Callable[[], str] | None = None, *, beyond: bool = False
    ) -> Iterator[None]:
        """Runs the block as one phase. look: what there is to say about it. beyond: `limit_s` alone holds.

        Raises:
            CutError: it took longer than limit_s, or than what is left of all phases' limit.
        """
        assert self._now is None, "phases do not nest"
        limit_s = limit_s if beyond else min(limit_s, self.left_s)
        if limit_s <= 0.0:
            raise CutError(f"{name}: no time left to begin it")
        began = self._elapsed_s()
        self._now = (name, began)
        self._line(f"{name} (limit {limit_s:.0f} s)")
        ended = threading.Event()
        beats = threading.Thread(target=self._beat, args=(name, began, look, ended), daemon=True)
        beats.start()
        signal.setitimer(signal.ITIMER_REAL, limit_s, _AGAIN_S)
        how = "cut"
        try:
            yield
            how = "done"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self._now = None
            ended.set()
            beats.join()
            seconds = self._elapsed_s() - began
            self.done.append({"phase": name, "began_s": round(began, 1), "seconds": round(seconds, 1), "end": how})
            self._line(f"{name}: {how} after {seconds:.1f} s")

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    def _line(self, text: str) -> None:
        self._say(f"[{self._elapsed_s():6.1f} s] {text}")

    def _break(self, number: int, frame: FrameType | None) -> None:
        if self._now is None:
            if number == signal.SIGTERM:
                raise CutError("asked to end (SIGTERM)")
            return  # the timer of a phase that has just ended
        name, began = self._now
        if number == signal.SIGTERM:
            self._is_asked = True
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        why = "asked to end (SIGTERM)" if self._is_asked else "over its limit"
        raise CutError(f"{name}: {why} after {self._elapsed_s() - began:.1f} s")

    def _beat(self, name: str, began: float, look: Callable[[], str] | None, ended: threading.Event) -> None:
        while not ended.wait(self._beat_s):
            self._line(f"{name}: for {self._elapsed_s() - began:.0f} s. {look() if look is not None else ''}".rstrip())
