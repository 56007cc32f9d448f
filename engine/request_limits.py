"""How long a request may become, and whether that fits. No torch."""

from engine.config.engine import EngineConfig
from engine.request import EngineRequest


def max_len_of(request: EngineRequest, config: EngineConfig, *, num_blocks: int) -> int:
    """Total tokens at which the request ends.

    num_blocks: of the KV cache, without the null block.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, or a length that can never fit; names the field.
    """
    params = request.params
    prompt_len = len(request.prompt_token_ids)
    vocab_size = config.target.vocab_size
    if prompt_len == 0:
        raise ValueError("prompt_token_ids: the prompt is empty; at least one token is needed")
    if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= vocab_size:
        raise ValueError(f"prompt_token_ids: ids must be in 0 .. {vocab_size - 1}, the target's vocabulary")
    room = config.max_model_len - prompt_len
    if room < 1:
        raise ValueError(
            f"prompt_token_ids: {prompt_len} tokens leave no room for output in max_model_len = "
            f"{config.max_model_len}; shorten the prompt to at most {config.max_model_len - 1} tokens"
        )
    if params.max_tokens is not None and params.max_tokens > room:
        raise ValueError(
            f"max_tokens: {prompt_len} prompt tokens + {params.max_tokens} exceed max_model_len = "
            f"{config.max_model_len}; ask for at most {room} tokens"
        )
    max_len = prompt_len + (room if params.max_tokens is None else params.max_tokens)
    assert max_len > prompt_len, "SamplingParams admits no max_tokens below 1"
    num_needed = -(-(max_len + config.lookahead) // config.block_size)
    if num_needed > num_blocks:
        fits = num_blocks * config.block_size - config.lookahead - prompt_len
        remedy = f"ask for at most {fits} tokens or enlarge" if fits > 0 else "shorten the prompt or enlarge"
        raise ValueError(
            f"max_tokens: {prompt_len} prompt tokens + {max_len - prompt_len} output tokens + {config.lookahead} "
            f"lookahead slots need {num_needed} blocks of {config.block_size}, but the KV cache has "
            f"{num_blocks}; {remedy} the KV cache"
        )
    return max_len
