"""What training writes: drafters in z-lab's format, and the state from which it goes on."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.config.model import TargetConfig
from engine.training.drafter import TrainableDrafter

STATE_FILE = "state.pt"
DRAFTER_DIR = "drafter"


def drafter_config(
    target: TargetConfig, *, num_layers: int, block_size: int, mask_token_id: int, target_layer_ids: tuple[int, ...]
) -> dict[str, Any]:
    """config.json of a drafter with the target's shape. Plain rope only: a drafter has no reason to stretch it.

    Raises:
        ValueError: a mask id outside the embedding, a tap outside the target, or a block of fewer than two tokens.
    """
    if not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(f"mask_token_id={mask_token_id} is outside the target's embedding of {target.vocab_size}.")
    if any(not 0 <= layer < target.num_layers for layer in target_layer_ids) or not target_layer_ids:
        raise ValueError(
            f"target_layer_ids={list(target_layer_ids)}: the target has layers 0..{target.num_layers - 1}."
        )
    if block_size < 2 or num_layers < 1:
        raise ValueError(f"block_size={block_size} must be at least 2 and num_layers={num_layers} at least 1.")
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "intermediate_size": target.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": target.rope.theta,
        "rope_scaling": None,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * num_layers,
        "block_size": block_size,
        "num_target_layers": target.num_layers,
        "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(target_layer_ids)},
    }


def spread_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """DFlash's choice of tapped layers: evenly from the second to the third last; the middle one if there is one tap.

    Raises:
        ValueError: the target has fewer layers than taps fit in.
    """
    if count == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    taps = tuple(round(1 + i * span / (count - 1)) for i in range(count))
    if count < 1 or len(set(taps)) < count or taps[0] < 0 or taps[-1] >= num_target_layers:
        raise ValueError(f"{count} taps do not fit a target of {num_target_layers} layers; name target_layer_ids.")
    return taps


def save_drafter(drafter: TrainableDrafter, raw_config: dict[str, Any], directory: Path) -> None:
    """Weights in bfloat16 and config.json; the directory is replaced as a whole."""
    part = directory.with_name(directory.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = {name: w.detach().to(torch.bfloat16).cpu().clone() for name, w in drafter.state_dict().items()}
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(raw_config, indent=1) + "\n")
    old = directory.with_name(directory.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    part.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


@torch.no_grad()
def load_weights(drafter: TrainableDrafter, directory: Path, *, besides: frozenset[str] = frozenset()) -> None:
    """Fills the drafter from a z-lab checkpoint. besides: tensors that the files may hold and the drafter lacks.

    Raises:
        ValueError: missing, additional or differently shaped tensors.
    """
    found = load_file(directory / "model.safetensors")
    wanted = drafter.state_dict()
    odd = sorted((found.keys() - besides) ^ wanted.keys())
    if odd:
        raise ValueError(f"{directory}: tensor '{odd[0]}' is missing or unknown; the drafter's shape differs.")
    for name, weight in wanted.items():
        if found[name].shape != weight.shape:
            raise ValueError(
                f"{directory}: tensor '{name}' has shape {list(found[name].shape)}, wanted {list(weight.shape)}."
            )
        weight.copy_(found[name])


def save_state(state: dict[str, Any], directory: Path) -> None:
    """Replaces the state file in one rename, so that an interruption leaves the last whole one."""
    part = directory / (STATE_FILE + ".part")
    torch.save(state, part)
    os.replace(part, directory / STATE_FILE)


def load_state(directory: Path, device: str) -> dict[str, Any] | None:
    """The last state, or None if training has not begun there."""
    path = directory / STATE_FILE
    if not path.is_file():
        return None
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state
