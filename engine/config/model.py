"""Frozen descriptions of a target and a drafter checkpoint, and their parsing from `config.json`.

What this engine does not implement is refused here, by the name of the file and of the key, before any weight is read.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TARGET_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DRAFTER_ARCHITECTURES = ("DFlashDraftModel",)
DEFAULT_ROPE_THETA = 10_000.0  # of all three architectures in transformers

# Rope type -> (required parameters, optional ones).
_ROPE_PARAMETERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
# dflash_config keys with the value that means "plain DFlash"; any other value is another drafter. The others are
# ignored only if listed in _DRAFTER_KEYS.
_DRAFTER_NEUTRAL: dict[str, tuple[object, ...]] = {
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "projector_type": (None,),
    "causal": (None, False),
    "use_swa": (None, False),
    "swa_window_size": (None,),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "final_logit_softcapping": (None,),
    "use_aux_hidden_state": (None, True),
}
_DRAFTER_KEYS = ("mask_token_id", "target_layer_ids", "block_size")
_MISSING_MASK = (
    "DFlash requires mask_token_id to be set. Please set it in DFlashDecodingConfig or ensure the draft model config "
    "has 'dflash_config.mask_token_id' or 'mask_token_id'."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding. rope_type: "default", "llama3", "linear", "yarn", ..; parameters: the other keys."""

    theta: float
    rope_type: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """A dense decoder-only target: LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    o_bias: bool = False  # attention_bias of Llama and Qwen3 covers the output projection too


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A DFlash drafter in z-lab's format. block_size counts the anchor: it drafts block_size - 1 tokens."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # output of 0-based decoder layer i, before the final norm
    attention_bias: bool = False
    target_hidden_size: int = field(default=0)  # 0: same as hidden_size


def parse_target_config(source: str | Path | Mapping[str, Any]) -> TargetConfig:
    """The target of a model directory (`config.json`, and `generation_config.json` for end-of-sequence ids), or a dict.

    Raises:
        ValueError: a missing or malformed file or key, or a checkpoint this engine does not implement.
    """
    raw, generation, where = _read(source)
    architecture = _architecture(raw, where, TARGET_ARCHITECTURES)
    _refuse_common(raw, where)
    attention_bias = bool(raw.get("attention_bias", False))
    if raw.get("mlp_bias"):
        raise ValueError(f"{where}: mlp_bias=true is not supported by this version.")
    return TargetConfig(
        architecture=architecture,
        **_shape(raw, where, default_positions=None),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=_eos_ids(raw, generation, where),
        bos_token_id=raw.get("bos_token_id"),
    )


def parse_drafter_config(
    source: str | Path | Mapping[str, Any],
    target: TargetConfig,
    *,
    mask_token_id: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
) -> DrafterConfig:
    """The DFlash drafter of a directory or dict, checked against its target.

    mask_token_id, target_layer_ids: the user's overrides; None reads `dflash_config`, then the top level.

    Raises:
        ValueError: as `parse_target_config`, or a drafter that does not fit the target.
    """
    raw, _, where = _read(source)
    if "speculators_model_type" in raw or "speculators_config" in raw:
        raise ValueError(f"{where}: the speculators format is not supported by this version; use a z-lab checkpoint.")
    _architecture(raw, where, DRAFTER_ARCHITECTURES)
    _refuse_common(raw, where)
    dflash = raw.get("dflash_config") or {}
    if not isinstance(dflash, Mapping):
        raise ValueError(f"{where}: dflash_config must be an object, got {dflash!r}.")
    _refuse_variants(raw, dflash, where)
    shape = _shape(raw, where, default_positions=target.max_position_embeddings)
    attention_bias = bool(raw.get("attention_bias", False))
    config = DrafterConfig(
        **shape,
        block_size=_integer({"block_size": raw.get("block_size", dflash.get("block_size"))}, "block_size", where, 2),
        mask_token_id=_mask_token_id(mask_token_id, raw, dflash, target, where),
        target_layer_ids=_target_layer_ids(target_layer_ids, raw, dflash, target, where),
        attention_bias=attention_bias,
        target_hidden_size=int(raw.get("target_hidden_size") or 0),
    )
    _check_fit(config, raw, target, where)
    return config


def _read(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """config.json, generation_config.json (empty if absent) and the name that messages use for the former."""
    if isinstance(source, Mapping):
        return source, {}, "config"
    path = Path(source) / "config.json"
    generation = Path(source) / "generation_config.json"
    return _read_json(path), _read_json(generation) if generation.is_file() else {}, str(path)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a model directory must contain config.json.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object.")
    return content


def _architecture(raw: Mapping[str, Any], where: str, known: tuple[str, ...]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise ValueError(f"{where}: architectures must name one architecture, got {names!r}.")
    if names[0] not in known:
        raise ValueError(
            f"{where}: architecture '{names[0]}' is not supported by this version; supported: {', '.join(known)}."
        )
    return str(names[0])


def _refuse_common(raw: Mapping[str, Any], where: str) -> None:
    """Features of a decoder that change its outputs and that no model here implements."""
    if raw.get("quantization_config"):
        raise ValueError(
            f"{where}: quantization_config is not supported by this version; use bfloat16 or float32 weights."
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{where}: hidden_act '{raw['hidden_act']}' is not supported by this version; only 'silu' is.")
    layer_types = raw.get("layer_types") or []
    odd = sorted({str(kind) for kind in layer_types if kind != "full_attention"})
    if odd:
        raise ValueError(
            f"{where}: layer_types {', '.join(odd)} are not supported by this version; only full_attention is."
        )
    if raw.get("use_sliding_window") and raw.get("sliding_window") and not layer_types:
        raise ValueError(f"{where}: use_sliding_window=true is not supported by this version.")


def _refuse_variants(raw: Mapping[str, Any], dflash: Mapping[str, Any], where: str) -> None:
    """Drafters of another kind under DFlash's architecture name."""
    for key, neutral in _DRAFTER_NEUTRAL.items():
        for level, prefix in ((dflash, "dflash_config."), (raw, "")):
            if key in level and level[key] not in neutral:
                raise ValueError(f"{where}: {prefix}{key}={level[key]!r} is not supported by this version.")
    unknown = sorted(set(dflash) - set(_DRAFTER_NEUTRAL) - set(_DRAFTER_KEYS))
    if unknown:
        raise ValueError(f"{where}: dflash_config.{unknown[0]} is not supported by this version.")
    others: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("is_causal", (None, False)),
        ("is_neox_style", (None, True)),
        ("logit_scale", (None, 1.0)),
        ("mlp_bias", (None, False)),
        ("dspark_config", (None,)),
    )
    for key, accepted in others:
        if raw.get(key) not in accepted:
            raise ValueError(f"{where}: {key}={raw[key]!r} is not supported by this version.")
    draft_vocab = raw.get("draft_vocab_size")
    if draft_vocab is not None and draft_vocab != raw.get("vocab_size"):
        raise ValueError(
            f"{where}: draft_vocab_size={draft_vocab} (a reduced draft vocabulary) is not supported by this version."
        )


def _shape(raw: Mapping[str, Any], where: str, *, default_positions: int | None) -> dict[str, Any]:
    """The fields targets and drafters share."""
    num_heads = _integer(raw, "num_attention_heads", where, 1)
    num_kv_heads = _integer({"num_key_value_heads": num_heads, **_set(raw)}, "num_key_value_heads", where, 1)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads={num_heads} must be a multiple of num_key_value_heads={num_kv_heads}."
        )
    hidden = _integer(raw, "hidden_size", where, 1)
    if raw.get("head_dim") is None and hidden % num_heads:
        raise ValueError(f"{where}: head_dim is missing and hidden_size={hidden} is no multiple of {num_heads} heads.")
    head_dim = _integer({"head_dim": hidden // num_heads, **_set(raw)}, "head_dim", where, 2)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim={head_dim} must be even for rotary embedding.")
    positions = _set(raw).get("max_position_embeddings", default_positions)
    return {
        "num_layers": _integer(raw, "num_hidden_layers", where, 1),
        "hidden_size": hidden,
        "intermediate_size": _integer(raw, "intermediate_size", where, 1),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": _integer(raw, "vocab_size", where, 1),
        "rms_norm_eps": _number(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
        "rope": _rope(raw, where),
        "max_position_embeddings": _integer(
            {"max_position_embeddings": positions}, "max_position_embeddings", where, 1
        ),
    }


def _set(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _integer(raw: Mapping[str, Any], key: str, where: str, least: int) -> int:
    value = raw.get(key)
    if value is None:
        raise ValueError(f"{where}: {key} is missing.")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}: {key} must be an integer >= {least}, got {value!r}.")
    return value


def _number(value: object, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {key} must be a number, got {value!r}.")
    return float(value)


def _rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (earlier)."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    values = raw.get(key) or {}
    if not isinstance(values, Mapping):
        raise ValueError(f"{where}: {key} must be an object, got {values!r}.")
    rope_type = values.get("rope_type", values.get("type", "default"))
    if rope_type not in _ROPE_PARAMETERS:
        raise ValueError(
            f"{where}: {key}.rope_type '{rope_type}' is not supported by this version; "
            f"supported: {', '.join(_ROPE_PARAMETERS)}."
        )
    for level, name in ((values, f"{key}.partial_rotary_factor"), (raw, "partial_rotary_factor")):
        if level.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError(f"{where}: {name}={level['partial_rotary_factor']} is not supported by this version.")
    theta = values.get("rope_theta", raw.get("rope_theta", DEFAULT_ROPE_THETA))
    required, optional = _ROPE_PARAMETERS[rope_type]
    given = _set(values)
    if "original_max_position_embeddings" in required and "original_max_position_embeddings" not in given:
        # transformers takes the top level's value, else max_position_embeddings.
        fallback = raw.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
        if fallback is not None:
            given["original_max_position_embeddings"] = fallback
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"{where}: {key}.{missing[0]} is missing; rope_type '{rope_type}' needs it.")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *required, *optional}
    # transformers fills in the old context length for every type; it has no effect on the default one.
    known |= {"original_max_position_embeddings"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{where}: {key}.{unknown[0]} is not supported by this version for rope_type '{rope_type}'.")
    numbers = [(name, given[name]) for name in (*required, *optional) if name in given]
    return RopeConfig(
        theta=_number(theta, "rope_theta", where),
        rope_type=rope_type,
        parameters=tuple(
            (name, float(value) if name == "truncate" else _number(value, f"{key}.{name}", where))
            for name, value in numbers
        ),
    )


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Ids of both files, generation_config.json's first; either may hold one id, a list, or nothing."""
    found: list[int] = []
    for values in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        for value in values if isinstance(values, list) else [values]:
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{where}: eos_token_id must hold token ids, got {value!r}.")
            found.append(value)
    return tuple(dict.fromkeys(found))


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
    """What the drafter and the target must share: embedding and head belong to the target."""
    if config.vocab_size != target.vocab_size:
        raise ValueError(f"{where}: vocab_size={config.vocab_size} differs from the target's {target.vocab_size}.")
    if config.hidden_size != target.hidden_size:
        raise ValueError(
            f"{where}: hidden_size={config.hidden_size} differs from the target's {target.hidden_size}; the drafter "
            "uses the target's embedding and head."
        )
    if config.target_hidden_size not in (0, target.hidden_size):
        raise ValueError(
            f"{where}: target_hidden_size={config.target_hidden_size} differs from the target's {target.hidden_size}."
        )
    trained_on = raw.get("num_target_layers")
    if trained_on is not None and trained_on != target.num_layers:
        raise ValueError(
            f"{where}: num_target_layers={trained_on}, but the target has {target.num_layers} layers; this drafter was "
            "made for another target."
        )
