"""Frozen descriptions of a target and a drafter checkpoint, and the parsing of a target's from `config.json`.

What this engine does not implement is refused here, by the name of the file and of the key, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.json_fields import architecture_of, integer, number, present, read_config, refuse_common
from engine.config.rope import RopeConfig, parse_rope

TARGET_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


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
class DraftAttention:
    """What the block's rows see in one drafter layer. causal: nothing behind themselves. window: positions up to their
    own, themselves included; None: all."""

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A DFlash drafter. block_size counts the anchor: it drafts block_size - 1 tokens.

    attention: one entry per layer; empty: every layer sees the whole context and block.
    own_embedding: the checkpoint brings the embedding of the block; False: the target's.
    draft_vocab_size: rows of the checkpoint's own head; 0: the target's head drafts. maps_vocab: those rows stand for
        the target ids that the checkpoint's d2t names; False: for ids 0 .. draft_vocab_size - 1.
    """

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
    attention: tuple[DraftAttention, ...] = ()
    own_embedding: bool = False
    draft_vocab_size: int = 0
    maps_vocab: bool = False


def parse_target_config(source: str | Path | Mapping[str, Any]) -> TargetConfig:
    """The target of a model directory (`config.json`, and `generation_config.json` for end-of-sequence ids), or a dict.

    Raises:
        ValueError: a missing or malformed file or key, or a checkpoint this engine does not implement.
    """
    raw, generation, where = read_config(source)
    architecture = architecture_of(raw, where, TARGET_ARCHITECTURES)
    refuse_common(raw, where)
    _refuse_windows(raw, where)
    attention_bias = bool(raw.get("attention_bias", False))
    if raw.get("mlp_bias"):
        raise ValueError(f"{where}: mlp_bias=true is not supported by this version.")
    return TargetConfig(
        architecture=architecture,
        **parse_shape(raw, where, default_positions=None),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
        o_bias=architecture != "Qwen2ForCausalLM" and attention_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=_eos_ids(raw, generation, integer(raw, "vocab_size", where, 1), where),
        bos_token_id=raw.get("bos_token_id"),
    )


def parse_shape(raw: Mapping[str, Any], where: str, *, default_positions: int | None) -> dict[str, Any]:
    """The fields targets and drafters share. default_positions: where the file names no max_position_embeddings."""
    num_heads = integer(raw, "num_attention_heads", where, 1)
    num_kv_heads = integer({"num_key_value_heads": num_heads, **present(raw)}, "num_key_value_heads", where, 1)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{where}: num_attention_heads={num_heads} must be a multiple of num_key_value_heads={num_kv_heads}."
        )
    hidden = integer(raw, "hidden_size", where, 1)
    if raw.get("head_dim") is None and hidden % num_heads:
        raise ValueError(f"{where}: head_dim is missing and hidden_size={hidden} is no multiple of {num_heads} heads.")
    head_dim = integer({"head_dim": hidden // num_heads, **present(raw)}, "head_dim", where, 2)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim={head_dim} must be even for rotary embedding.")
    positions = present(raw).get("max_position_embeddings", default_positions)
    return {
        "num_layers": integer(raw, "num_hidden_layers", where, 1),
        "hidden_size": hidden,
        "intermediate_size": integer(raw, "intermediate_size", where, 1),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": integer(raw, "vocab_size", where, 1),
        "rms_norm_eps": number(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
        "rope": parse_rope(raw, where),
        "max_position_embeddings": integer({"max_position_embeddings": positions}, "max_position_embeddings", where, 1),
    }


def _refuse_windows(raw: Mapping[str, Any], where: str) -> None:
    layer_types = raw.get("layer_types") or []
    odd = sorted({str(kind) for kind in layer_types if kind != "full_attention"})
    if odd:
        raise ValueError(
            f"{where}: layer_types {', '.join(odd)} are not supported by this version; only full_attention is."
        )
    if raw.get("use_sliding_window") and raw.get("sliding_window") and not layer_types:
        raise ValueError(f"{where}: use_sliding_window=true is not supported by this version.")


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int, where: str) -> tuple[int, ...]:
    """Ids of both files, generation_config.json's first; either may hold one id, a list, or nothing."""
    found: list[int] = []
    for values in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        for value in values if isinstance(values, list) else [values]:
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{where}: eos_token_id must hold token ids, got {value!r}.")
            if not 0 <= value < vocab_size:
                raise ValueError(f"{where}: eos_token_id {value} is outside the vocabulary (0..{vocab_size - 1}).")
            found.append(value)
    return tuple(dict.fromkeys(found))
