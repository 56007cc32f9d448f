"""The speculators format: the drafter's backbone nested in `transformer_layer_config`, the rest beside it.

Its layer ids count from the embedding: a is the output of 0-based layer a - 1, and so our a - 1.
"""

from collections.abc import Mapping
from typing import Any

from engine.config.json_fields import architecture_of

ARCHITECTURES = ("DFlashSpeculator", "DFlashDraftModel")
_BACKBONES = (None, "qwen3")


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of the speculators format."""
    return "speculators_model_type" in raw or "speculators_config" in raw


def flattened(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same drafter with every key where a z-lab checkpoint has it.

    `sliding_window_non_causal` is about the sliding layers alone. Files older than the key were made without a causal
    mask, so its absence means true.

    Raises:
        ValueError: another algorithm of the format, or a file without its parts.
    """
    settings = raw.get("speculators_config") or {}
    algorithm = raw.get("speculators_model_type") or settings.get("algorithm")
    if algorithm != "dflash":
        raise ValueError(f"{where}: speculators_model_type {algorithm!r} is not supported here; only 'dflash' is.")
    architecture_of(raw, where, ARCHITECTURES)
    backbone = raw.get("transformer_layer_config")
    if not isinstance(backbone, Mapping):
        raise ValueError(f"{where}: transformer_layer_config must be an object, got {backbone!r}.")
    if backbone.get("model_type") not in _BACKBONES:
        raise ValueError(
            f"{where}: transformer_layer_config.model_type {backbone['model_type']!r} is not supported here; only "
            "'qwen3' is."
        )
    outer = {
        key: value
        for key, value in raw.items()
        if key not in ("transformer_layer_config", "speculators_config", "aux_hidden_state_layer_ids")
    }
    return {
        **backbone,
        **outer,
        "architectures": ["DFlashDraftModel"],
        "sliding_window_non_causal": raw.get("sliding_window_non_causal", True),
        "dflash_config": {"target_layer_ids": _layer_ids(raw.get("aux_hidden_state_layer_ids"), where)},
    }


def _layer_ids(values: object, where: str) -> list[int] | None:
    if values is None:
        return None
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in values):
        raise ValueError(
            f"{where}: aux_hidden_state_layer_ids must be a list of ids from 1 on (id a is the output of layer a - 1), "
            f"got {values!r}."
        )
    return [value - 1 for value in values]
