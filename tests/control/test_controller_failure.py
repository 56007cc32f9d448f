"""A controller whose own work fails tells why and starts anew, with Ray or without: none stays that only answers."""

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.control import controller
from cluster.control.controller import SpeculationController


class Ended(BaseException):
    """What ends the process of a real one."""


@pytest.mark.parametrize("ray_answers", [True, False])
def test_a_failure_is_logged_and_ends_the_process(
    ray_answers: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[Any] = []

    def kill(actor: str, *, no_restart: bool) -> None:
        if not ray_answers:
            raise RuntimeError("the head is away")
        ended.append((actor, no_restart))

    def leave(status: int) -> None:
        ended.append(status)
        raise Ended

    def fail(_now: float) -> None:
        raise ZeroDivisionError("a decision")

    monkeypatch.setattr(controller, "_TICK_S", 0.0)
    monkeypatch.setattr(controller.ray, "kill", kill)
    monkeypatch.setattr(controller.os, "_exit", leave)
    broken = object.__new__(SpeculationController)
    broken._lock, broken._actor = threading.Lock(), "the actor"
    broken._state = SimpleNamespace(interval_s=0.0)  # type: ignore[assignment]
    broken._tick = fail  # type: ignore[assignment, method-assign]
    with caplog.at_level(logging.ERROR):
        if ray_answers:
            broken._work()
        else:
            with pytest.raises(Ended):
                broken._work()
    assert ended == ([("the actor", False)] if ray_answers else [1])
    causes = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert causes == (["a decision"] if ray_answers else ["a decision", "the head is away"])
