"""How long a step took on its device."""

import time

import torch


class StepClock:
    """From `start` to `stop`, used for one step after another. On CUDA both are marks in the stream; on the CPU the
    work is done in between."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._started = self._duration_s = 0.0
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def start(self) -> None:
        """The step's first work is about to be queued."""
        if self._events:
            self._events[0].record()
        else:
            self._started = time.perf_counter()

    def stop(self) -> None:
        """The step's last work is queued."""
        if self._events:
            self._events[1].record()
        else:
            self._duration_s = time.perf_counter() - self._started

    def wait(self) -> None:
        """Until the step is done, and nothing queued behind it."""
        if self._events:
            self._events[1].synchronize()

    def seconds(self) -> float:
        """Device time of the step, which is done."""
        if self._events:
            self._duration_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._duration_s
