"""The frozen heap: what lived is left out of collections, garbage is collected before and behind it."""

import gc
import io
import pickle
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from engine import rank
from engine.heap import freeze_heap
from tests.engine.fake_runner import make_config


class Knot:
    """Refers to itself, so that only a collection can free it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def by_hand() -> Iterator[None]:
    """No collection but those that a test asks for."""
    gc.disable()
    yield
    gc.unfreeze()
    gc.enable()


def seen_by_a_collection(wanted: object) -> bool:
    return any(found is wanted for found in gc.get_objects())


def test_what_lives_is_left_out() -> None:
    lives = [[]]
    assert seen_by_a_collection(lives)
    freeze_heap()
    assert not seen_by_a_collection(lives)
    assert len(gc.get_objects()) < gc.get_freeze_count() / 100


def test_garbage_of_the_start_is_freed_and_later_garbage_too() -> None:
    at_start = weakref.ref(Knot())
    assert at_start() is not None, "nothing collects meanwhile"
    freeze_heap()
    assert at_start() is None
    later = weakref.ref(Knot())
    gc.collect()
    assert later() is None


def test_a_follower_process_leaves_its_start_out_before_it_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = rank.FollowerSpec(config=make_config(), rank=1, init_method="tcp://127.0.0.1:1", ring_name="ring")
    calls: list[tuple[str, int]] = []

    def note(name: str, result: object = None) -> object:
        calls.append((name, gc.get_freeze_count()))
        return result

    follower = SimpleNamespace(follow=lambda reader: note("follow"), close=lambda: note("close"))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps(spec))))
    monkeypatch.setattr(rank, "make_rank", lambda *_, **__: note("make", follower))
    monkeypatch.setattr(rank, "PlanReader", lambda *_, **__: SimpleNamespace(close=lambda: None))
    rank.follow_from_stdin()
    assert [name for name, _ in calls] == ["make", "follow", "close"]
    assert calls[0][1] == 0 and calls[1][1] > 10_000
