"""On a device a step's marks go to the stream that is current then; its results are waited for, once, and its time
taken, up to where they were sent."""

from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import torch

from engine.runner.clock import StepClock


@dataclass
class Stream:
    cuda_stream: int


@dataclass
class Device:
    """Stands in for torch.cuda. queued_s: seconds of work ahead of the next mark. marks: with their streams, in order.
    waits: which were waited for, and up to where that was."""

    current: Stream = field(default_factory=lambda: Stream(0))
    queued_s: float = 0.0
    marks: list[tuple[str, int]] = field(default_factory=list)
    waits: list[tuple[str, float]] = field(default_factory=list)
    look_ups: int = 0

    def current_stream(self, _: Any) -> Stream:
        self.look_ups += 1
        return self.current


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake, names = Device(), iter(("start", "end"))

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.name, self.at_s = next(names), 0.0

        def record(self, stream: Stream) -> None:
            self.at_s = fake.queued_s
            fake.marks.append((self.name, stream.cuda_stream))

        def synchronize(self) -> None:
            fake.waits.append((self.name, self.at_s))

        def elapsed_time(self, end: Self) -> float:
            return 1e3 * (end.at_s - self.at_s)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: fake.current.cuda_stream, raising=False)
    return fake


@pytest.fixture
def clock(device: Device) -> StepClock:
    return StepClock(torch.device("cuda", 0))


def step(clock: StepClock, device: Device, *, early: bool = False) -> None:
    """Three seconds up to the results, two behind them."""
    clock.start()
    device.queued_s += 3.0
    if early:
        clock.results_sent()
    device.queued_s += 2.0
    clock.stop()


def test_marks_are_in_the_stream_that_is_current(clock: StepClock, device: Device) -> None:
    for number in (0, 0, 7, 7, 0):
        device.current = Stream(number)
        step(clock, device)
    assert device.marks == [(name, number) for number in (0, 0, 7, 7, 0) for name in ("start", "end")]
    assert device.look_ups == 3, "at first, and at each change"


def test_a_step_that_sends_early_is_waited_for_up_to_there(clock: StepClock, device: Device) -> None:
    for early, end_s in ((True, 3.0), (False, 5.0), (True, 3.0)):
        begun_s = device.queued_s
        step(clock, device, early=early)
        clock.wait()
        assert device.waits[-1] == ("end", begun_s + end_s)
        assert clock.seconds() == pytest.approx(end_s)


def test_a_step_is_waited_for_once(clock: StepClock, device: Device) -> None:
    clock.wait()
    assert not device.waits, "nothing was launched"
    for steps in (1, 2):
        step(clock, device)
        clock.wait()
        clock.wait()
        assert len(device.waits) == steps


@pytest.mark.parametrize("early", [False, True])
def test_a_step_that_nobody_read_is_still_waited_for(clock: StepClock, device: Device, early: bool) -> None:
    """As on a rank whose results nobody reads: the next step that takes the entry waits, whichever came before."""
    step(clock, device)
    clock.wait()
    step(clock, device, early=early)
    assert len(device.waits) == 1
    clock.wait()
    assert device.waits[1:] == [("end", 8.0 if early else 10.0)]


def test_without_a_device_a_step_takes_what_lies_between() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    torch.randn(64, 64) @ torch.randn(64, 64)
    clock.stop()
    clock.wait()
    assert 0.0 < clock.seconds() < 5.0
