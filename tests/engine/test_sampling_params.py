"""Every rule of SamplingParams, with the message a user sees; and the trip over the wire."""

import math
import re

import msgspec
import pytest

from engine.sampling_params import SamplingParams, choice_seed

GOOD = [
    {},
    {"temperature": 0},
    {"temperature": 2.5, "top_p": 1, "top_k": -1, "min_p": 1.0},
    {"top_p": 1e-3, "top_k": 2**31 - 1, "seed": -(2**63)},
    {"seed": 2**63 - 1, "n": 128, "max_tokens": None, "min_tokens": 10**6},
    {"max_tokens": 5, "min_tokens": 5, "logprobs": 20, "stop": ["a", "b"], "stop_token_ids": [0, 7]},
    {"presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {}, "bad_words": ()},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.01, "prompt_logprobs": 0},
    {"logit_bias": {0: -100, 7: 100.0}, "bad_words": ["a", " b"], "allowed_token_ids": [0, 7], "prompt_logprobs": 20},
]
BAD = [
    ("temperature", -0.1, "temperature must be at least 0.0, got -0.1"),
    ("temperature", math.nan, "temperature must be a finite number"),
    ("temperature", math.inf, "temperature must be a finite number"),
    ("temperature", 1e-9, "temperature must be 0 (greedy) or at least 1e-05"),
    ("temperature", "1", "temperature must be a number, got '1'"),
    ("temperature", True, "temperature must be a number, got True"),
    ("temperature", None, "temperature must be a number, got None"),
    ("top_p", 0, "top_p must be greater than 0"),
    ("top_p", 1.01, "top_p must be between 0.0 and 1.0, got 1.01"),
    ("top_p", -1.0, "top_p must be between 0.0 and 1.0"),
    ("top_p", math.nan, "top_p must be a finite number"),
    ("top_k", -2, "top_k must be between -1 and 2147483647 (0 and -1 switch it off), got -2"),
    ("top_k", 2**31, "top_k must be between"),
    ("top_k", 1.0, "top_k must be an integer, got 1.0"),
    ("min_p", -0.01, "min_p must be between 0.0 and 1.0"),
    ("min_p", 1.5, "min_p must be between 0.0 and 1.0"),
    ("n", 0, "n must be at least 1, got 0"),
    ("n", True, "n must be an integer, got True"),
    ("seed", 2**63, "seed must be between"),
    ("seed", -(2**63) - 1, "seed must be between"),
    ("seed", 1.5, "seed must be an integer"),
    ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
    ("max_tokens", "5", "max_tokens must be an integer, got '5'"),
    ("min_tokens", -1, "min_tokens must be at least 0"),
    ("min_tokens", 17, "min_tokens must be at most max_tokens, got min_tokens=17 and max_tokens=16"),
    ("logprobs", -1, "logprobs must be between 0 and 20, got -1"),
    ("logprobs", 21, "logprobs must be between 0 and 20, got 21"),
    ("logprobs", True, "logprobs must be an integer, got True"),
    ("stop_token_ids", [2**63], "stop_token_ids must be between 0 and 2147483647, got 9223372036854775808"),
    ("stop_token_ids", [0] * 129, "stop_token_ids may hold at most 128 ids, got 129"),
    ("stop", "", "stop must hold non-empty strings, got ''"),
    ("stop", ["a", ""], "stop must hold non-empty strings"),
    ("stop", [5], "stop must hold non-empty strings, got 5"),
    ("stop", 5, "stop must be a list of strings, got 5"),
    ("stop_token_ids", [-1], "stop_token_ids must be between 0 and 2147483647, got -1"),
    ("stop_token_ids", list(range(129)), "stop_token_ids may hold at most 128 ids, got 129"),
    ("stop_token_ids", ["2"], "stop_token_ids must be an integer, got '2'"),
    ("stop_token_ids", 2, "stop_token_ids must be a list of token ids, got 2"),
    ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
    ("skip_special_tokens", None, "skip_special_tokens must be true or false"),
    ("include_stop_str_in_output", "yes", "include_stop_str_in_output must be true or false"),
    ("detokenize", 0, "detokenize must be true or false"),
    ("presence_penalty", 2.1, "presence_penalty must be between -2.0 and 2.0, got 2.1"),
    ("presence_penalty", math.nan, "presence_penalty must be a finite number"),
    ("frequency_penalty", -2.5, "frequency_penalty must be between -2.0 and 2.0, got -2.5"),
    ("frequency_penalty", "1", "frequency_penalty must be a number, got '1'"),
    ("repetition_penalty", 0, "repetition_penalty must be between 0.01 and 100.0, got 0"),
    ("repetition_penalty", 1e39, "repetition_penalty must be between 0.01 and 100.0, got 1e+39"),
    ("repetition_penalty", math.inf, "repetition_penalty must be a finite number"),
    ("logit_bias", [5], "logit_bias must map token ids to numbers, got [5]"),
    ("logit_bias", {-1: 1.0}, "logit_bias must be between 0 and 2147483647, got -1"),
    ("logit_bias", {"5": 1.0}, "logit_bias must be an integer, got '5'"),
    ("logit_bias", {5: 100.5}, "logit_bias must be between -100.0 and 100.0, got 100.5"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "logit_bias may hold at most 1024 ids, got 1025"),
    ("bad_words", "x", "bad_words must be a list of strings, got 'x'"),
    ("bad_words", [5], "bad_words must hold strings that are not blank, got 5; remove it"),
    ("bad_words", ["a", " "], "bad_words must hold strings that are not blank, got ' '; remove it"),
    ("bad_words", ["a"] * 129, "bad_words may hold at most 128 words, got 129"),
    ("allowed_token_ids", [], "allowed_token_ids must name at least one id, got []; leave it out to allow every id"),
    ("allowed_token_ids", 5, "allowed_token_ids must be a list of token ids, got 5"),
    ("allowed_token_ids", [-1], "allowed_token_ids must be between 0 and 2147483647, got -1"),
    ("allowed_token_ids", [1] * 1025, "allowed_token_ids may hold at most 1024 ids, got 1025"),
    ("prompt_logprobs", -1, "prompt_logprobs must be between 0 and 20, got -1"),
    ("prompt_logprobs", 21, "prompt_logprobs must be between 0 and 20, got 21"),
    ("prompt_logprobs", True, "prompt_logprobs must be an integer, got True"),
]


@pytest.mark.parametrize("fields", GOOD)
def test_accepted_and_equal_after_the_wire(fields: dict[str, object]) -> None:
    params = SamplingParams(**fields)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.json.decode(msgspec.json.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_refused_with_the_field_in_front(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        SamplingParams(**{field: value})


def test_every_field_has_a_bad_case() -> None:
    assert {field for field, _, _ in BAD} == set(SamplingParams.__struct_fields__)


def test_rules_hold_for_decoded_messages_too() -> None:
    with pytest.raises(msgspec.ValidationError, match="top_p must be between"):
        msgspec.json.decode(b'{"top_p": 2}', type=SamplingParams)


def test_stop_needs_text() -> None:
    with pytest.raises(ValueError, match=r"^stop needs detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams().is_greedy


def test_seeds_of_choices_follow_each_other_around_int64() -> None:
    assert [choice_seed(2**63 - 2, i) for i in range(3)] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert (choice_seed(-1, 0), choice_seed(-1, 1), choice_seed(None, 5)) == (-1, 0, None)
