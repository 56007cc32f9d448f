"""From bad words to the token sequences that an output may not contain."""

from collections.abc import Iterable

from engine.sampling_params import MAX_BAD_WORDS
from engine.tokenizer import Tokenizer

MAX_BAD_WORD_TOKENS = 1024  # of all words together: every step compares the end of the output with each of them


def bad_word_token_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The words as they are written at the start of a text and after a space.

    vLLM bans the second form only if it has as many tokens as the first; here both are always banned. A word that is
    tokenised differently inside other text is not recognised there.

    Raises:
        ValueError: starts with bad_words; a word without tokens, or too many tokens in all.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        text = word.lstrip()
        plain = tuple(tokenizer.encode(text, add_special_tokens=False))
        if not plain:
            raise ValueError(f"bad_words: {word!r} has no tokens; remove it")
        spaced = tuple(tokenizer.encode(" " + text, add_special_tokens=False))
        sequences.append(plain)
        if spaced[-len(plain) :] != plain:  # else every output that ends with it ends with the first form as well
            sequences.append(spaced)
    unique = tuple(dict.fromkeys(sequences))
    assert len(unique) <= 2 * MAX_BAD_WORDS, "SamplingParams bounds the words"
    num_tokens = sum(len(sequence) for sequence in unique)
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise ValueError(f"bad_words: {num_tokens} tokens in all; at most {MAX_BAD_WORD_TOKENS} are allowed")
    return unique
