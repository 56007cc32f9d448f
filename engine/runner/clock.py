"""How long a step took on its device."""

import time

import torch

from engine.runner.current_stream import CurrentStream


class StepClock:
    """From `start` to `stop`, used for one step after another. On CUDA they are marks in the stream; on the CPU the
    work is done in between.

    A step whose results leave before its last work is queued says so with `results_sent`: nobody waits for that work,
    and the time ends with the results.
    """

    def __init__(self, device: torch.device) -> None:
        self._marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._started = self._duration_s = 0.0
        self._sent_early = False
        self._is_awaited = False  # the last mark was set, and nobody waited for it yet
        if device.type == "cuda":
            self._marks = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._stream = CurrentStream(device)

    def start(self) -> None:
        """The step's first work is about to be queued."""
        self._sent_early = False
        if self._marks is None:
            self._started = time.perf_counter()
        else:
            self._marks[0].record(self._stream.get())

    def results_sent(self) -> None:
        """All that the host will read is queued, the rest of the step's work is not."""
        self._sent_early = True
        self._end()

    def stop(self) -> None:
        """The step's last work is queued."""
        if self._marks is None:
            self._duration_s = time.perf_counter() - self._started
        elif not self._sent_early:
            self._end()

    def _end(self) -> None:
        if self._marks is not None:
            self._marks[1].record(self._stream.get())
            self._is_awaited = True

    def wait(self) -> None:
        """Until the step's results are there, and nothing queued behind it."""
        if self._is_awaited:
            assert self._marks is not None
            self._marks[1].synchronize()
            self._is_awaited = False

    def seconds(self) -> float:
        """Device time of the step, which was waited for: up to its end, or to its results where they left early."""
        if self._marks is not None:
            self._duration_s = self._marks[0].elapsed_time(self._marks[1]) / 1e3
        return self._duration_s
