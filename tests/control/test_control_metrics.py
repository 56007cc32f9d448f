"""What the controller says in Ray's metrics is what its replicas have."""

from typing import Any

import pytest

from cluster.control import control_metrics
from cluster.control.control_metrics import ControlMetrics
from tests.control.test_control_state import EASY, HARD, Cluster

Series = dict[str, dict[frozenset[tuple[str, str]], float]]


@pytest.fixture
def series(monkeypatch: pytest.MonkeyPatch) -> Series:
    """Name -> labels -> value, of gauges that refuse labels they were not made for, as Ray's do."""
    found: Series = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description
            self._keys, self._values = set(tag_keys), found.setdefault(name, {})

        def set(self, value: float, tags: dict[str, Any]) -> None:
            assert set(tags) == self._keys and all(isinstance(tag, str) for tag in tags.values())
            self._values[frozenset(tags.items())] = float(value)

    monkeypatch.setattr(control_metrics, "Gauge", Gauge)
    return found


def value(series: Series, name: str, **tags: str) -> float:
    return series[f"dflash_controller_{name}"][frozenset({"app": "a", "deployment": "d", **tags}.items())]


def test_series_are_what_replicas_have(series: Series) -> None:
    cluster, metrics = Cluster(3), ControlMetrics(app="a", deployment="d")
    for hazards in (EASY, HARD):
        cluster.run(12, lambda name, h=hazards: h)
        metrics.set(cluster.state)
        (schedule,) = {tuple(sorted(replica.schedule.items())) for replica in cluster.replicas.values()}
        for bound, draft_len in schedule:
            assert value(series, "draft_len", accelerator="toy", batch_size=str(bound)) == draft_len
        assert value(series, "hazard", block_width="16", position="0") == pytest.approx(hazards[0], abs=0.02)
        assert (value(series, "replicas"), value(series, "replicas_lagging"), value(series, "epoch")) == (3, 0, 1)
    assert value(series, "changes") == cluster.state.num_changes > 0 and value(series, "held") == 0
    cluster.arrives = lambda: False
    cluster.run(12)
    metrics.set(cluster.state)
    assert value(series, "replicas") == 0
