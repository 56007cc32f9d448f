"""Law: a checkpoint this engine would run wrongly is refused by file and key, before any weight is read."""

import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from engine.config.drafter import parse_drafter_config
from engine.config.model import TargetConfig, parse_target_config

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 131,
    "block_size": 6,
    "num_target_layers": 5,
    "rope_theta": 1e6,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2, 3]},
}


class Edit(Enum):
    """What `edited` does to a key beside giving it a value."""

    REMOVE = "remove"  # no bare object: its address would be part of a test's name


REMOVE = Edit.REMOVE


def edited(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """base with dotted keys set or removed."""
    made = json.loads(json.dumps(base))
    for path, value in changes.items():
        *parents, key = path.split(".")
        level = made
        for parent in parents:
            level = level.setdefault(parent, {})
        if value is REMOVE:
            del level[key]
        else:
            level[key] = value
    return made


def target() -> TargetConfig:
    return parse_target_config(TARGET)


TARGET_CASES: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GptOssForCausalLM"]}, "architecture 'GptOssForCausalLM' is not supported by this version"),
    ({"architectures": ["Gemma3ForCausalLM"]}, "architecture 'Gemma3ForCausalLM' is not supported by this version"),
    ({"architectures": REMOVE}, "architectures must name one architecture, got None"),
    ({"architectures": ["LlamaForCausalLM", "X"]}, "architectures must name one architecture"),
    ({"hidden_size": REMOVE}, "hidden_size is missing"),
    ({"hidden_size": "48"}, "hidden_size must be an integer >= 1, got '48'"),
    ({"hidden_size": 50}, "head_dim is missing and hidden_size=50 is no multiple of 8 heads"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1, got 0"),
    ({"num_key_value_heads": 3}, "num_attention_heads=8 must be a multiple of num_key_value_heads=3"),
    ({"head_dim": 7}, "head_dim=7 must be even"),
    ({"intermediate_size": REMOVE}, "intermediate_size is missing"),
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"max_position_embeddings": REMOVE}, "max_position_embeddings is missing"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, got 'small'"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported by this version"),
    ({"mlp_bias": True}, "mlp_bias=true is not supported by this version"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is not supported by this version"),
    ({"layer_types": ["sliding_attention"]}, "layer_types sliding_attention are not supported by this version"),
    ({"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window=true is not supported by this version"),
    ({"eos_token_id": ["x"]}, "eos_token_id must hold token ids, got 'x'"),
    ({"eos_token_id": 131}, "eos_token_id 131 is outside the vocabulary (0..130)"),
    ({"eos_token_id": [2, -1]}, "eos_token_id -1 is outside the vocabulary (0..130)"),
    (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "longrope"}},
        "rope_parameters.rope_type 'default' and rope_scaling.rope_type 'longrope' contradict each other",
    ),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type 'longrope' is not supported by this version"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type 'dynamic' is not supported"),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing; rope_type 'linear' needs it"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor must be a number, got '2'"),
    ({"rope_scaling": {"type": "linear", "factor": 2, "x": 1}}, "rope_scaling.x is not supported by this version"),
    ({"rope_scaling": [1]}, "rope_scaling must be an object"),
    ({"rope_theta": "big"}, "rope_theta must be a number, got 'big'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported by this version"),
    ({"rope_parameters.partial_rotary_factor": 0.25}, "rope_parameters.partial_rotary_factor=0.25 is not supported"),
]

DRAFTER_CASES: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DFlash2DraftModel"]}, "architecture 'DFlash2DraftModel' is not supported by this version"),
    ({"architectures": ["DSparkDraftModel"]}, "architecture 'DSparkDraftModel' is not supported by this version"),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, "architecture 'Eagle3LlamaForCausalLM' is not supported"),
    ({"markov_rank": 256}, "markov_rank=256 is not supported by this version"),
    ({"selector_rank": 256}, "selector_rank=256 is not supported by this version"),
    ({"conv_kernel_size": 2}, "conv_kernel_size=2 is not supported by this version"),
    ({"dspark_config": {"markov_rank": 256}}, "dspark_config={'markov_rank': 256} is not supported by this version"),
    ({"dflash_config": [1]}, "dflash_config must be an object"),
    (
        {"dflash_config.sample_from_anchor": True},
        "dflash_config.sample_from_anchor=True is not supported for DFlash. DFlash uses a fixed 1+N query layout where "
        "the anchor is the bonus token.",
    ),
    ({"sample_from_anchor": True}, "config.json: sample_from_anchor=True is not supported for DFlash."),
    ({"shift_label": True}, "config.json: shift_label=True is not supported by this version"),
    ({"dflash_config.shift_label": True}, "dflash_config.shift_label=True is not supported by this version"),
    ({"dflash_config.projector_type": "mlp"}, "dflash_config.projector_type='mlp' is not supported by this version"),
    ({"dflash_config.use_aux_hidden_state": False}, "dflash_config.use_aux_hidden_state=False is not supported"),
    ({"dflash_config.final_logit_softcapping": 30.0}, "dflash_config.final_logit_softcapping=30.0 is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported by this version"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is not supported by this version"),
    ({"dflash_config.causal": "yes"}, "is_causal and dflash_config.causal must be true or false, got 'yes'"),
    ({"dflash_config.use_swa": True}, "sliding_window is missing"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window is missing"),
    ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "sliding_window must be an integer >= 1, got 0"),
    ({"layer_types": ["full_attention"]}, "layer_types must name each of the 2 layers, got ['full_attention']"),
    ({"layer_types": ["linear_attention"] * 2}, "layer_types linear_attention are not supported by this version"),
    (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": False},
        "use_sliding_window=false contradicts the sliding_attention in layer_types",
    ),
    ({"dflash_config.selector_rank": 8}, "dflash_config.selector_rank is not supported by this version"),
    (
        {"dflash_config.mask_token_id": REMOVE},
        "DFlash requires mask_token_id to be set. Please set it in DFlashDecodingConfig or ensure the draft model "
        "config has 'dflash_config.mask_token_id' or 'mask_token_id'.",
    ),
    ({"dflash_config.mask_token_id": 131}, "mask_token_id=131 is outside the target's embedding (0..130)"),
    ({"dflash_config.mask_token_id": -1}, "mask_token_id=-1 is outside the target's embedding"),
    ({"dflash_config.target_layer_ids": REMOVE}, "target_layer_ids is missing"),
    ({"dflash_config.target_layer_ids": []}, "target_layer_ids must be a non-empty list"),
    ({"dflash_config.target_layer_ids": [2, 0, 3]}, "target_layer_ids=[2, 0, 3] must be ascending without duplicates"),
    ({"dflash_config.target_layer_ids": [0, 2, 2]}, "target_layer_ids=[0, 2, 2] must be ascending without duplicates"),
    ({"dflash_config.target_layer_ids": [0, 5]}, "5 is out of range; the target has layers 0..4"),
    ({"dflash_config.target_layer_ids": [-1, 2]}, "-1 is out of range"),
    ({"block_size": REMOVE}, "block_size is missing"),
    ({"block_size": 1}, "block_size must be an integer >= 2, got 1"),
    ({"vocab_size": 130}, "vocab_size=130 differs from the target's 131"),
    ({"vocab_size": REMOVE}, "vocab_size is missing"),
    (
        {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
        "rope_scaling.rope_type 'longrope' is not supported by this version; supported: default, linear, llama3, yarn",
    ),
    ({"hidden_size": 40}, "hidden_size=40 differs from the target's 48"),
    ({"target_hidden_size": 40}, "target_hidden_size=40 differs from the target's 48"),
    ({"num_target_layers": 36}, "num_target_layers=36, but the target has 5 layers"),
]


@pytest.mark.parametrize(("changes", "message"), TARGET_CASES, ids=lambda value: str(value)[:60])
def test_target(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(edited(TARGET, changes)))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_target_config(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("changes", "message"), DRAFTER_CASES, ids=lambda value: str(value)[:60])
def test_drafter(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(edited(DRAFTER, changes)))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_drafter_config(tmp_path, target())
    assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json: no such file"):
        parse_target_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        parse_target_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json: must hold a JSON object"):
        parse_target_config(tmp_path)


def test_defaults_and_flags() -> None:
    llama = target()
    assert (llama.head_dim, llama.rope.theta, llama.rope.rope_type) == (6, 10_000.0, "default")
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm, llama.tie_word_embeddings) == (False, False, False, False)
    qwen2 = parse_target_config(edited(TARGET, {"architectures": ["Qwen2ForCausalLM"]}))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = parse_target_config(edited(TARGET, {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": None}))
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.num_kv_heads) == (False, True, 8)


def test_end_of_sequence_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TARGET))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert parse_target_config(tmp_path).eos_token_ids == (7, 2, 9)
    assert parse_target_config(edited(TARGET, {"eos_token_id": None})).eos_token_ids == ()


def test_overrides_and_other_places() -> None:
    moved = edited(
        DRAFTER,
        {
            "block_size": REMOVE,
            "dflash_config.block_size": 8,
            "dflash_config.mask_token_id": REMOVE,
            "mask_token_id": 5,
            "dflash_config.target_layer_ids": REMOVE,
        },
    )
    config = parse_drafter_config(moved, target(), target_layer_ids=[1, 4])
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, 5, (1, 4))
    assert parse_drafter_config(DRAFTER, target(), mask_token_id=0).mask_token_id == 0
    with pytest.raises(ValueError, match="mask_token_id=500"):
        parse_drafter_config(DRAFTER, target(), mask_token_id=500)
