"""A replica's counters in Ray's metrics add up to the engine's own."""

from typing import Any

import msgspec
import pytest

from cluster import ray_metrics
from cluster.ray_metrics import RayMetrics
from engine.speculative.counters import CounterSnapshot
from tests.stats import engine_stats

LABELS = {"model_name": "m", "engine": "0", "replica": "r"}
EMPTY = CounterSnapshot(
    cells=(),
    num_accepted_tokens_per_pos=(),
    finished={},
    **{
        name: 0
        for name in CounterSnapshot.__struct_fields__
        if name not in ("cells", "num_accepted_tokens_per_pos", "finished")
    },
)
STATS = engine_stats(draft_len=7, schedule_version=(1, 1), schedule={8: 7})


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """(name, position) -> value."""
    found: dict[Any, float] = {}

    class Metric:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self._name, self._keys = name, set(tag_keys)

        def _key(self, tags: dict[str, str]) -> Any:
            assert set(tags) == self._keys and LABELS.items() <= tags.items()
            return self._name, tags.get("position")

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0, "as Ray demands"
            found[self._key(tags)] = found.get(self._key(tags), 0) + value

        def set(self, value: float, tags: dict[str, str]) -> None:
            found[self._key(tags)] = value

    monkeypatch.setattr(ray_metrics, "Counter", Metric)
    monkeypatch.setattr(ray_metrics, "Gauge", Metric)
    return found


def test_increments_add_up_to_the_engines_counters(totals: dict[Any, float]) -> None:
    metrics = RayMetrics(model_name="m", replica="r")
    first = msgspec.structs.replace(
        EMPTY,
        generation_tokens=30,
        num_drafts=10,
        num_draft_tokens=50,
        num_accepted_tokens=20,
        num_accepted_tokens_per_pos=(9, 7, 4),
    )
    last = msgspec.structs.replace(
        first, generation_tokens=31, num_drafts=11, num_accepted_tokens_per_pos=(10, 7, 4, 1)
    )
    for snapshot in (EMPTY, first, first, last):
        metrics.update(STATS, snapshot)
    assert totals == {
        ("vllm_generation_tokens", None): 31,
        ("vllm_spec_decode_num_drafts", None): 11,
        ("vllm_spec_decode_num_draft_tokens", None): 50,
        ("vllm_spec_decode_num_accepted_tokens", None): 20,
        ("vllm_spec_decode_num_accepted_tokens_per_pos", "0"): 10,
        ("vllm_spec_decode_num_accepted_tokens_per_pos", "1"): 7,
        ("vllm_spec_decode_num_accepted_tokens_per_pos", "2"): 4,
        ("vllm_spec_decode_num_accepted_tokens_per_pos", "3"): 1,
        ("dflash_draft_len", None): 7,
        ("dflash_speculation_disabled", None): 0,
    }
