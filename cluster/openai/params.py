"""From request fields to `SamplingParams`: defaults, the token budget, seeds of the choices."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import msgspec

from cluster.openai.errors import ApiError, from_value_error, invalid
from cluster.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from engine.sampling_params import REPETITION_PENALTY_RANGE, SamplingParams, choice_seed

logger = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions
_FIELDS = tuple(SamplingParams.__struct_fields__)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Values for fields that a request leaves out: the checkpoint's `generation_config.json`, else OpenAI's.

    A checkpoint that says `do_sample: false` is not taken as greedy: like vLLM and OpenAI, the API samples at
    temperature 1.0 unless the file gives a temperature or the request does.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_model_dir(cls, model_dir: str) -> "SamplingDefaults":
        """Read `generation_config.json` if there is one; values out of range are an error that names the file.

        Raises:
            ValueError: the file is not a JSON object, or holds a value that is no valid default.
        """
        path = Path(model_dir) / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{path} must hold a JSON object")
        values: dict[str, Any] = {name: data[name] for name in cls.__struct_fields__ if data.get(name) is not None}
        for name, low, high in (
            ("temperature", 0, math.inf),
            ("top_p", 0, 1),
            ("top_k", -1, math.inf),
            ("min_p", 0, 1),
            ("repetition_penalty", *REPETITION_PENALTY_RANGE),
        ):
            value = values.get(name, low)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ValueError(f"{path}: {name} must be a number between {low} and {high}, got {value!r}")
        return cls(**values)

    def within(self, *, has_penalty: bool, has_top_k: bool, has_top_p: bool) -> "SamplingDefaults":
        """The defaults that a deployment with these options can apply; a warning names each of the others."""
        off = SamplingDefaults()
        kept = self
        for name, exists, option in (
            ("repetition_penalty", has_penalty, "enable_penalty"),
            ("top_k", has_top_k, "advanced_sampling_mode"),
            ("top_p", has_top_p, "advanced_sampling_mode"),
        ):
            if not exists and getattr(self, name) != getattr(off, name):
                logger.warning(
                    "The checkpoint's default %s=%s is not applied, as speculative_config.%s leaves it out.",
                    name,
                    getattr(self, name),
                    option,
                )
                kept = msgspec.structs.replace(kept, **{name: getattr(off, name)})
        return kept


def completion_budget(
    *, requested: int | None, default: int | None, num_prompt_tokens: int, max_model_len: int, fields: tuple[str, str]
) -> int:
    """Tokens a choice may produce.

    Args:
        requested: what the client asked for, which must fit.
        default: used, cut to the rest of the context, when it asked for nothing; None: the whole rest.
        fields: names of the prompt's and the limit's field, for the message.

    Raises:
        ApiError: 400 `context_length_exceeded` with param.
    """
    prompt_field, limit_field = fields
    rest = max_model_len - num_prompt_tokens
    needed = 1 if requested is None else requested
    if rest < needed:
        asked = f"{num_prompt_tokens} in {prompt_field}"
        if requested is not None:
            asked += f" and {requested} by {limit_field}"
        remedy = f"shorten {prompt_field}" if rest < 1 else f"shorten {prompt_field} or lower {limit_field} to {rest}"
        raise ApiError(
            400,
            f"This model's context holds {max_model_len} tokens, but the request needs {num_prompt_tokens + needed}: "
            f"{asked}; {remedy}.",
            param=prompt_field if rest < 1 else limit_field,
            code="context_length_exceeded",
        )
    if requested is not None:
        return requested
    return rest if default is None else min(default, rest)


def chat_budget(request: ChatCompletionRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """max_completion_tokens, else max_tokens (its deprecated alias), else the rest of the context."""
    limit_field = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    return completion_budget(
        requested=request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens,
        default=None,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=max_model_len,
        fields=("messages", limit_field),
    )


def text_budget(request: CompletionRequest, num_prompt_tokens: int, max_model_len: int) -> int:
    """max_tokens, else 16 or what the context leaves."""
    return completion_budget(
        requested=request.max_tokens,
        default=DEFAULT_COMPLETION_TOKENS,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=max_model_len,
        fields=("prompt", "max_tokens"),
    )


def sampling_params(
    request: GenerationRequest,
    *,
    defaults: SamplingDefaults,
    max_tokens: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    choice: int,
) -> SamplingParams:
    """The engine's parameters of choice `choice` (0-based): seed + choice, wrapped to 64 bits.

    Raises:
        ApiError: 400 for a value the engine does not take.
    """

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    if request.min_tokens is not None and request.min_tokens > max_tokens:
        raise invalid("min_tokens", f"{request.min_tokens} is more than the {max_tokens} tokens that may be generated")
    try:
        return SamplingParams(
            temperature=float(given(request.temperature, defaults.temperature)),
            top_p=float(given(request.top_p, defaults.top_p)),
            top_k=given(request.top_k, defaults.top_k),
            min_p=float(given(request.min_p, defaults.min_p)),
            seed=choice_seed(request.seed, choice),
            stop=tuple(request.stop or ()),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            max_tokens=max_tokens,
            min_tokens=given(request.min_tokens, 0),
            ignore_eos=given(request.ignore_eos, False),
            logprobs=num_logprobs,
            prompt_logprobs=num_prompt_logprobs,
            presence_penalty=given(request.presence_penalty, 0.0),
            frequency_penalty=given(request.frequency_penalty, 0.0),
            repetition_penalty=float(given(request.repetition_penalty, defaults.repetition_penalty)),
            logit_bias=request.logit_bias,
            bad_words=None if request.bad_words is None else tuple(request.bad_words),
            allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
            skip_special_tokens=given(request.skip_special_tokens, True),
            include_stop_str_in_output=given(request.include_stop_str_in_output, False),
        )
    except ValueError as error:
        raise from_value_error(error, _FIELDS) from error
