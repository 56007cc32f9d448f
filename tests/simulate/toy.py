"""Small scenarios for tests of the simulator."""

from pathlib import Path
from typing import Any

import yaml

from cluster.simulate.scenario import Scenario, load_scenario

DRAFT_LENS = (0, 1, 3)
SECONDS = {1: [0.010, 0.012, 0.014], 2: [0.012, 0.015, 0.020], 4: [0.016, 0.024, 0.045]}
LENGTHS = {"prompt": {"median": 10, "at_most": 10}, "output": {"median": 200, "at_least": 2, "at_most": 200}}
TABLE = {
    "accelerator": "toy",
    "model": "toy",
    "source": "made up",
    "measured": [1, 2, 4],
    "reference_context": 0,
    "context_token_s": 0.0,
    "prefill_base_s": 0.010,
    "prefill_token_s": 0.0,
    "draft_lens": list(DRAFT_LENS),
    "seconds": SECONDS,
}


def write(directory: Path, *, table: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A scenario file: one replica of up to four rows, one class, closed loop of four; `changes` replace keys."""
    (directory / "toy.yaml").write_text(yaml.safe_dump(TABLE | (table or {})))
    values = {
        "description": "toy",
        "duration_s": 40.0,
        "seeds": [1],
        "draft_lens": list(DRAFT_LENS),
        "configured_schedule": {4: 1},
        "replicas": [{"steps": "toy.yaml"}],
        "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_blocks": 200},
        "classes": {"a": {"hazards": [0.8, 0.7, 0.6]} | LENGTHS},
        "mix": {"phases": [{"at_s": 0, "shares": {"a": 1}}]},
        "arrivals": {"kind": "closed", "concurrency": 4},
    }
    path = directory / "scenario.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return path


def scenario(directory: Path, **changes: Any) -> Scenario:
    """See `write`."""
    return load_scenario(write(directory, **changes))
