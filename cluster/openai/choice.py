"""One choice of a response while it is generated: its engine request, its front-end state, its log-probabilities."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cluster.openai.logprobs import Entry, LogprobTracker, merge_logprobs
from cluster.openai.prompt_logprobs import PromptEntries
from engine.output_processor import RequestState
from engine.outputs import OutputChunk
from engine.request import EngineRequest, TokenDelta

FormatLogprobs = Callable[[Sequence[Entry]], Any]
FormatPrompt = Callable[[PromptEntries], Any]


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
        echo_only: nothing is to be generated (max_tokens 0 with echo). The engine sees the request only to score the
            prompt; the token it draws is dropped.
        tracker, format_logprobs: both None unless the client asked for log-probabilities.
        format_echo: the log-probabilities of an echoed prompt, which go in front of the output's.
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
        format_echo: FormatPrompt | None = None,
    ) -> None:
        self.index = index
        self.request = request
        self.state = state
        self.counts_prompt = counts_prompt
        self.echo_only = echo_only
        self.logprobs: list[Any] = []
        self.finish_reason: str | None = None
        self.first_token_at: float | None = None  # time.monotonic()
        self._text_len = 0  # characters handed out
        self._tracker = tracker
        self._format_logprobs = format_logprobs
        self._format_echo = format_echo

    def in_request_fields(self, refusal: ValueError) -> ValueError:
        """The engine's refusal, naming what the client sent: an echo's logprobs reach the engine as prompt_logprobs."""
        params = self.request.params
        field, _, reason = str(refusal).partition(":")
        if field != "prompt_logprobs" or self._format_echo is None or params.logprobs != params.prompt_logprobs:
            return refusal
        return ValueError(f"logprobs: echo: true reports them of the prompt too;{reason}")

    @property
    def needs_engine(self) -> bool:
        """Whether anything has to be computed."""
        return not self.echo_only or self.request.params.prompt_logprobs is not None

    def take_prompt_logprobs(self, delta: TokenDelta) -> None:
        """Apply a delta that carries log-probabilities of the prompt and no tokens."""
        self.state.update(delta)

    def update(self, delta: TokenDelta) -> tuple[ChoiceUpdate, bool]:
        """Apply one delta; the flag says that the engine still runs the request and has to abort it."""
        chunk = self.state.update(delta)
        self._text_len += len(chunk.text)
        self.finish_reason = chunk.finish_reason
        update = ChoiceUpdate(
            index=self.index,
            text=chunk.text,
            token_ids=chunk.token_ids,
            logprobs=self._release_logprobs(chunk, delta),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
        )
        return update, chunk.abort

    def finish_empty(self) -> ChoiceUpdate:
        """The only update of a choice that generates nothing."""
        self.finish_reason = "length"
        return ChoiceUpdate(
            index=self.index, text="", token_ids=(), logprobs=merge_logprobs(self._echoed()), finish_reason="length"
        )

    def _release_logprobs(self, chunk: OutputChunk, delta: TokenDelta) -> Any:
        if self._tracker is None or self._format_logprobs is None:
            return None
        # A stop id of the engine, not a stop string: its text is not in the output unless asked for.
        ends_with_stop_id = (
            delta.finish_reason == "stop"
            and len(chunk.token_ids) == len(delta.token_ids)
            and not self.request.params.include_stop_str_in_output
        )
        self._tracker.add(chunk.logprobs or (), last_is_control=ends_with_stop_id)
        parts = self._echoed()
        entries = self._tracker.release(self._text_len)
        if chunk.finish_reason is not None:
            entries += self._tracker.release_last(self._text_len)
        if entries:
            formatted = self._format_logprobs(entries)
            self.logprobs.append(formatted)
            parts.append(formatted)
        return merge_logprobs(parts)

    def _echoed(self) -> list[Any]:
        """What goes in front of the first log-probabilities: those of the echoed prompt, once."""
        format_echo, self._format_echo = self._format_echo, None
        if format_echo is None:
            return []
        assert self.state.prompt_logprobs is not None
        self.logprobs.append(format_echo(self.state.prompt_logprobs))
        return [self.logprobs[-1]]
