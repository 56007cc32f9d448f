"""`DFlashDecodingConfig`: the user's speculative-decoding options, field for field those of TensorRT-LLM's class.

Names, defaults, validation and messages follow `tensorrt_llm.llmapi.DFlashDecodingConfig`, so a config written for it
loads here. The class accepts what that class accepts; what this engine cannot run is refused when an engine is made of
it (`engine.config.resolve`), where the checkpoints are known.

Differences, all towards an earlier or clearer message: an empty `draft_len_schedule` is refused by name, and so is a
boolean in place of a number; `tokens_per_gen_step` without `max_draft_len` raises ValueError, and the dump of a config
that used `max_concurrency` loads again.
"""

import enum
import functools
import logging
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)
from pydantic_core.core_schema import ValidationInfo

logger = logging.getLogger(__name__)

# Fields of numbers, of every class below.
_NUMBERS = (
    "max_draft_len",
    "max_total_draft_tokens",
    "max_concurrency",
    "draft_len_schedule",
    "acceptance_rate_window_size",
    "acceptance_rate_threshold",
    "mask_token_id",
    "target_layer_ids",
)


@functools.cache
def warn_of_allow_advanced_sampling() -> None:
    """Logs the deprecation, once per process: a config is validated several times on its way to an engine."""
    logger.warning(
        "DecodingBaseConfig: 'allow_advanced_sampling' is deprecated and will be removed in a future release. "
        "The flag has no effect \u2014 non-greedy sampling is now auto-detected per request."
    )


class AdvancedSamplingMode(enum.StrEnum):
    """Which filters of the sampler exist in a deployment. FULL: top-k and top-p, per request.

    A filter that does not exist costs nothing, and a request that asks for it is refused. (TensorRT-LLM decodes such a
    request without the filter.)
    """

    FULL = "full"
    NO_TOPK = "no_topk"
    NO_TOPP = "no_topp"
    NO_TOPK_NO_TOPP = "no_topk_no_topp"


class SpeculativeDecodingMode(enum.Enum):
    """The drafting algorithm of a config."""

    DFLASH = "DFlash"
    NONE = "None"

    def is_dflash(self) -> bool:
        return self is SpeculativeDecodingMode.DFLASH

    def is_none(self) -> bool:
        return self is SpeculativeDecodingMode.NONE

    def support_dynamic_draft_len(self) -> bool:
        """Whether the draft length may change from step to step."""
        return self is SpeculativeDecodingMode.DFLASH


class DecodingBaseConfig(BaseModel):
    """Options every drafting algorithm shares."""

    model_config = ConfigDict(extra="forbid")

    max_draft_len: NonNegativeInt | None = Field(default=None, description="Most draft tokens per step (K).")
    max_total_draft_tokens: int | None = Field(
        default=None, description="Draft tokens in the draft tree. DFlash drafts a line: always max_draft_len."
    )
    speculative_model: str | Path | None = Field(
        default=None,
        validation_alias=AliasChoices("speculative_model", "speculative_model_dir"),
        description="The drafter: a Hugging Face id, a local directory, or another model source.",
    )
    max_concurrency: PositiveInt | None = Field(
        default=None,
        description="Speculation is off at batch sizes above this. Short for draft_len_schedule "
        "{max_concurrency: max_draft_len}; the two exclude each other.",
    )
    draft_len_schedule: dict[int, int] | None = Field(
        default=None,
        description="Batch size (inclusive upper bound) -> draft length. {4: 4, 8: 2, 32: 1}: 1-4 -> 4, 5-8 -> 2, "
        "9-32 -> 1, above 32 -> 0. The smallest key's value must be max_draft_len.",
    )
    load_format: str | None = Field(
        default=None,
        description="Weight format of the drafter: auto (the default), safetensors, or dummy, random weights for "
        "measurements.",
    )
    acceptance_rate_window_size: NonNegativeInt | None = Field(
        default=None,
        description="Steps with drafts over which the acceptance rate is averaged. None or 0: no acceptance gate.",
    )
    acceptance_rate_threshold: float | None = Field(
        default=None,
        ge=0.0,
        le=1.0,
        description="Speculation stops for good once the average rate (accepted / drafted) falls below this.",
    )
    use_rejection_sampling: bool = Field(
        default=False,
        description="Verify sampled requests by rejection sampling instead of exact match.",
        json_schema_extra={"status": "prototype"},
    )
    allow_advanced_sampling: bool = Field(
        default=False,
        description="Deprecated, without effect: sampling is detected per request.",
        json_schema_extra={"status": "deprecated"},
    )
    advanced_sampling_mode: AdvancedSamplingMode = Field(
        default=AdvancedSamplingMode.FULL,
        description="Which sampling filters exist in this deployment; requests that ask for another are refused.",
    )
    enable_penalty: bool = Field(
        default=False,
        description="Whether requests may use repetition, presence and frequency penalties. Their counts take 5 bytes "
        "of memory for every slot and vocabulary id.",
        json_schema_extra={"status": "prototype"},
    )

    @model_validator(mode="before")
    @classmethod
    def _warn_of_deprecated_key(cls, data: Any) -> Any:
        if isinstance(data, dict) and "allow_advanced_sampling" in data:
            warn_of_allow_advanced_sampling()
        return data

    @field_validator(*_NUMBERS, mode="before", check_fields=False)
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """True is no 1, although pydantic and Python take it for one."""
        parts = [*value, *value.values()] if isinstance(value, dict) else [value]
        if isinstance(value, list | tuple | set | frozenset):
            parts = [*value]
        if any(isinstance(part, bool | np.bool_) for part in parts):
            raise ValueError(f"{info.field_name}: must be a number, not true or false, got {value!r}")
        return value

    @field_validator("draft_len_schedule")
    @classmethod
    def validate_draft_len_schedule_and_sort(
        cls, value: dict[int, int] | None, info: ValidationInfo
    ) -> dict[int, int] | None:
        """Check thresholds and lengths; return the schedule ascending by batch size."""
        if value is None:
            return None
        if not value:
            raise ValueError(
                "draft_len_schedule: must name at least one batch size, such as {8: 4}; leave it out for "
                "max_draft_len at every batch size"
            )
        for batch_size, draft_len in value.items():
            if batch_size < 1:
                raise ValueError(f"draft_len_schedule: batch size threshold must be >= 1, got {batch_size}")
            if draft_len < 0:
                raise ValueError(f"draft_len_schedule: draft length must be >= 0, got {draft_len}")
        schedule = dict(sorted(value.items()))
        max_draft_len = info.data.get("max_draft_len")
        if max_draft_len is not None:
            smallest = next(iter(schedule))
            if schedule[smallest] != max_draft_len:
                raise ValueError(
                    f"draft_len_schedule[{smallest}] must equal max_draft_len because it is the smallest batch-size "
                    f"key. Got schedule[{smallest}]={schedule[smallest]}, but max_draft_len={max_draft_len}."
                )
            for batch_size, draft_len in schedule.items():
                if draft_len > max_draft_len:
                    raise ValueError(
                        f"draft_len_schedule: all draft lengths must be <= max_draft_len. Got draft_len={draft_len} "
                        f"for batch_size={batch_size}, but max_draft_len={max_draft_len}."
                    )
        return schedule

    @model_validator(mode="after")
    def validate_max_concurrency_and_draft_len_schedule_mutually_exclusive(self) -> "DecodingBaseConfig":
        """One of the two at most; `max_concurrency` becomes the schedule it stands for.

        The translation's own result is accepted beside max_concurrency, so that a config survives validation twice: as
        a nested instance, or dumped and loaded.
        """
        if self.max_concurrency is None:
            return self
        translated = None if self.max_draft_len is None else {self.max_concurrency: self.max_draft_len}
        if self.draft_len_schedule is not None and self.draft_len_schedule != translated:
            raise ValueError(
                "max_concurrency and draft_len_schedule are mutually exclusive. Use max_concurrency for a simple "
                "speculation cutoff, or draft_len_schedule for dynamic draft-length control."
            )
        if translated is not None and self.spec_dec_mode.support_dynamic_draft_len():
            self.draft_len_schedule = translated
        return self

    @model_validator(mode="after")
    def validate_rejection_sampling_config(self) -> "DecodingBaseConfig":
        """Keeps `use_rejection_sampling` as given.

        What excludes it (the way drafts are chosen, a missing FlashInfer) is known when an engine is made: there
        `engine.config.draft_sampling` refuses an explicit value and drops an inherited one.
        """
        return self

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        return SpeculativeDecodingMode.NONE

    @property
    def is_linear_tree(self) -> bool:
        """Whether drafts form one line: as many tokens as levels."""
        return self.max_draft_len == self.max_total_draft_tokens

    @property
    def tokens_per_gen_step(self) -> int:
        """Rows a request verifies in a step at full draft length.

        Raises:
            ValueError: max_draft_len is not set.
        """
        if self.max_draft_len is None:
            raise ValueError("max_draft_len: must be set to know the tokens per generation step")
        return self.max_draft_len + 1

    def get_runtime_tokens_per_gen_step(self, runtime_draft_len: int) -> int:
        """Rows a request verifies in a step with this many drafts: they and the last committed token."""
        return 1 + runtime_draft_len

    def num_capture_layers(self) -> int:
        """Target layers whose hidden states this config itself names; 0 when the checkpoint decides."""
        return 0

    def supports_backend(self, backend: str) -> bool:
        """Whether the algorithm runs on a named runtime of TensorRT-LLM's `backend` option."""
        return backend == "pytorch"

    @property
    def uses_external_draft_model(self) -> bool:
        """Whether `speculative_model` names a whole draft model."""
        return False

    @property
    def uses_replacement_heads(self) -> bool:
        """Whether `speculative_model` names replacement prediction heads of the target."""
        return False

    @property
    def needs_separate_draft_weights(self) -> bool:
        """Whether weights are loaded from `speculative_model`."""
        return self.uses_external_draft_model or self.uses_replacement_heads


class DFlashDecodingConfig(DecodingBaseConfig):
    """DFlash (arXiv 2602.06036): K drafts in one non-causal pass over hidden states of some target layers."""

    mask_token_id: int | None = Field(
        default=None, description="Token that stands for a position to fill. None: the drafter's config says."
    )
    target_layer_ids: list[int] | None = Field(
        default=None,
        description="0-based target layers whose outputs the drafter attends to. None: the drafter's config says.",
    )
    decoding_type: Literal["DFlash"] = "DFlash"
    attention_backend: Literal["VANILLA", "TRTLLM"] = Field(
        default="VANILLA", description="Attention kernels of the drafter. TRTLLM needs SM100 or SM103."
    )

    @model_validator(mode="after")
    def set_max_total_draft_tokens(self) -> "DFlashDecodingConfig":
        """A line of drafts has max_draft_len tokens, whatever was given."""
        self.max_total_draft_tokens = self.max_draft_len
        return self

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        return SpeculativeDecodingMode.DFLASH

    def num_capture_layers(self) -> int:
        """Target layers named in `target_layer_ids`; 0 when the drafter's checkpoint names them."""
        return len(self.target_layer_ids or ())

    @property
    def uses_external_draft_model(self) -> bool:
        """A DFlash drafter is always a model of its own; True once one is named."""
        return self.speculative_model is not None
