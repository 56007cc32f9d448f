"""Log-probabilities in OpenAI's two forms, aligned with the text the client gets.

The law: the tokens of a choice, concatenated, are its text. A token that only begins a multi-byte character has the
text "" and its own bytes; the token that completes the character has the character. Tokens of a stop string that was
cut off the text are left out (a straddling one is trimmed), and so is an end-of-sequence token in chat; completions,
which have no such law at OpenAI, keep it with an empty text.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.detokenizer import Detokenizer
from engine.step import TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative of a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One emitted token of a chat choice."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """`logprobs` of a chat choice or delta."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """`logprobs` of a completion choice; the lists run in parallel. None: the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Entry(msgspec.Struct, kw_only=True):
    """One emitted token and where its text lies in the choice's text."""

    start: int
    text: str
    raw: bytes
    is_control: bool  # no text of its own: a special token that is skipped
    logprobs: TokenLogprobs


class LogprobTracker:
    """Collects the entries of one choice and hands them out once their text has been handed out.

    Args:
        detokenizer: fresh, for the same sequence as the choice's text; the pieces it returns are the entries' texts.
        token_bytes: the bytes a token id stands for.
        skipped_ids: ids that have no text in the output (special tokens, when they are skipped).
        keep_control: hand out a token without text of its own at the end (the end-of-sequence token).
    """

    def __init__(
        self,
        *,
        detokenizer: Detokenizer,
        token_bytes: Callable[[int], bytes],
        skipped_ids: frozenset[int],
        keep_control: bool,
    ) -> None:
        self._detokenizer = detokenizer
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._keep_control = keep_control
        self._end = 0  # characters in all entries so far
        self._released_len = 0  # characters in the entries handed out
        self._pending: list[Entry] = []

    def add(self, logprobs: Sequence[TokenLogprobs], *, last_is_control: bool) -> None:
        """Take the tokens of one step; last_is_control: the last one is a stop id whose text is left out."""
        for position, token in enumerate(logprobs, start=1):
            is_control = token.token_id in self._skipped_ids or (last_is_control and position == len(logprobs))
            text = "" if is_control else self._detokenizer.feed(token.token_id)
            raw = b"" if is_control else self._token_bytes(token.token_id)
            self._pending.append(Entry(start=self._end, text=text, raw=raw, is_control=is_control, logprobs=token))
            self._end += len(text)

    def release(self, text_len: int) -> list[Entry]:
        """Entries that lie within the first `text_len` characters, in order; the rest stays pending."""
        count = 0
        for index, entry in enumerate(self._pending):
            if entry.start + len(entry.text) > text_len:
                break
            # Bytes of an unfinished character leave with the token that finishes it.
            if entry.text:
                count = index + 1
        released, self._pending = self._pending[:count], self._pending[count:]
        self._released_len += sum(len(entry.text) for entry in released)
        return released

    def release_last(self, text_len: int) -> list[Entry]:
        """What remains when the text has ended at `text_len` characters; tokens past it are left out or trimmed."""
        rest: list[Entry] = []
        unfinished: list[Entry] = []  # bytes of a character that no token has completed yet
        control: list[Entry] = []
        is_cut = False
        for entry in self._pending:
            end = entry.start + len(entry.text)
            if entry.is_control:
                control.append(entry)
            elif not entry.text:
                unfinished.append(entry)
            elif end <= text_len:
                rest += [*unfinished, entry]
                unfinished = []
            else:
                if entry.start < text_len:
                    rest += [*unfinished, _trimmed(entry, text_len, b"".join(part.raw for part in unfinished))]
                is_cut = True
                break
        if unfinished and not is_cut:
            # The text ends inside a character, which the detokenizer shows as U+FFFD or leaves out.
            missing = text_len - self._released_len - sum(len(entry.text) for entry in rest)
            unfinished[-1].text = self._detokenizer.flush()[: max(missing, 0)]
            rest += unfinished
        if self._keep_control and not is_cut:
            rest += control
        self._pending = []
        return rest


def _trimmed(entry: Entry, text_len: int, unfinished: bytes) -> Entry:
    """The part of an entry inside the text; `unfinished` bytes of its first character came with earlier tokens."""
    text = entry.text[: text_len - entry.start]
    return msgspec.structs.replace(entry, text=text, raw=text.encode().removeprefix(unfinished))


def chat_logprobs(entries: Sequence[Entry], num_top: int, token_bytes: Callable[[int], bytes]) -> ChatLogprobs:
    """The chat form; num_top alternatives per token."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=entry.text,
                logprob=finite(entry.logprobs.logprob),
                bytes=list(entry.raw),
                top_logprobs=[
                    TopLogprob(token=raw.decode(errors="replace"), logprob=logprob, bytes=list(raw))
                    for raw, logprob in _alternatives(entry.logprobs, num_top, token_bytes)
                ],
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    entries: Sequence[Entry], num_top: int, token_bytes: Callable[[int], bytes], *, offset: int
) -> CompletionLogprobs:
    """The completions form; offset: characters of the prompt in front of the text (with echo)."""
    return CompletionLogprobs(
        tokens=[entry.text for entry in entries],
        token_logprobs=[finite(entry.logprobs.logprob) for entry in entries],
        top_logprobs=[top_by_text(entry.logprobs, num_top, token_bytes) for entry in entries],
        text_offset=[offset + entry.start for entry in entries],
    )


def top_by_text(entry: TokenLogprobs, num_top: int, token_bytes: Callable[[int], bytes]) -> dict[str, float]:
    """The alternatives of a token by their text, itself included: there may be num_top + 1 of them."""
    top: dict[str, float] = {}
    for raw, logprob in _alternatives(entry, num_top, token_bytes):
        top.setdefault(raw.decode(errors="replace"), logprob)
    top.setdefault(token_bytes(entry.token_id).decode(errors="replace"), finite(entry.logprob))
    return top


def merge_logprobs(parts: Sequence[Any]) -> Any:
    """One object from the objects of the steps of a choice; None if there were none."""
    if not parts:
        return None
    first = parts[0]
    if isinstance(first, ChatLogprobs):
        return ChatLogprobs(content=[token for part in parts for token in part.content])
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def _alternatives(entry: TokenLogprobs, num_top: int, token_bytes: Callable[[int], bytes]) -> list[tuple[bytes, float]]:
    pairs = zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True)
    return [(token_bytes(token_id), finite(logprob)) for token_id, logprob in pairs]


def finite(logprob: float) -> float:
    """The log-probability as JSON can say it."""
    return max(logprob, MIN_LOGPROB)
