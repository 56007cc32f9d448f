"""Frozen descriptions of a target and a drafter checkpoint, and their parsing from `config.json`."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary embedding. rope_type: "default", "llama3", "linear", "yarn", ...; parameters: the checkpoint's other keys."""

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
