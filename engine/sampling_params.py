"""Per-request sampling options, in vLLM's names and defaults. Validated on construction; travels as a message."""

import math
from collections.abc import Collection

import msgspec

MAX_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128  # every step compares every row of the batch with all of them
# Sizes of the tables that a step compares with, and of what a request may send to every rank (vLLM's limits).
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
REPETITION_PENALTY_RANGE = (0.01, 100.0)  # beyond it, penalised float32 logits may overflow
MIN_TEMPERATURE = 1e-5  # below it, scaled float32 logits overflow and ties decide
_SEED_MIN, _SEED_MAX = -(2**63), 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to decode one request.

    `stop` and `stop_token_ids` may be given as a list (and `stop` as one string); they are kept as tuples. Filters
    apply in the order temperature, min_p, top_k, top_p. seed None: the engine picks one per request.

    Before them the logits are changed in this order: logit_bias is added; repetition_penalty divides positive logits of
    ids in the prompt or the output and multiplies negative ones; frequency_penalty times an id's count in the output
    and presence_penalty (once) are subtracted; ids outside allowed_token_ids, and those that would complete one of
    bad_words in the output, are ruled out. Log-probabilities are those of the unchanged logits.

    Raises:
        ValueError: a value out of range; the message starts with the field's name.
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

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        msgspec.structs.force_setattr(self, "stop", _as_tuple("stop", stop, "strings"))
        msgspec.structs.force_setattr(
            self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, "token ids")
        )
        _check_int("n", self.n, low=1)
        temperature = _check_float("temperature", self.temperature, low=0.0)
        if 0.0 < temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {temperature!r}; use 0."
            )
        if _check_float("top_p", self.top_p, low=0.0, high=1.0) == 0.0:
            raise ValueError("top_p must be greater than 0 and at most 1, got 0; use temperature=0 for greedy.")
        _check_int("top_k", self.top_k, low=-1, high=2**31 - 1, note="0 and -1 switch it off")
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, low=_SEED_MIN, high=_SEED_MAX)
        self._check_lengths()
        self._check_stops()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        self._check_penalties()
        self._check_logit_rules()

    def _check_lengths(self) -> None:
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is None:
            return
        _check_int("max_tokens", self.max_tokens, low=1)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens, got min_tokens={self.min_tokens} and "
                f"max_tokens={self.max_tokens}."
            )

    def _check_stops(self) -> None:
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}; remove it from the list.")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True, because stop strings are searched in the text.")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}; use stop "
                "strings, or end the request from the client."
            )
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, low=0, high=2**31 - 1)

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(name, getattr(self, name), low=-MAX_PENALTY, high=MAX_PENALTY)
        low, high = REPETITION_PENALTY_RANGE
        _check_float("repetition_penalty", self.repetition_penalty, low=low, high=high)

    def _check_logit_rules(self) -> None:
        """logit_bias, allowed_token_ids and bad_words; empty biases and words become None, which is off."""
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.")
            _check_count("logit_bias", self.logit_bias, MAX_LOGIT_BIASES, "ids")
            for token_id, bias in self.logit_bias.items():
                _check_int("logit_bias", token_id, low=0, high=2**31 - 1)
                _check_float("logit_bias", bias, low=-MAX_BIAS, high=MAX_BIAS)
            msgspec.structs.force_setattr(self, "logit_bias", dict(self.logit_bias) or None)
        if self.allowed_token_ids is not None:
            ids = _as_tuple("allowed_token_ids", self.allowed_token_ids, "token ids")
            if not ids:
                raise ValueError("allowed_token_ids must name at least one id, got []; leave it out to allow every id.")
            _check_count("allowed_token_ids", ids, MAX_ALLOWED_TOKEN_IDS, "ids")
            for allowed_id in ids:
                _check_int("allowed_token_ids", allowed_id, low=0, high=2**31 - 1)
            msgspec.structs.force_setattr(self, "allowed_token_ids", ids)
        if self.bad_words is not None:
            words = _as_tuple("bad_words", self.bad_words, "strings")
            _check_count("bad_words", words, MAX_BAD_WORDS, "words")
            for word in words:
                if not isinstance(word, str) or not word.strip():
                    raise ValueError(f"bad_words must hold strings that are not blank, got {word!r}; remove it.")
            msgspec.structs.force_setattr(self, "bad_words", words or None)

    @property
    def has_penalty(self) -> bool:
        """True if what was said before changes what may be said next."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_greedy(self) -> bool:
        """True if every token is the most likely one."""
        return self.temperature == 0.0


def choice_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index` of one request: seed + index, wrapped to 64 bits; None stays None."""
    if seed is None:
        return None
    return (seed + index - _SEED_MIN) % 2**64 + _SEED_MIN


def _as_tuple(name: str, value: object, what: str) -> tuple[object, ...]:
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{name} must be a list of {what}, got {value!r}.")
    return tuple(value)


def _check_count(name: str, values: Collection[object], limit: int, what: str) -> None:
    if len(values) > limit:
        raise ValueError(f"{name} may hold at most {limit} {what}, got {len(values)}.")


def _range(low: float, high: float | None) -> str:
    return f"at least {low}" if high is None else f"between {low} and {high}"


def _check_int(name: str, value: object, *, low: int, high: int | None = None, note: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {_range(low, high)}{f' ({note})' if note else ''}, got {value}.")
    return value


def _check_float(name: str, value: object, *, low: float, high: float | None = None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {_range(low, high)}, got {value!r}.")
    return float(value)
