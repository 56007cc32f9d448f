"""How long a step took on its device."""

import time

import torch


class StepClock:
    """From construction to `stop`. On CUDA both are marks in the stream; on the CPU the work is done in between."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._started = time.perf_counter()
        self._duration_s = 0.0
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> None:
        """The step's last work is queued."""
        if self._events:
            self._events[1].record()
        else:
            self._duration_s = time.perf_counter() - self._started

    def seconds(self) -> float:
        """Device time of the step; waits for its end."""
        if self._events:
            self._events[1].synchronize()
            self._duration_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._duration_s
