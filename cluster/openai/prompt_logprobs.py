"""Log-probabilities of a prompt's tokens: vLLM's `prompt_logprobs`, and the front of an echoed completion's."""

from collections.abc import Callable, Sequence

import msgspec

from cluster.openai.logprobs import CompletionLogprobs, finite, top_by_text
from engine.detokenizer import Detokenizer
from engine.step import TokenLogprobs
from engine.tokenizer import Tokenizer

PromptEntries = Sequence[TokenLogprobs | None]  # one per prompt token; the first has no prediction


class PromptToken(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate of a prompt position."""

    logprob: float
    rank: int
    decoded_token: str


def prompt_logprobs_body(
    entries: PromptEntries, num_top: int, token_bytes: Callable[[int], bytes]
) -> list[dict[str, PromptToken] | None]:
    """vLLM's form: per position the token itself and the num_top most likely ones, by id; null for the first."""
    return [None if entry is None else _candidates(entry, num_top, token_bytes) for entry in entries]


def _candidates(entry: TokenLogprobs, num_top: int, token_bytes: Callable[[int], bytes]) -> dict[str, PromptToken]:
    ranked = {entry.token_id: (entry.logprob, entry.rank)}
    for rank, (token_id, logprob) in enumerate(
        zip(entry.top_ids[:num_top], entry.top_logprobs[:num_top], strict=True), start=1
    ):
        ranked.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): PromptToken(
            logprob=finite(logprob), rank=rank, decoded_token=token_bytes(token_id).decode(errors="replace")
        )
        for token_id, (logprob, rank) in ranked.items()
    }


class EchoedPrompt:
    """An echoed prompt's tokens beside its text.

    The text is what the client sent, so tokens that tokenising added (a beginning of sequence) have none of it.
    """

    def __init__(self, tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> None:
        detokenizer = Detokenizer(tokenizer, (), skip_special_tokens=False)
        self._token_bytes = tokenizer.token_bytes
        self._token_ids = token_ids
        self._texts: list[str] = []
        self._offsets: list[int] = []
        at = 0
        for index, token_id in enumerate(token_ids):
            piece = detokenizer.feed(token_id)
            if index == len(token_ids) - 1:
                piece += detokenizer.flush()
            if not text.startswith(piece, at):
                piece = ""
            self._texts.append(piece)
            self._offsets.append(at)
            at += len(piece)

    def logprobs(self, entries: PromptEntries, num_top: int) -> CompletionLogprobs:
        """The completions form; the first token has null."""
        assert len(entries) == len(self._token_ids), (len(entries), len(self._token_ids))
        return CompletionLogprobs(
            tokens=self._texts,
            token_logprobs=[None if entry is None else finite(entry.logprob) for entry in entries],
            top_logprobs=[
                None if entry is None else top_by_text(entry, num_top, self._token_bytes) for entry in entries
            ],
            text_offset=self._offsets,
        )
