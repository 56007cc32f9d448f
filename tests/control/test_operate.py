"""What `dflash status` and `dflash schedule` print and accept."""

import pytest

from cluster.cli.operate import parse_schedule, reasons, status_lines
from cluster.control.controller import controller_apps, controller_name
from cluster.control.messages import Order
from cluster.control.status import status_of
from tests.control.test_control_state import EASY, HARD, Cluster


def test_a_schedule_is_pairs_or_one_length() -> None:
    assert parse_schedule("4:7,16:3") == {4: 7, 16: 3}
    assert list(parse_schedule("5").values()) == [5]
    for text in ("", "a", "4:", "4:7;8:3", "0:3", "4:-1"):
        with pytest.raises(ValueError, match=r"SCHEDULE|draft_len_schedule"):
            parse_schedule(text)
    with pytest.raises(ValueError, match=r"SCHEDULE: '4:7,4:3' names a batch size twice; give each one K"):
        parse_schedule("4:7,4:3")


def test_controllers_are_found_by_their_names() -> None:
    names = [controller_name("a", "ModelServer"), controller_name("b-2", "M"), "something:else"]
    assert controller_apps(names) == {"a": "ModelServer", "b-2": "M"}


def test_status_and_reasons_say_what_happened() -> None:
    cluster = Cluster(4)
    cluster.run(15, lambda name: HARD if name == "r0" else EASY)
    shown = status_of(cluster.state, app="a", deployment="d", now=cluster.now)
    text = "\n".join(status_lines(shown))
    assert "application a: 4 replica(s), controller epoch 1" in text
    assert "accepted up to position 1, 2, .. of blocks of 16: 0." in text and "last change" in text and "gains" in text
    lines = list(reasons(shown, 5))
    assert lines[0] == "toy:" and lines[1].startswith("  batch size up to 8: K 7 for")
    assert any(line == "replica r0:" for line in lines)
    num_own = sum(replica.own is not None for replica in shown.replicas)
    assert sum("batch size up to" in line for line in reasons(shown, None)) == 4 * (1 + num_own)  # batch buckets
    cluster.state.give(Order(mode="pin", issued_at=0.0, schedule={8: 2}), now=cluster.now)
    assert "pinned to 8:2" in "\n".join(status_lines(status_of(cluster.state, app="a", deployment="d", now=0.0)))


def test_a_replica_that_lags_is_seen() -> None:
    cluster = Cluster(1)
    cluster.run(12)
    cluster.arrives = lambda: False
    cluster.state.give(Order(mode="pin", issued_at=0.0, schedule={8: 2}), now=cluster.now)
    (replica,) = status_of(cluster.state, app="a", deployment="d", now=cluster.now).replicas
    assert replica.version < replica.target and replica.schedule == {8: 2}
