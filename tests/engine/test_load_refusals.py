"""Everything about speculation that TensorRT-LLM finds out late, or never, is said when an engine is made here.

One table: what the user wrote, what the drafter's files say, and the refusal or warning that comes of it. Its own
messages are TensorRT-LLM's where that has one.
"""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from engine.config.decoding import warn_of_allow_advanced_sampling
from tests.engine.resolving import B200, CPU, DRAFTER, TARGET, resolve, spec, write_checkpoint
from tests.engine.test_models_config_refuses import REMOVE, edited

MASK = (
    "DFlash requires mask_token_id to be set. Please set it in DFlashDecodingConfig or ensure the draft model config "
    "has 'dflash_config.mask_token_id' or 'mask_token_id'."
)
# (options of DFlashDecodingConfig, changes to the drafter's config.json, message)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"draft_len_schedule": {}}, {}, "draft_len_schedule: must name at least one batch size, such as {8: 4}"),
    ({"max_draft_len": None}, {}, "speculative_config.max_draft_len: must be set, to at most the drafter's block_size"),
    ({"max_draft_len": 0}, {}, "speculative_config.max_draft_len: DFlash max_draft_len must be > 0"),
    ({"speculative_model": None}, {}, "speculative_config.speculative_model: must be specified for DFlash"),
    ({"speculative_model": "/none"}, {}, "speculative_config.speculative_model: model source '/none': no such file"),
    ({"target_layer_ids": [2, 1]}, {}, "target_layer_ids=[2, 1] must be ascending without duplicates"),
    ({"target_layer_ids": [1, 4]}, {}, "4 is out of range; the target has layers 0..3"),
    ({"target_layer_ids": [-1]}, {}, "-1 is out of range; the target has layers 0..3"),
    ({}, {"dflash_config.target_layer_ids": [2, 1]}, "target_layer_ids=[2, 1] must be ascending without duplicates"),
    ({}, {"dflash_config.target_layer_ids": REMOVE}, "target_layer_ids is missing; set it in DFlashDecodingConfig"),
    ({}, {"dflash_config.mask_token_id": REMOVE}, MASK),
    ({"mask_token_id": 64}, {}, "mask_token_id=64 is outside the target's embedding (0..63)"),
    (
        {"max_draft_len": 16},
        {},
        "DFlash checkpoint was trained with block_size=16. Lower max_draft_len to at most 15. Current "
        "max_draft_len=16.",
    ),
    ({"max_draft_len": 7}, {"block_size": 4}, "trained with block_size=4. Lower max_draft_len to at most 3."),
    ({"load_format": "pt"}, {}, "speculative_config.load_format: must be one of auto, safetensors, dummy, got 'pt'"),
    ({}, {"architectures": ["DFlash2DraftModel"]}, "architecture 'DFlash2DraftModel' is not supported"),
    ({}, {"architectures": ["DSparkDraftModel"]}, "architecture 'DSparkDraftModel' is not supported"),
    ({}, {"sample_from_anchor": True}, "sample_from_anchor=True is not supported for DFlash."),
    ({}, {"dflash_config.shift_label": True}, "dflash_config.shift_label=True is not supported"),
    ({}, {"vocab_size": 63}, "vocab_size=63 differs from the target's 64"),
    ({}, {"draft_vocab_size": 32}, "draft_vocab_size=32 is not the target's 64, but the weight files hold no lm_head"),
    ({}, {"num_hidden_layers": 1}, "num_hidden_layers=1, but the weight files hold layers up to layers.1."),
    ({}, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type 'longrope' is not supported"),
]


def files(tmp_path: Path, changes: dict[str, Any]) -> tuple[Path, Path]:
    target = write_checkpoint(tmp_path / "target", TARGET)
    drafter = write_checkpoint(tmp_path / "drafter", edited(DRAFTER, changes))
    names = ("layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight")
    save_file({name: np.zeros((2, 2), np.float32) for name in names}, drafter / "model.safetensors")
    return target, drafter


@pytest.mark.parametrize(("options", "changes", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused_at_load(tmp_path: Path, options: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    target, drafter = files(tmp_path, changes)
    with pytest.raises((ValueError, ValidationError), match=re.escape(message)):
        resolve(target, spec(drafter, **options), machine=CPU)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"acceptance_rate_window_size": 9}, "the acceptance gate needs both (and a window above 0), so it is off"),
        ({"acceptance_rate_threshold": 0.2}, "the acceptance gate needs both (and a window above 0), so it is off"),
        ({"allow_advanced_sampling": False}, "'allow_advanced_sampling' is deprecated"),
    ],
)
def test_warned_of_at_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], message: str
) -> None:
    target, drafter = files(tmp_path, {})
    warn_of_allow_advanced_sampling.cache_clear()  # once per process, and other tests are of this one
    with caplog.at_level(logging.WARNING):
        config = resolve(target, spec(drafter, **options), machine=CPU)
    assert [message in record.getMessage() for record in caplog.records] == [True]
    assert config.gate_window == 0


def test_a_symmetric_window_has_no_trtllm_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    options = {"device": "cuda", "machine": B200, "dtype": "bfloat16"}
    for changes, refused in (
        ({"dflash_config.use_swa": True, "dflash_config.swa_window_size": 8}, True),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}, False),
    ):
        target, drafter = files(tmp_path, changes)
        given = spec(drafter, attention_backend="TRTLLM")
        if refused:
            with pytest.raises(ValueError, match="TRTLLM has no kernel for a sliding window that is not causal"):
                resolve(target, given, **options)
        else:
            assert resolve(target, given, **options).drafter_attention == "TRTLLM"


def test_a_target_whose_end_of_sequence_lies_outside_its_vocabulary(tmp_path: Path) -> None:
    target = write_checkpoint(tmp_path / "target", {**TARGET, "eos_token_id": [2, 64]})
    with pytest.raises(ValueError, match=re.escape("eos_token_id 64 is outside the vocabulary (0..63)")):
        resolve(target)
