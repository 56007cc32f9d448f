"""Token counts of a response, in OpenAI's `usage` form."""

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """cached_tokens: prompt tokens whose K/V came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """accepted / rejected_prediction_tokens: draft tokens that were emitted / that were verified in vain."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt is counted once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def make_usage(
    *, prompt_tokens: int, cached_tokens: int, completion_tokens: int, num_accepted: int, num_rejected: int
) -> Usage:
    """Usage from plain counts; num_accepted and num_rejected count draft tokens."""
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=0,
            accepted_prediction_tokens=num_accepted,
            rejected_prediction_tokens=num_rejected,
        ),
    )
