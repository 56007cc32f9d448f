"""Small random checkpoints for tests: a target made by transformers, a drafter in z-lab's format, a byte tokenizer."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

VOCAB_SIZE = 320
EOS_ID = 257
MASK_ID = 300
_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def make_tokenizer(directory: Path) -> None:
    """Byte-level tokenizer: id = byte for 0..255, then <bos> 256, <eos> 257."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(directory)


def make_target(
    directory: Path,
    *,
    kind: str = "llama",
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 48,
    seed: int = 0,
    spread: float = 0.25,
) -> Path:
    """A random target whose greedy text varies: `spread` is the initializer's standard deviation."""
    torch.manual_seed(seed)
    extra = {"head_dim": head_dim} if kind != "qwen2" else {}
    if kind == "qwen2":
        hidden_size = num_heads * head_dim
    config = _CONFIGS[kind](
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=512,
        initializer_range=spread,
        tie_word_embeddings=kind == "llama",
        bos_token_id=256,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
        **extra,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(directory, safe_serialization=True)
    make_tokenizer(directory)
    return directory


def make_drafter(
    directory: Path,
    target: Path,
    *,
    block_size: int = 8,
    num_layers: int = 2,
    target_layer_ids: tuple[int, ...] = (0, 1),
    seed: int = 1,
    max_position_embeddings: int = 512,
) -> Path:
    """A random DFlash drafter for the target in `target`, same head counts and width."""
    directory.mkdir(parents=True, exist_ok=True)
    base = json.loads((target / "config.json").read_text())
    hidden = base["hidden_size"]
    heads, kv_heads = base["num_attention_heads"], base["num_key_value_heads"]
    head_dim = base.get("head_dim") or hidden // heads
    inner = base["intermediate_size"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": max_position_embeddings,
        "vocab_size": base["vocab_size"],
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "block_size": block_size,
        "num_target_layers": base["num_hidden_layers"],
        "dtype": "float32",
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(target_layer_ids)},
    }
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(hidden, len(target_layer_ids) * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for i in range(num_layers):
        at = f"layers.{i}."
        tensors |= {
            at + "input_layernorm.weight": norm(hidden),
            at + "post_attention_layernorm.weight": norm(hidden),
            at + "self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            at + "self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            at + "self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            at + "self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            at + "self_attn.q_norm.weight": norm(head_dim),
            at + "self_attn.k_norm.weight": norm(head_dim),
            at + "mlp.gate_proj.weight": matrix(inner, hidden),
            at + "mlp.up_proj.weight": matrix(inner, hidden),
            at + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(tensors, directory / "model.safetensors")
    return directory
