"""Requests as they enter the engine and token deltas as they leave it. Messages only: no torch, no scheduler state."""

import msgspec

from engine.sampling_params import SamplingParams
from engine.step import TokenLogprobs


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to decode. `params.n` is 1 here: front-ends fan out n > 1 into n requests.

    cache_salt isolates the prefix cache of callers that must not share it. bad_word_ids: the token sequences that
    `params.bad_words` stand for (`engine.bad_words`), as the engine itself has no tokenizer.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


class TokenDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one request.

    finish_reason: None while it runs, else "stop" (stop_reason: the token id, or None for end-of-sequence), "length",
        "abort", or "error" (error: a message for the client).
    num_drafted / num_accepted: this step's drafts at risk (a cut block is at risk up to the cut) and those accepted.
    prompt_logprobs: the next entries of the prompt's tokens from the second on, where asked for; complete before the
        first delta with tokens.
    num_cached_tokens: prompt tokens that came from the prefix cache (same value in every delta).
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    is_decode_step: bool = False  # False for the token drawn by the prefill
    num_cached_tokens: int = 0
    error: str | None = None
