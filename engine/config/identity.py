"""What cached K/V depend on, as one digest: it is part of every prefix-cache key."""

import hashlib
from pathlib import Path

from engine.config.model import DrafterConfig
from engine.weights.checkpoint import checkpoint_identity


def engine_identity(
    model_dir: Path,
    load_format: str,
    drafter_dir: Path | None,
    drafter_load_format: str,
    drafter: DrafterConfig | None,
    dtype: str,
) -> str:
    """Digest of what cached K/V depend on: both checkpoints, the drafter's settings and the dtype.

    The width of the drafter's block is none of it: the drafter's K/V in cached blocks are made of the target's states
    alone, and those of its own block lie behind them, where nothing is ever cached.
    """
    parts = [checkpoint_identity(model_dir, weights=load_format != "dummy"), dtype]
    if drafter_dir is not None:
        parts += [checkpoint_identity(drafter_dir, weights=drafter_load_format != "dummy"), repr(drafter)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
