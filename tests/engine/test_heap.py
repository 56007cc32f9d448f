"""The frozen heap: what lived is left out of collections, garbage is collected before and behind it."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from engine.heap import freeze_heap


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
