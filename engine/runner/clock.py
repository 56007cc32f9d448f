"""How long a step took on its device."""

import time

import torch


class StepClock:
    """From `start` to `stop`, used for one step after another. On CUDA they are marks in the stream; on the CPU the
    work is done in between.

    A step whose results leave before its last work is queued says so with `results_sent`: nobody waits for that work,
    and the time ends with the results.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._started = self._duration_s = 0.0
        self._sent_early = False
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        """The step's first work is about to be queued."""
        self._sent_early = False
        if self._events:
            self._events[0].record()
        else:
            self._started = time.perf_counter()

    def results_sent(self) -> None:
        """All that the host will read is queued, the rest of the step's work is not."""
        self._sent_early = True
        if self._events:
            self._events[1].record()

    def stop(self) -> None:
        """The step's last work is queued."""
        if not self._events:
            self._duration_s = time.perf_counter() - self._started
        elif not self._sent_early:
            self._events[1].record()

    def wait(self) -> None:
        """Until the step's results are there, and nothing queued behind it."""
        if self._events:
            self._events[1].synchronize()

    def seconds(self) -> float:
        """Device time of the step, which was waited for: up to its end, or to its results where they left early."""
        if self._events:
            self._duration_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._duration_s
