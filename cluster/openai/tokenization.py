"""What the API needs of a tokenizer, and the API's own rules around it."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cluster.openai.errors import clip, from_value_error, invalid
from cluster.openai.protocol import ChatMessage
from engine.bad_words import bad_word_token_ids
from engine.tokenizer import Tokenizer

# Above this many characters a text is encoded in a thread, so that other streams are not held up.
_INLINE_CHARS = 8_000


def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that decoding leaves out when special tokens are skipped."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


async def off_loop(size: int, function: Callable[[], Any]) -> Any:
    """Call `function`, in a thread if it works on a long text (`size` characters)."""
    return function() if size <= _INLINE_CHARS else await asyncio.to_thread(function)


async def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: Mapping[str, Any] | None,
    add_special_tokens: bool | None,
) -> list[int]:
    """Token ids of a chat prompt. The template writes the special tokens, so none are added unless asked for.

    Raises:
        ApiError: 400, the template refuses the messages.
    """
    plain: list[dict[str, Any]] = []
    for message in messages:
        plain.append(
            {"role": message.role, "content": message.content} | ({"name": message.name} if message.name else {})
        )
    continues = bool(continue_final_message)

    def render_and_encode() -> list[int]:
        text = tokenizer.render_chat(
            plain,
            add_generation_prompt=not continues if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continues,
            template_kwargs=template_kwargs,
        )
        return tokenizer.encode(text, add_special_tokens=bool(add_special_tokens))

    try:
        return await off_loop(sum(len(message.content or "") for message in messages), render_and_encode)
    except ValueError as error:
        raise from_value_error(error, ("messages", "chat_template", "chat_template_kwargs")) from error


async def encode_prompt(tokenizer: Tokenizer, prompt: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text prompt."""
    return await off_loop(len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens))


async def encode_bad_words(tokenizer: Tokenizer, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """Token sequences that the output may not contain.

    Raises:
        ApiError: 400, a word without tokens or too many tokens.
    """
    if not words:
        return ()
    try:
        sequences: tuple[tuple[int, ...], ...] = await off_loop(
            sum(len(word) for word in words), lambda: bad_word_token_ids(tokenizer, words)
        )
    except ValueError as error:
        raise from_value_error(error, ("bad_words",)) from error
    return sequences


def check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises ApiError (400) unless all ids are in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise invalid(param, f"token id {clip(str(token_id), 40)} is not in the vocabulary (0 to {vocab_size - 1})")
