"""What a request asks of the target's logits: checked at arrival, and packed for the slot that it takes. No torch."""

from collections.abc import Sequence

from engine.config.engine import EngineConfig
from engine.request import EngineRequest
from engine.step import LogitsRules

MAX_SCORES_PER_STEP = 1 << 19  # log-probabilities in one message to the front end, at most 22 bytes each


def check_request(request: EngineRequest, config: EngineConfig, stop_token_ids: Sequence[int]) -> None:
    """Refuses what this deployment does not have, and rules that could leave a position without any token.

    stop_token_ids: every id that ends the request.

    Raises:
        ValueError: names the request's field, and the option where one would help.
    """
    params = request.params
    _check_deployment(request, config)
    if params.prompt_logprobs is not None:
        _check_prompt_logprobs(params.prompt_logprobs, config)
    vocab_size = config.target.vocab_size
    for name, ids in (("logit_bias", params.logit_bias), ("allowed_token_ids", params.allowed_token_ids)):
        _check_ids(name, ids or (), vocab_size)
    for word_ids in request.bad_word_ids:
        _check_ids("bad_words", word_ids, vocab_size)
    if bool(params.bad_words) != bool(request.bad_word_ids):
        raise ValueError("bad_words: the engine compares token ids; send the words' ids as bad_word_ids with them")
    # The last id of a bad word may be ruled out at any position, a stop id before min_tokens: what is left must serve.
    ruled_out = {word_ids[-1] for word_ids in request.bad_word_ids}
    if params.min_tokens:
        ruled_out.update(stop_token_ids)
    if params.allowed_token_ids is not None:
        if not set(params.allowed_token_ids) - ruled_out:
            raise ValueError(
                "allowed_token_ids: every allowed id may be ruled out by bad_words, or by min_tokens as a stop id; "
                "allow one more id"
            )
    elif len(ruled_out) >= vocab_size:
        raise ValueError("bad_words: with the stop ids they could rule out the whole vocabulary; ban fewer words")


def _check_deployment(request: EngineRequest, config: EngineConfig) -> None:
    params = request.params
    if params.has_penalty and not config.enable_penalty:
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        name = next(name for name, off in neutral.items() if getattr(params, name) != off)
        raise ValueError(
            f"{name}: penalties are off in this deployment; leave it out or send {neutral[name]:g}, or serve with "
            "speculative_config.enable_penalty: true"
        )
    for name, asked, exists in (
        ("top_k", params.top_k > 0, config.enable_top_k),
        ("top_p", params.top_p < 1.0, config.enable_top_p),
    ):
        if asked and not exists:
            raise ValueError(
                f"{name}: this deployment has no such filter; leave it out, or serve with "
                "speculative_config.advanced_sampling_mode: full"
            )


def _check_prompt_logprobs(num_alternatives: int, config: EngineConfig) -> None:
    most = MAX_SCORES_PER_STEP // config.max_num_batched_tokens - 1
    if num_alternatives > most:
        raise ValueError(
            f"prompt_logprobs: with max_num_batched_tokens = {config.max_num_batched_tokens} at most {most} "
            f"alternatives are reported, got {num_alternatives}"
        )


def _check_ids(name: str, ids: Sequence[int] | dict[int, float], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{name}: token id {token_id} is not in the vocabulary, 0 .. {vocab_size - 1}")


def has_rules(request: EngineRequest) -> bool:
    """Whether any row of the request needs the stage between the target's logits and the draw."""
    params = request.params
    return bool(params.has_penalty or params.logit_bias or params.allowed_token_ids or request.bad_word_ids)


def rules_of(request: EngineRequest, output_ids: Sequence[int]) -> LogitsRules | None:
    """The upload of a slot; None if nothing is asked. output_ids: tokens emitted so far."""
    if not has_rules(request):
        return None
    params = request.params
    counts_output = params.has_penalty or bool(request.bad_word_ids)
    return LogitsRules(
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple((params.logit_bias or {}).items()),
        allowed_ids=tuple(sorted(set(params.allowed_token_ids or ()))),
        bad_words=request.bad_word_ids,
        prompt_ids=tuple(sorted(set(request.prompt_token_ids))) if params.repetition_penalty != 1.0 else (),
        output_ids=tuple(output_ids) if counts_output else (),
    )


def upload_len(request: EngineRequest, num_tokens: int) -> int:
    """Upper bound of the numbers in `rules_of` when the request has num_tokens tokens; 0 without rules."""
    if not has_rules(request):
        return 0
    params = request.params
    num_words = sum(len(word_ids) for word_ids in request.bad_word_ids)
    return num_tokens + 2 * len(params.logit_bias or ()) + len(params.allowed_token_ids or ()) + num_words
