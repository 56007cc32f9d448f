"""Token ids to text, one id at a time, never half a character. Owns the decoding state of one sequence."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from engine.tokenizer import Tokenizer

# Prompt ids given as context, so that the first token decodes as a continuation (a leading space is kept, for example).
_CONTEXT_LEN = 8
_REPLACEMENT = "\ufffd"
_INVALID_PREFIX = "Invalid prefix encountered"


class Detokenizer:
    """Incremental decoding of one sequence.

    The pieces `feed` returns plus the last one of `flush` make up the decoded output, as a continuation of the prompt.
    If the prompt's ids end inside a character, the character that the output completes belongs to the output.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # ids of complete text, ahead of the pending ones
        self._pending: list[int] = []  # ids whose text is not complete yet
        self._fed = False
        tail = list(prompt_token_ids[-_CONTEXT_LEN:])
        for cut in range(len(tail), max(0, len(tail) - 4), -1):  # a character has at most 4 bytes
            text = self._decode(tail[:cut])
            if text and not text.endswith(_REPLACEMENT):
                self._context, self._pending = tail[:cut], tail[cut:]
                break
        self._stream = self._new_stream(self._context)
        for token_id in self._pending:
            self._stream.step(tokenizer.backend, token_id)

    def feed(self, token_id: int) -> str:
        """Text that this id completes, possibly empty."""
        self._fed = True
        self._pending.append(token_id)
        piece = self._step(token_id)
        if piece:
            self._context, self._pending = self._pending, []
        return piece

    def flush(self) -> str:
        """Text of the ids still pending at the end: a broken character decodes to U+FFFD."""
        if not self._pending or not self._fed:
            return ""
        before, after = self._decode(self._context), self._decode(self._context + self._pending)
        tail = after[len(before) :] if after.startswith(before) else self._decode(self._pending)
        self._context, self._pending = self._pending, []
        return tail

    def _step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer.backend, token_id) or ""
        except Exception as error:  # the library raises no narrower type
            if _INVALID_PREFIX not in str(error):
                raise
        # Decoding context and new ids together no longer begins with the context's text: start afresh at the pending
        # ids.
        self._stream = self._new_stream([])
        return "".join(self._stream.step(self._tokenizer.backend, pending) or "" for pending in self._pending)

    def _new_stream(self, ids: list[int]) -> DecodeStream:
        return DecodeStream(ids=ids, skip_special_tokens=self._skip_special_tokens)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
