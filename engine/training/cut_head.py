"""A drafter with the target's head cut to some of its ids, as a checkpoint: z-lab's format with a head of its own.

The rows are the target's, so every draft that the whole head would make of the kept ids stays as it is. Three tensors
are added, with the names and meanings that the speculators format gives them: `lm_head.weight` [D, H], `d2t` int64 [D]
(target id minus row) and `t2d` bool [V] (the id has a row); config.json says `draft_vocab_size`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config.model import TargetConfig, parse_target_config
from engine.weights.checkpoint import weight_files

HEAD_TENSORS = frozenset({"lm_head.weight", "d2t", "t2d"})


def cut_head(target_dir: Path, drafter_dir: Path, ids: np.ndarray, out: Path) -> None:
    """Writes `drafter_dir` with a head of the target's rows `ids` (ascending) into the new directory `out`.

    Raises:
        ValueError: `out` exists, or the drafter has a head or another vocabulary already.
    """
    if out.exists():
        raise ValueError(f"{out} exists; name a new directory.")
    raw: dict[str, Any] = json.loads((drafter_dir / "config.json").read_text(encoding="utf-8"))
    weights = load_file(drafter_dir / "model.safetensors")
    if HEAD_TENSORS & weights.keys():
        raise ValueError(f"{drafter_dir}: the drafter has a head of its own; cut the one it was made from.")
    target = parse_target_config(target_dir)
    if raw.get("vocab_size") != target.vocab_size:
        raise ValueError(f"{drafter_dir}: vocab_size={raw.get('vocab_size')} is not the target's {target.vocab_size}.")
    kept = torch.from_numpy(ids)
    marks = torch.zeros(target.vocab_size, dtype=torch.bool)
    marks[kept] = True
    dtype = weights["fc.weight"].dtype
    weights["lm_head.weight"] = target_head(target_dir, target)[kept].to(dtype)
    weights["d2t"] = kept - torch.arange(len(kept))
    weights["t2d"] = marks
    out.mkdir(parents=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(raw | {"draft_vocab_size": len(kept)}, indent=1) + "\n")


def kept_ids(target_dir: Path, drafter_dir: Path) -> Tensor | None:
    """The target ids of a cut head, ascending int64 [D]; None for a drafter without a head.

    Raises:
        ValueError: a head that is not made of the target's rows.
    """
    weights = load_file(drafter_dir / "model.safetensors")
    if "lm_head.weight" not in weights:
        return None
    head = weights["lm_head.weight"]
    ids = torch.arange(len(head)) + weights["d2t"] if "d2t" in weights else torch.arange(len(head))
    if not torch.equal(head, target_head(target_dir, parse_target_config(target_dir))[ids].to(head.dtype)):
        raise ValueError(f"{drafter_dir}: lm_head.weight is not made of the target's rows; only such a head is scored.")
    return ids


def target_head(target_dir: Path, config: TargetConfig) -> Tensor:
    """The target's head, [V, H], in the checkpoint's dtype.

    Raises:
        ValueError: no such tensor.
    """
    name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    for path in weight_files(target_dir):
        weights = load_file(path)
        if name in weights:
            return weights[name]
    raise ValueError(f"{target_dir}: no weight file holds '{name}'.")
