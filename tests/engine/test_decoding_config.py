"""DFlashDecodingConfig: every field, default, validator message, property and method of the class it mirrors."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from engine.config.decoding import (
    AdvancedSamplingMode,
    DecodingBaseConfig,
    DFlashDecodingConfig,
    SpeculativeDecodingMode,
    warn_of_allow_advanced_sampling,
)

DEFAULTS = {
    "max_draft_len": None,
    "max_total_draft_tokens": None,
    "speculative_model": None,
    "max_concurrency": None,
    "draft_len_schedule": None,
    "load_format": None,
    "acceptance_rate_window_size": None,
    "acceptance_rate_threshold": None,
    "use_rejection_sampling": False,
    "allow_advanced_sampling": False,
    "advanced_sampling_mode": AdvancedSamplingMode.FULL,
    "enable_penalty": False,
    "mask_token_id": None,
    "target_layer_ids": None,
    "decoding_type": "DFlash",
    "attention_backend": "VANILLA",
}
EXCLUSIVE = (
    "max_concurrency and draft_len_schedule are mutually exclusive. Use max_concurrency for a simple speculation "
    "cutoff, or draft_len_schedule for dynamic draft-length control."
)


class Outer(BaseModel):
    speculative_config: DFlashDecodingConfig


def test_fields_and_defaults() -> None:
    assert list(DFlashDecodingConfig.model_fields) == list(DEFAULTS)
    assert DFlashDecodingConfig().model_dump() == DEFAULTS
    assert issubclass(DFlashDecodingConfig, DecodingBaseConfig)
    assert {mode.value for mode in AdvancedSamplingMode} == {"full", "no_topk", "no_topp", "no_topk_no_topp"}


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"max_draft_len": -1}, "max_draft_len", "greater than or equal to 0"),
        ({"max_draft_len": "four"}, "max_draft_len", "valid integer"),
        ({"max_draft_len": 1.5}, "max_draft_len", "valid integer"),
        ({"max_total_draft_tokens": "x"}, "max_total_draft_tokens", "valid integer"),
        ({"speculative_model": 3}, "speculative_model.str", "valid string"),
        ({"max_concurrency": 0}, "max_concurrency", "greater than 0"),
        ({"acceptance_rate_window_size": -1}, "acceptance_rate_window_size", "greater than or equal to 0"),
        ({"acceptance_rate_threshold": -0.1}, "acceptance_rate_threshold", "greater than or equal to 0"),
        ({"acceptance_rate_threshold": 1.1}, "acceptance_rate_threshold", "less than or equal to 1"),
        ({"load_format": 1}, "load_format", "valid string"),
        ({"use_rejection_sampling": "maybe"}, "use_rejection_sampling", "valid boolean"),
        ({"allow_advanced_sampling": "maybe"}, "allow_advanced_sampling", "valid boolean"),
        ({"advanced_sampling_mode": "none"}, "advanced_sampling_mode", "'full', 'no_topk', 'no_topp'"),
        ({"enable_penalty": "maybe"}, "enable_penalty", "valid boolean"),
        ({"mask_token_id": "x"}, "mask_token_id", "valid integer"),
        ({"target_layer_ids": 3}, "target_layer_ids", "valid list"),
        ({"target_layer_ids": ["x"]}, "target_layer_ids.0", "valid integer"),
        ({"decoding_type": "Eagle3"}, "decoding_type", "'DFlash'"),
        ({"attention_backend": "FLASH"}, "attention_backend", "'VANILLA' or 'TRTLLM'"),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens", "Extra inputs are not permitted"),
        ({"speculative_model": "a", "speculative_model_dir": "b"}, "speculative_model_dir", "Extra inputs"),
        ({"draft_len_schedule": {}}, "draft_len_schedule", "must name at least one batch size, such as {8: 4}"),
        ({"draft_len_schedule": {"many": 2}}, "draft_len_schedule.many.[key]", "valid integer"),
        (
            {"draft_len_schedule": {0: 4}},
            "draft_len_schedule",
            "draft_len_schedule: batch size threshold must be >= 1, got 0",
        ),
        (
            {"draft_len_schedule": {4: -1}},
            "draft_len_schedule",
            "draft_len_schedule: draft length must be >= 0, got -1",
        ),
        (
            {"max_draft_len": 4, "draft_len_schedule": {8: 4, 2: 3}},
            "draft_len_schedule",
            "draft_len_schedule[2] must equal max_draft_len because it is the smallest batch-size key. "
            "Got schedule[2]=3, but max_draft_len=4.",
        ),
        (
            {"max_draft_len": 4, "draft_len_schedule": {2: 4, 8: 5}},
            "draft_len_schedule",
            "draft_len_schedule: all draft lengths must be <= max_draft_len. Got draft_len=5 for batch_size=8, but "
            "max_draft_len=4.",
        ),
        ({"max_draft_len": 4, "max_concurrency": 8, "draft_len_schedule": {2: 4}}, "", EXCLUSIVE),
        ({"max_concurrency": 8, "draft_len_schedule": {8: 4}}, "", EXCLUSIVE),
    ],
)
def test_refused(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)) as caught:
        DFlashDecodingConfig(**given)
    assert ".".join(str(part) for part in caught.value.errors()[0]["loc"]) == field


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"max_draft_len": 0}, "max_draft_len", 0),
        ({"speculative_model_dir": "a/b"}, "speculative_model", "a/b"),
        ({"speculative_model": Path("a/b")}, "speculative_model", Path("a/b")),
        ({"max_draft_len": 4, "max_total_draft_tokens": 99}, "max_total_draft_tokens", 4),
        ({"max_total_draft_tokens": 99}, "max_total_draft_tokens", None),
        ({"max_draft_len": 4, "draft_len_schedule": {32: 1, 4: 4, 8: 2}}, "draft_len_schedule", {4: 4, 8: 2, 32: 1}),
        ({"max_draft_len": 4, "draft_len_schedule": {"4": "4", "8": "0"}}, "draft_len_schedule", {4: 4, 8: 0}),
        ({"max_draft_len": 4, "draft_len_schedule": {2: 4, 4: 1, 8: 3}}, "draft_len_schedule", {2: 4, 4: 1, 8: 3}),
        ({"draft_len_schedule": {8: 9}}, "draft_len_schedule", {8: 9}),
        ({"max_draft_len": 4, "max_concurrency": 8}, "draft_len_schedule", {8: 4}),
        ({"max_concurrency": 8}, "draft_len_schedule", None),
        ({"use_rejection_sampling": True}, "use_rejection_sampling", True),
        ({"advanced_sampling_mode": "no_topk"}, "advanced_sampling_mode", AdvancedSamplingMode.NO_TOPK),
        ({"acceptance_rate_window_size": 0}, "acceptance_rate_window_size", 0),
        ({"target_layer_ids": [5, 1]}, "target_layer_ids", [5, 1]),
        ({"attention_backend": "TRTLLM"}, "attention_backend", "TRTLLM"),
    ],
)
def test_accepted(given: dict[str, Any], field: str, value: object) -> None:
    assert getattr(DFlashDecodingConfig(**given), field) == value


def test_schedule_is_sorted_by_batch_size() -> None:
    config = DFlashDecodingConfig(max_draft_len=4, draft_len_schedule={32: 1, 4: 4, 8: 2})
    assert list(config.draft_len_schedule or {}) == [4, 8, 32]


def test_translated_max_concurrency_survives_validating_again() -> None:
    config = DFlashDecodingConfig(max_draft_len=4, max_concurrency=8)
    assert Outer(speculative_config=config).speculative_config == config
    assert DFlashDecodingConfig.model_validate(config) == config
    assert DFlashDecodingConfig(**config.model_dump()) == config
    assert DFlashDecodingConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize("value", [True, False])
def test_deprecated_key_warns_once_in_a_process(value: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_allow_advanced_sampling.cache_clear()
    with caplog.at_level(logging.WARNING):
        DFlashDecodingConfig(max_draft_len=4)
        assert not caplog.records
        DFlashDecodingConfig(max_draft_len=4, allow_advanced_sampling=value)
        DFlashDecodingConfig(max_draft_len=4, allow_advanced_sampling=value)
    assert [record.getMessage() for record in caplog.records] == [
        "DecodingBaseConfig: 'allow_advanced_sampling' is deprecated and will be removed in a future release. The flag "
        "has no effect \u2014 non-greedy sampling is now auto-detected per request."
    ]


def test_properties_and_methods() -> None:
    config = DFlashDecodingConfig(max_draft_len=7, speculative_model="owner/drafter", target_layer_ids=[1, 5, 9])
    assert config.spec_dec_mode is SpeculativeDecodingMode.DFLASH
    assert config.spec_dec_mode.is_dflash()
    assert not config.spec_dec_mode.is_none()
    assert config.spec_dec_mode.support_dynamic_draft_len()
    assert config.tokens_per_gen_step == 8
    assert [config.get_runtime_tokens_per_gen_step(k) for k in (0, 3, 7)] == [1, 4, 8]
    assert config.num_capture_layers() == 3
    assert DFlashDecodingConfig().num_capture_layers() == 0
    assert config.is_linear_tree
    assert config.supports_backend("pytorch")
    assert not config.supports_backend("tensorrt")
    assert not config.supports_backend("_autodeploy")
    assert config.uses_external_draft_model
    assert not config.uses_replacement_heads
    assert config.needs_separate_draft_weights
    assert not DFlashDecodingConfig().needs_separate_draft_weights
    with pytest.raises(ValueError, match="max_draft_len: must be set"):
        _ = DFlashDecodingConfig().tokens_per_gen_step


def test_base_config_is_no_algorithm() -> None:
    base = DecodingBaseConfig(max_draft_len=4, max_concurrency=2)
    assert base.spec_dec_mode.is_none()
    assert base.draft_len_schedule is None
    assert base.num_capture_layers() == 0
    assert not base.needs_separate_draft_weights


def test_json_schema_marks_prototypes_and_the_deprecated_field() -> None:
    properties = DFlashDecodingConfig.model_json_schema()["properties"]
    status = {name: value["status"] for name, value in properties.items() if "status" in value}
    assert status == {
        "use_rejection_sampling": "prototype",
        "allow_advanced_sampling": "deprecated",
        "enable_penalty": "prototype",
    }
