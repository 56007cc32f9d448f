"""One choice of a response while it is generated: its engine request, its text so far, its counts."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cluster.openai.logprobs import Entry, LogprobTracker
from engine.output_processor import RequestState
from engine.request import EngineRequest, TokenDelta

FormatLogprobs = Callable[[Sequence[Entry]], Any]


class ChoiceUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step added to a choice. logprobs: in the response's form, None if nothing is to be said."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Choice:
    """Turns the engine's deltas of one request into updates for the client, and keeps what a whole response needs.

    Args:
        index: position in the response.
        counts_prompt: whether this choice's prompt counts in the usage (the first choice of each prompt).
        echo_only: nothing is to be generated (max_tokens 0 with echo); the engine never sees the request.
        tracker, format_logprobs: both None unless the client asked for log-probabilities.
    """

    def __init__(
        self,
        *,
        index: int,
        request: EngineRequest,
        state: RequestState,
        counts_prompt: bool,
        echo_only: bool = False,
        tracker: LogprobTracker | None = None,
        format_logprobs: FormatLogprobs | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.state = state
        self.counts_prompt = counts_prompt
        self.echo_only = echo_only
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.first_token_at: float | None = None  # time.monotonic()
        self.num_cached_tokens = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self._texts: list[str] = []
        self._text_len = 0
        self._tracker = tracker
        self._format_logprobs = format_logprobs

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def update(self, delta: TokenDelta) -> tuple[ChoiceUpdate, bool]:
        """Apply one delta; the flag says that the engine still runs the request and has to abort it."""
        chunk = self.state.update(delta)
        self._texts.append(chunk.text)
        self._text_len += len(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.num_cached_tokens = delta.num_cached_tokens
        self.num_drafted += delta.num_drafted
        self.num_accepted += delta.num_accepted
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_reason
        update = ChoiceUpdate(
            index=self.index,
            text=chunk.text,
            token_ids=tuple(chunk.token_ids),
            logprobs=self._release_logprobs(chunk.logprobs, chunk.finish_reason is not None),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
        )
        return update, chunk.abort

    def finish_empty(self) -> ChoiceUpdate:
        """The only update of a choice that generates nothing."""
        self.finish_reason = "length"
        return ChoiceUpdate(index=self.index, text="", token_ids=(), finish_reason="length")

    def _release_logprobs(self, logprobs: Sequence[Any] | None, is_last: bool) -> Any:
        if self._tracker is None or self._format_logprobs is None:
            return None
        self._tracker.add(logprobs or ())
        entries = self._tracker.release(self._text_len)
        if is_last:
            entries += self._tracker.release_last(self._text_len)
        if not entries:
            return None
        formatted = self._format_logprobs(entries)
        self.logprobs.append(formatted)
        return formatted

    def speculation_stats(self) -> Any | None:
        """vLLM's `speculative_decoding` object of this choice, None for a request that was never drafted for."""
        return self.state.speculation_stats()
