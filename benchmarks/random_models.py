"""Models of Qwen3-8B's shapes with random weights, as checkpoints that any engine reads.

Power follows from the numbers that are multiplied, and at its limit a GPU's clock follows from power: two engines can
only be compared over the same weights, and over weights with which every row of a batch is another one. vLLM's own
dummy weights are no such weights: they lie within 1e-3 of zero, norms too, so that its layers add nothing to a row, and
rows of one token are all alike.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_SPREAD = 0.02  # standard deviation; Qwen3's initializer_range
_WEIGHTS = "model.safetensors"

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# The published drafter of that model: five layers, blocks of 16.
QWEN3_8B_DFLASH = {
    **{k: v for k, v in QWEN3_8B.items() if k not in ("bos_token_id", "eos_token_id")},
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


def write_qwen3_8b(directory: Path, *, weights: bool, device: str = "cuda") -> tuple[Path, Path]:
    """(target, drafter) directories; weights: with random ones (18 GB), else config.json alone. Keeps what is there."""
    target, drafter = directory / "qwen3-8b", directory / "qwen3-8b-dflash"
    for path, raw, of in ((target, QWEN3_8B, _target_shapes), (drafter, QWEN3_8B_DFLASH, _drafter_shapes)):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(raw, indent=1))
        if weights and not (path / _WEIGHTS).is_file():
            drawn = _drawn(of(raw), device)
            save_file(drawn, path / f"{_WEIGHTS}.part", metadata={"format": "pt"})
            (path / f"{_WEIGHTS}.part").rename(path / _WEIGHTS)
    return target, drafter


def _drawn(shapes: dict[str, tuple[int, ...]], device: str) -> dict[str, Tensor]:
    """bfloat16, on the host: ones for norms, else normal."""
    generator = torch.Generator(device).manual_seed(0)
    found = {}
    for name, shape in shapes.items():
        drawn = torch.ones(shape) if len(shape) == 1 else torch.empty(shape, dtype=torch.bfloat16, device=device)
        if len(shape) > 1:
            drawn.normal_(std=_SPREAD, generator=generator)
        found[name] = drawn.to(torch.bfloat16).cpu()
    if device == "cuda":
        torch.cuda.empty_cache()  # the next program on this GPU may measure it
    return found


def _target_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """transformers' names."""
    V, H = raw["vocab_size"], raw["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    for index in range(raw["num_hidden_layers"]):
        shapes |= _layer_shapes(raw, f"model.layers.{index}.")
    return shapes | {"lm_head.weight": (V, H)}


def _drafter_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """z-lab's names."""
    H, taps = raw["hidden_size"], len(raw["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, taps * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for index in range(raw["num_hidden_layers"]):
        shapes |= _layer_shapes(raw, f"layers.{index}.")
    return shapes


def _layer_shapes(raw: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    H, D, inter = raw["hidden_size"], raw["head_dim"], raw["intermediate_size"]
    q, g = raw["num_attention_heads"] * D, raw["num_key_value_heads"] * D
    return {
        prefix + "input_layernorm.weight": (H,),
        prefix + "post_attention_layernorm.weight": (H,),
        prefix + "self_attn.q_proj.weight": (q, H),
        prefix + "self_attn.k_proj.weight": (g, H),
        prefix + "self_attn.v_proj.weight": (g, H),
        prefix + "self_attn.o_proj.weight": (H, q),
        prefix + "self_attn.q_norm.weight": (D,),
        prefix + "self_attn.k_norm.weight": (D,),
        prefix + "mlp.gate_proj.weight": (inter, H),
        prefix + "mlp.up_proj.weight": (inter, H),
        prefix + "mlp.down_proj.weight": (H, inter),
    }
