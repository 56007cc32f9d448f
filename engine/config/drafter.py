"""The parsing of a DFlash drafter's `config.json`, z-lab's format or speculators', and its fit to the target.

A drafter that this engine would run wrongly is refused here, by the name of the file and of the key.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.json_fields import architecture_of, integer, read_config, refuse_common
from engine.config.model import DraftAttention, DrafterConfig, TargetConfig, parse_shape
from engine.config.speculators import flattened, is_speculators
from engine.weights.checkpoint import tensor_names

DRAFTER_ARCHITECTURES = ("DFlashDraftModel",)
# Keys with the values that mean "plain DFlash", at either level; any other value is another drafter.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "shift_label": (None, False),
    "projector_type": (None,),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "use_aux_hidden_state": (None, True),
    "use_heterogeneous_kv": (None, False),
}
_NEUTRAL_AT_TOP: dict[str, tuple[object, ...]] = {
    "is_neox_style": (None, True),
    "logit_scale": (None, 1.0),
    "mlp_bias": (None, False),
    "dspark_config": (None,),
    "markov_rank": (None, 0),
    "selector_rank": (None, 0),
    "conv_kernel_size": (None, 0),
}
# What may stand in dflash_config besides; an unknown key there is refused.
_DFLASH_KEYS = (
    "mask_token_id",
    "target_layer_ids",
    "block_size",
    "sample_from_anchor",
    "causal",
    "use_swa",
    "swa_window_size",
)
_ANCHOR = (
    "sample_from_anchor=True is not supported for DFlash. DFlash uses a fixed 1+N query layout where the anchor is the "
    "bonus token."
)
_MISSING_MASK = (
    "DFlash requires mask_token_id to be set. Please set it in DFlashDecodingConfig or ensure the draft model config "
    "has 'dflash_config.mask_token_id' or 'mask_token_id'."
)
_DEFAULT_MAX_WINDOW_LAYERS = 28  # of Qwen3's config in transformers


def parse_drafter_config(
    source: str | Path | Mapping[str, Any],
    target: TargetConfig,
    *,
    mask_token_id: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
) -> DrafterConfig:
    """The DFlash drafter of a directory or dict, checked against its target.

    A directory's weight files say whether it brings its own embedding, head and vocabulary map; without files (or for a
    dict) a speculators config is taken to bring them, a z-lab one not.

    mask_token_id, target_layer_ids: the user's overrides; None reads `dflash_config`, then the top level.

    Raises:
        ValueError: as `parse_target_config`, or a drafter that does not fit the target.
    """
    raw, _, where = read_config(source)
    names = None if isinstance(source, Mapping) else tensor_names(Path(source))
    speculators = is_speculators(raw)
    if speculators:
        raw = flattened(raw, where)
    architecture_of(raw, where, DRAFTER_ARCHITECTURES)
    refuse_common(raw, where)
    dflash = raw.get("dflash_config") or {}
    if not isinstance(dflash, Mapping):
        raise ValueError(f"{where}: dflash_config must be an object, got {dflash!r}.")
    _refuse_variants(raw, dflash, where)
    shape = parse_shape(raw, where, default_positions=target.max_position_embeddings)
    block_size = {"block_size": raw.get("block_size", dflash.get("block_size"))}
    config = DrafterConfig(
        **shape,
        block_size=integer(block_size, "block_size", where, 2),
        mask_token_id=_mask_token_id(mask_token_id, raw, dflash, target, where),
        target_layer_ids=_target_layer_ids(target_layer_ids, raw, dflash, target, where),
        attention_bias=bool(raw.get("attention_bias", False)),
        target_hidden_size=0 if shape["hidden_size"] == target.hidden_size else target.hidden_size,
        attention=_attention(raw, dflash, shape["num_layers"], where),
        **_vocabulary(raw, names, speculators, shape["vocab_size"], where),
    )
    _check_fit(config, raw, target, where)
    _check_layers(names, config.num_layers, where)
    return config


def _refuse_variants(raw: Mapping[str, Any], dflash: Mapping[str, Any], where: str) -> None:
    """Drafters of another kind under DFlash's architecture name."""
    for level, prefix, others in ((dflash, "dflash_config.", {}), (raw, "", _NEUTRAL_AT_TOP)):
        if level.get("sample_from_anchor"):
            raise ValueError(f"{where}: {prefix}{_ANCHOR}")
        for key, neutral in {**_NEUTRAL, **others}.items():
            if key in level and level[key] not in neutral:
                raise ValueError(f"{where}: {prefix}{key}={level[key]!r} is not supported by this version.")
    unknown = sorted(set(dflash) - set(_NEUTRAL) - set(_DFLASH_KEYS))
    if unknown:
        raise ValueError(f"{where}: dflash_config.{unknown[0]} is not supported by this version.")


def _attention(
    raw: Mapping[str, Any], dflash: Mapping[str, Any], num_layers: int, where: str
) -> tuple[DraftAttention, ...]:
    """What each layer's rows see; empty where every layer sees everything.

    `is_causal`, then `dflash_config.causal`, decide for every layer. Without them a full layer is not causal; a sliding
    one is in a z-lab file, unless `use_swa` says it is a symmetric window, and what `sliding_window_non_causal` says in
    a speculators file.
    """
    sliding = _sliding_layers(raw, dflash, num_layers, where)
    window = dflash.get("swa_window_size") or raw.get("sliding_window")
    if any(sliding):
        window = integer({"sliding_window": window}, "sliding_window", where, 1)
    for_all = next((v for v in (raw.get("is_causal"), dflash.get("causal")) if v is not None), None)
    if for_all not in (None, True, False):
        raise ValueError(f"{where}: is_causal and dflash_config.causal must be true or false, got {for_all!r}.")
    non_causal = dflash.get("use_swa") or raw.get("sliding_window_non_causal")
    layers = tuple(
        DraftAttention(
            causal=bool(for_all) if for_all is not None else slides and not non_causal,
            window=window if slides else None,
        )
        for slides in sliding
    )
    return layers if any(layer != DraftAttention() for layer in layers) else ()


def _sliding_layers(raw: Mapping[str, Any], dflash: Mapping[str, Any], num_layers: int, where: str) -> tuple[bool, ...]:
    kinds = raw.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise ValueError(f"{where}: layer_types must name each of the {num_layers} layers, got {kinds!r}.")
        odd = sorted({str(kind) for kind in kinds} - {"full_attention", "sliding_attention"})
        if odd:
            raise ValueError(
                f"{where}: layer_types {', '.join(odd)} are not supported by this version; full_attention and "
                "sliding_attention are."
            )
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
        if any(sliding) and raw.get("use_sliding_window") is False:
            raise ValueError(
                f"{where}: use_sliding_window=false contradicts the sliding_attention in layer_types; make them agree."
            )
    elif raw.get("use_sliding_window"):
        first = raw.get("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        sliding = tuple(index >= first for index in range(num_layers))
    else:
        sliding = (False,) * num_layers
    # use_swa without a list of layers means all of them.
    return (True,) * num_layers if dflash.get("use_swa") and not any(sliding) else sliding


def _vocabulary(
    raw: Mapping[str, Any], names: frozenset[str] | None, speculators: bool, vocab_size: int, where: str
) -> dict[str, Any]:
    """own_embedding, draft_vocab_size and maps_vocab."""
    given = raw.get("draft_vocab_size")
    rows = vocab_size if given is None else integer(raw, "draft_vocab_size", where, 1)
    if names is None:
        return {
            "own_embedding": speculators,
            "draft_vocab_size": rows if speculators or rows != vocab_size else 0,
            "maps_vocab": rows != vocab_size,
        }
    if ("d2t" in names) != ("t2d" in names):
        raise ValueError(f"{where}: the weight files hold one of d2t and t2d; a reduced draft vocabulary needs both.")
    own_head = "lm_head.weight" in names
    if rows != vocab_size and not (own_head and "d2t" in names):
        missing = "d2t" if own_head else "lm_head.weight"
        raise ValueError(
            f"{where}: draft_vocab_size={rows} is not the target's {vocab_size}, but the weight files hold no "
            f"{missing}."
        )
    if "d2t" in names and not own_head:
        raise ValueError(f"{where}: the weight files hold d2t, but no lm_head.weight whose rows it could map.")
    return {
        "own_embedding": "embed_tokens.weight" in names,
        "draft_vocab_size": rows if own_head else 0,
        "maps_vocab": "d2t" in names,
    }


def _check_layers(names: frozenset[str] | None, num_layers: int, where: str) -> None:
    """A checkpoint with more layers than its config would run as another drafter."""
    found = [int(match[1]) for name in names or () if (match := re.match(r"layers\.(\d+)\.", name))]
    if found and max(found) >= num_layers:
        raise ValueError(
            f"{where}: num_hidden_layers={num_layers}, but the weight files hold layers up to layers.{max(found)}."
        )


def _mask_token_id(
    override: int | None, raw: Mapping[str, Any], dflash: Mapping[str, Any], target: TargetConfig, where: str
) -> int:
    value = next((v for v in (override, dflash.get("mask_token_id"), raw.get("mask_token_id")) if v is not None), None)
    if value is None:
        raise ValueError(f"{where}: {_MISSING_MASK}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < target.vocab_size:
        raise ValueError(
            f"{where}: mask_token_id={value!r} is outside the target's embedding (0..{target.vocab_size - 1})."
        )
    return value


def _target_layer_ids(
    override: Sequence[int] | None,
    raw: Mapping[str, Any],
    dflash: Mapping[str, Any],
    target: TargetConfig,
    where: str,
) -> tuple[int, ...]:
    """Ascending 0-based layer ids; their order is the order of fc's columns, so an unsorted list is refused."""
    values = override if override is not None else dflash.get("target_layer_ids", raw.get("target_layer_ids"))
    if values is None:
        raise ValueError(f"{where}: target_layer_ids is missing; set it in DFlashDecodingConfig or in dflash_config.")
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"{where}: target_layer_ids must be a non-empty list of layer ids, got {values!r}.")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < target.num_layers:
            raise ValueError(
                f"{where}: target_layer_ids={list(values)}: {value!r} is out of range; the target has layers "
                f"0..{target.num_layers - 1}."
            )
    if list(values) != sorted(set(values)):
        raise ValueError(f"{where}: target_layer_ids={list(values)} must be ascending without duplicates.")
    return tuple(values)


def _check_fit(config: DrafterConfig, raw: Mapping[str, Any], target: TargetConfig, where: str) -> None:
    """What the drafter and the target must share."""
    if config.vocab_size != target.vocab_size:
        raise ValueError(f"{where}: vocab_size={config.vocab_size} differs from the target's {target.vocab_size}.")
    if config.hidden_size != target.hidden_size and not (config.own_embedding and config.draft_vocab_size):
        raise ValueError(
            f"{where}: hidden_size={config.hidden_size} differs from the target's {target.hidden_size}; the drafter "
            "uses the target's embedding or head."
        )
    target_hidden_size = raw.get("target_hidden_size") or target.hidden_size
    if target_hidden_size != target.hidden_size:
        raise ValueError(
            f"{where}: target_hidden_size={target_hidden_size} differs from the target's {target.hidden_size}."
        )
    trained_on = raw.get("num_target_layers")
    if trained_on is not None and trained_on != target.num_layers:
        raise ValueError(
            f"{where}: num_target_layers={trained_on}, but the target has {target.num_layers} layers; this drafter was "
            "made for another target."
        )
