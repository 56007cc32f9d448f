"""On a device a step's results are waited for, and its time taken, up to where they were sent."""

from typing import Self

import pytest
import torch

from engine.runner.clock import StepClock


class Stream:
    """Marks get the number of seconds of work queued ahead of them; what was waited for is kept."""

    def __init__(self) -> None:
        self.queued_s = self.waited_s = 0.0

    def event(self, enable_timing: bool) -> "Mark":
        assert enable_timing
        return Mark(self)


class Mark:
    def __init__(self, stream: Stream) -> None:
        self._stream, self._at_s = stream, 0.0

    def record(self) -> None:
        self._at_s = self._stream.queued_s

    def synchronize(self) -> None:
        self._stream.waited_s = self._at_s

    def elapsed_time(self, end: Self) -> float:
        return 1e3 * (end._at_s - self._at_s)


def test_a_step_that_sends_early_is_waited_for_up_to_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    clock = StepClock(torch.device("cuda"))
    for early, end_s in ((True, 3.0), (False, 5.0), (True, 3.0)):
        begun_s = stream.queued_s
        clock.start()
        stream.queued_s += 3.0
        if early:
            clock.results_sent()
        stream.queued_s += 2.0
        clock.stop()
        clock.wait()
        assert stream.waited_s == begun_s + end_s
        assert clock.seconds() == pytest.approx(end_s)
