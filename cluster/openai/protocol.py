"""Request bodies of the API: OpenAI's fields plus the extensions that vLLM and SGLang clients send, under their names.

Types are strict (a number in a string is an error), null means "not given", unknown fields are kept in `model_extra`
for `cluster.openai.fields`. Bounds are OpenAI's. What a field means to the engine is decided in
`cluster.openai.params`.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from cluster.openai.errors import RULE_ERROR
from engine.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_LOGIT_BIASES,
    REPETITION_PENALTY_RANGE,
)

MAX_CHOICES = 128
MAX_STOP_STRINGS = 4
MAX_TOP_LOGPROBS = 20
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
MinP = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[
    float, Field(ge=REPETITION_PENALTY_RANGE[0], le=REPETITION_PENALTY_RANGE[1], allow_inf_nan=False)
]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _broken_rule(param: str, message: str) -> PydanticCustomError:
    """The error of a rule between fields, blamed on `param`. The message is a literal: braces in it have no meaning."""
    return PydanticCustomError(RULE_ERROR, "{message}", {"param": param, "message": message})


class Body(BaseModel):
    """A JSON object with strict types and room for unknown fields."""

    model_config = ConfigDict(extra="allow", strict=True, hide_input_in_errors=True, frozen=True)


class StreamOptions(Body):
    """include_usage: one more chunk with the usage. continuous_usage_stats (vLLM): the usage so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: accepted, without effect


class GenerationRequest(Body):
    """Fields shared by chat and completions."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: MinP | None = None
    seed: Annotated[int, Field(ge=_INT64_MIN, le=_INT64_MAX)] | None = None
    stop: list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\w.:-]+$")] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, value: Any) -> Any:
        if value is None:
            return None
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
            raise ValueError("must be a string or a list of strings")
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings are allowed")
        if "" in strings:
            raise ValueError("an empty stop string would end every completion at once")
        return strings

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _bias_by_id(cls, value: Any) -> Any:
        """JSON's keys are strings; here they are token ids."""
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ValueError("must be an object of token ids and numbers")
        if len(value) > MAX_LOGIT_BIASES:
            raise ValueError(f"at most {MAX_LOGIT_BIASES} biases are allowed")
        biases: dict[int, float] = {}
        for key, bias in value.items():
            if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10):
                raise ValueError("every key must be a token id")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ValueError(f"every bias must be a number between {-MAX_BIAS:g} and {MAX_BIAS:g}")
            if int(key) in biases:
                raise ValueError("every token id may appear once")
            biases[int(key)] = float(bias)
        return biases

    @field_validator("bad_words")
    @classmethod
    def _words_are_not_blank(cls, value: list[str] | None) -> list[str] | None:
        if any(not word.strip() for word in value or ()):
            raise ValueError("a blank word would ban spaces everywhere; remove it")
        return value

    @model_validator(mode="after")
    def _whole_prompt_logprobs(self) -> "GenerationRequest":
        if self.prompt_logprobs is not None and self.stream:
            raise _broken_rule("prompt_logprobs", "not available with stream: true")
        return self

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise _broken_rule("stream_options", "only allowed together with stream: true")
        return self

    @property
    def num_choices(self) -> int:
        """n with its default."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries the usage so far; without include_usage it has no effect (as in vLLM)."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class ChatMessage(Body):
    """One message; content parts become one string, as the templates served here take strings."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | None = None
    name: str | None = None

    @field_validator("role", mode="before")
    @classmethod
    def _known_role(cls, value: Any) -> Any:
        if value in ("tool", "function"):
            raise ValueError(f"the role '{value}' needs tool calls, which this server does not support")
        if value not in ("system", "developer", "user", "assistant"):
            raise ValueError("must be one of system, developer, user, assistant")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("must be a string or a list of text parts")
        texts: list[str] = []
        for index, part in enumerate(value):
            if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
                raise ValueError(f'part {index} is not {{"type": "text"}}; this server takes text only')
            text = part.get(part["type"])
            if not isinstance(text, str):
                raise ValueError(f"part {index} has no text")
            texts.append(text)
        return "".join(texts)

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        extra = self.model_extra or {}
        for field in ("tool_calls", "function_call", "audio"):
            if extra.get(field) is not None:
                raise _broken_rule(field, "not supported by this server; leave it out of the message")
        if self.content is None:
            raise _broken_rule("content", "a value is required")
        return self


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _rules(self) -> "ChatCompletionRequest":
        if self.top_logprobs and not self.logprobs:
            raise _broken_rule("top_logprobs", "only allowed together with logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise _broken_rule("continue_final_message", "cannot be true together with add_generation_prompt")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise _broken_rule("continue_final_message", "needs a last message with the role assistant")
        if 0 in (self.max_tokens, self.max_completion_tokens):
            raise _broken_rule("max_completion_tokens", "must be at least 1")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _broken_rule("max_completion_tokens", "differs from max_tokens; send one of them")
        return self


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions. `prompt` is normalised to a list of strings or of token-id lists."""

    prompt: list[str] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [value]
        problem = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
        if not isinstance(value, list):
            raise ValueError(problem)
        if not value:
            raise ValueError("at least one prompt is required")
        if all(isinstance(item, str) for item in value):
            return value
        prompts = value if all(isinstance(item, list) for item in value) else [value]
        if not all(type(token) is int for prompt in prompts for token in prompt):
            raise ValueError(problem)
        return prompts

    @model_validator(mode="after")
    def _rules(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise _broken_rule("max_tokens", "must be at least 1 (0 is for echo: true)")
        return self


class TokenizeRequest(Body):
    """Body of POST /tokenize, in vLLM's two forms: a prompt, or messages to be rendered with the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise _broken_rule("prompt", "exactly one of prompt and messages is required")
        if self.continue_final_message and self.add_generation_prompt:
            raise _broken_rule("continue_final_message", "cannot be true together with add_generation_prompt")
        return self


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
