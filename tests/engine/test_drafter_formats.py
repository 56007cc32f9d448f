"""What a drafter's files say becomes the drafter that they describe: z-lab's variants, the speculators format, maps."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config.drafter import parse_drafter_config
from engine.config.model import DraftAttention
from engine.models.draft_head import DraftHead
from engine.parallel.tp_group import TpGroup
from tests.engine.test_models_config_refuses import DRAFTER, REMOVE, edited, target

FULL = DraftAttention()
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 48,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "vocab_size": 131,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "use_sliding_window": True,
    },
    "draft_vocab_size": 40,
    "block_size": 6,
    "target_hidden_size": 48,
    "aux_hidden_state_layer_ids": [1, 3, 4],
    "mask_token_id": 3,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 9}, ()),
        ({"sliding_window": 9}, ()),  # a width that no layer uses
        (
            {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
            (DraftAttention(causal=True, window=9), FULL),
        ),
        ({"is_causal": True}, (DraftAttention(causal=True),) * 2),
        ({"dflash_config.causal": True}, (DraftAttention(causal=True),) * 2),
        ({"is_causal": False, "dflash_config.causal": True}, ()),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "dflash_config.causal": False},
            (DraftAttention(window=9),) * 2,
        ),
        ({"dflash_config.use_swa": True, "dflash_config.swa_window_size": 7}, (DraftAttention(window=7),) * 2),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 9,
                "dflash_config.use_swa": True,
                "dflash_config.swa_window_size": 7,
            },
            (FULL, DraftAttention(window=7)),
        ),
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            (FULL, DraftAttention(causal=True, window=9)),
        ),
        ({"use_sliding_window": True, "sliding_window": 9}, ()),  # the default: from layer 28 on
    ],
)
def test_what_each_layer_sees(changes: dict[str, Any], expected: tuple[DraftAttention, ...]) -> None:
    assert parse_drafter_config(edited(DRAFTER, changes), target()).attention == expected


def test_any_number_of_taps_and_the_block_size_below() -> None:
    changes = {"block_size": REMOVE, "dflash_config.block_size": 16, "dflash_config.target_layer_ids": [0, 1, 2, 3, 4]}
    config = parse_drafter_config(edited(DRAFTER, changes), target())
    assert (config.block_size, config.target_layer_ids, config.num_layers) == (16, (0, 1, 2, 3, 4), 2)


def test_speculators_config() -> None:
    config = parse_drafter_config(SPECULATORS, target())
    assert config.target_layer_ids == (0, 2, 3)  # counted from the embedding there
    assert (config.block_size, config.mask_token_id, config.num_layers) == (6, 3, 2)
    assert (config.rope.theta, config.vocab_size, config.hidden_size) == (5000.0, 131, 48)
    assert (config.own_embedding, config.draft_vocab_size, config.maps_vocab) == (True, 40, True)


@pytest.mark.parametrize(
    ("non_causal", "expected"),
    [
        (False, (DraftAttention(causal=True, window=12), FULL)),
        (True, (DraftAttention(window=12), FULL)),
        (REMOVE, (DraftAttention(window=12), FULL)),
    ],
)
def test_the_flag_of_sliding_layers_leaves_full_ones_alone(non_causal: object, expected: object) -> None:
    config = parse_drafter_config(edited(SPECULATORS, {"sliding_window_non_causal": non_causal}), target())
    assert config.attention == expected


def test_a_wider_drafter_with_its_own_ends() -> None:
    changes = {"transformer_layer_config.hidden_size": 64, "transformer_layer_config.head_dim": 8}
    config = parse_drafter_config(edited(SPECULATORS, changes), target())
    assert (config.hidden_size, config.target_hidden_size) == (64, 48)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash2"}, "speculators_model_type 'dflash2' is not supported"),
        ({"speculators_model_type": "dspark"}, "speculators_model_type 'dspark' is not supported"),
        ({"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3' is not supported"),
        ({"sample_from_anchor": True}, "sample_from_anchor=True is not supported for DFlash."),
        ({"shift_label": True}, "shift_label=True is not supported by this version"),
        ({"markov_rank": 256}, "markov_rank=256 is not supported by this version"),
        ({"architectures": ["DSparkSpeculator"]}, "architecture 'DSparkSpeculator' is not supported"),
        ({"transformer_layer_config": REMOVE}, "transformer_layer_config must be an object, got None"),
        ({"transformer_layer_config.model_type": "llama"}, "transformer_layer_config.model_type 'llama' is not supp"),
        ({"aux_hidden_state_layer_ids": REMOVE}, "target_layer_ids is missing"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids must be a list of ids from 1 on"),
        ({"aux_hidden_state_layer_ids": [1, 6]}, "5 is out of range; the target has layers 0..4"),
        ({"aux_hidden_state_layer_ids": [3, 1]}, "target_layer_ids=[2, 0] must be ascending"),
        ({"mask_token_id": None}, "DFlash requires mask_token_id to be set."),
        ({"target_hidden_size": 40}, "target_hidden_size=40 differs from the target's 48"),
        ({"transformer_layer_config.vocab_size": 130}, "vocab_size=130 differs from the target's 131"),
    ],
)
def test_speculators_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_drafter_config(edited(SPECULATORS, changes), target())


BARE = {"fc.weight": torch.zeros(2, 2), "layers.1.self_attn.q_proj.weight": torch.zeros(2, 2)}
HEAD = {"lm_head.weight": torch.zeros(2, 2)}
MAPS = {"d2t": torch.zeros(2), "t2d": torch.zeros(2)}


def written(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("base", "tensors", "expected"),
    [
        (DRAFTER, BARE, (False, 0, False)),
        (DRAFTER, BARE | HEAD, (False, 131, False)),
        (edited(DRAFTER, {"draft_vocab_size": 40}), BARE | HEAD | MAPS, (False, 40, True)),
        (SPECULATORS, BARE | HEAD | MAPS | {"embed_tokens.weight": torch.zeros(2, 2)}, (True, 40, True)),
        (edited(SPECULATORS, {"draft_vocab_size": REMOVE}), BARE, (False, 0, False)),
        (edited(SPECULATORS, {"draft_vocab_size": 131}), BARE | HEAD, (False, 131, False)),
    ],
)
def test_the_weight_files_say_what_the_drafter_brings(
    tmp_path: Path, base: dict[str, Any], tensors: dict[str, torch.Tensor], expected: tuple[bool, int, bool]
) -> None:
    config = parse_drafter_config(written(tmp_path, base, tensors), target())
    assert (config.own_embedding, config.draft_vocab_size, config.maps_vocab) == expected


@pytest.mark.parametrize(
    ("base", "tensors", "message"),
    [
        (SPECULATORS, BARE, "draft_vocab_size=40 is not the target's 131, but the weight files hold no lm_head.weight"),
        (SPECULATORS, BARE | HEAD, "draft_vocab_size=40 is not the target's 131, but the weight files hold no d2t"),
        (SPECULATORS, BARE | HEAD | {"d2t": torch.zeros(2)}, "the weight files hold one of d2t and t2d"),
        (DRAFTER, BARE | MAPS, "the weight files hold d2t, but no lm_head.weight"),
        (
            DRAFTER,
            BARE | {"layers.2.mlp.up_proj.weight": torch.zeros(2, 2)},
            "num_hidden_layers=2, but the weight files hold layers up to layers.2.",
        ),
    ],
)
def test_weight_files_that_contradict_the_config(
    tmp_path: Path, base: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_drafter_config(written(tmp_path, base, tensors), target())


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        ([0, 5, 5], [0, 6, 7], None),
        ([0, 5, 4], [0, 6], "d2t: draft ids plus d2t must ascend within the target's vocabulary (0..130)."),
        ([-1, 5, 5], [0, 6, 7], "d2t: draft ids plus d2t must ascend"),
        ([0, 5, 129], [0, 6, 130], "d2t: draft ids plus d2t must ascend"),
        ([0, 5, 5], [0, 6, 8], "t2d: marks 3 target ids, which are not those that d2t gives."),
        ([0, 5, 5], [0, 6, 7, 8], "t2d: marks 4 target ids, which are not those that d2t gives."),
    ],
)
def test_vocabulary_maps(d2t: list[int], t2d: list[int], message: str | None) -> None:
    config = parse_drafter_config(edited(SPECULATORS, {"draft_vocab_size": 3}), target())
    head = DraftHead(config, tp=TpGroup.solo(), dtype=torch.float32, device="cpu")
    assert head.d2t is not None and head.t2d is not None
    head.d2t.copy_(torch.tensor(d2t))
    head.t2d.zero_()[t2d] = True
    if message is None:
        head.finish_loading()
        assert head.target_ids.tolist() == t2d
        logits = head.over_target_vocab(torch.tensor([[1.0, 2.0, 3.0]]), 131)
        assert logits[0, t2d].tolist() == [1.0, 2.0, 3.0] and int(logits.isinf().sum()) == 128
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            head.finish_loading()
