"""Gauges of an engine, for tests that care for few of them."""

from typing import Any

from engine.core import EngineStats


def engine_stats(**changes: Any) -> EngineStats:
    """Those of an idle engine that does not draft, with changes."""
    idle: dict[str, Any] = {
        "num_running": 0,
        "num_waiting": 0,
        "num_in_flight": 0,
        "free_blocks": 1,
        "cached_blocks": 0,
        "total_blocks": 1,
        "kv_usage": 0.0,
        "draft_len": 0,
        "schedule_version": (0, 0),
        "schedule": {},
        "speculation_disabled": False,
    }
    return EngineStats(**(idle | changes))
