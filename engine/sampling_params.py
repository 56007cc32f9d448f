"""Per-request sampling options, in vLLM's names and defaults. Validated on construction; travels as a message."""

import msgspec

# Options this engine refuses by name: (field, value that means "not asked for").
_UNSUPPORTED: tuple[tuple[str, object], ...] = (
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("repetition_penalty", 1.0),
    ("logit_bias", None),
    ("bad_words", None),
    ("allowed_token_ids", None),
    ("prompt_logprobs", None),
)
MAX_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to decode one request.

    Raises:
        ValueError: a value out of range (the message starts with the field's name), or an option this engine does not
            apply yet.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = 16  # None: up to max_model_len
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
