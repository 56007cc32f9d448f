"""Law: every rope type's frequencies and rotation equal transformers'."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.config.model import parse_target_config
from engine.layers.rotary import RotaryTable, rotate

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
CASES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
    {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.1},
]


def raw_config(**keys: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 256,
        **keys,
    }


@pytest.mark.parametrize("old_keys", [False, True], ids=["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("rope", CASES, ids=lambda case: "-".join(map(str, case)))
def test_rotation(rope: dict[str, Any], old_keys: bool) -> None:
    if old_keys:
        scaling = None if rope["rope_type"] == "default" else rope
        raw = raw_config(rope_theta=10_000.0, rope_scaling=scaling)
    else:
        raw = raw_config(rope_parameters={**rope, "rope_theta": 10_000.0})
    config = LlamaConfig(**{k: v for k, v in raw.items() if k != "architectures"})
    ours = RotaryTable(parse_target_config(raw).rope, head_dim=64, num_positions=256, dtype=torch.float32)
    positions = torch.tensor([0, 1, 2, 50, 63, 64, 200, 255])
    x = torch.randn(len(positions), 3, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    torch.testing.assert_close(rotate(x, *ours.rows(positions)), want[0].transpose(0, 1), rtol=1e-5, atol=2e-5)
