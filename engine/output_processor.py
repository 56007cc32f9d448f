"""Token deltas of one request to what its client sees: text, stop strings, log-probabilities, counts."""

from collections.abc import Sequence

from engine.detokenizer import Detokenizer
from engine.outputs import CompletionOutput, OutputChunk, SpecStats, Usage
from engine.request import TokenDelta
from engine.sampling_params import SamplingParams
from engine.step import TokenLogprobs
from engine.tokenizer import Tokenizer


class RequestState:
    """Front-end state of one sequence, from its first delta to its last.

    Stop strings. The one whose last character comes first ends the request (of two that end together, the longer),
    wherever it lies: across tokens, steps, or inside an accepted block. Ids after the completing one are dropped with
    their text and log-probabilities. Like stop ids, stop strings do not count while the sequence has no more than
    min_tokens tokens, the completing one included. The text of a stop id is left out unless include_stop_str_in_output;
    the id itself is kept.

    Acceptance statistics. Where a stop string cuts a block to m of its tokens, those m were accepted drafts, and the
    step counts as m at risk and m accepted, exactly as a stop id on the device counts.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        num_spec_tokens: int = 0,
    ) -> None:
        """`tokenizer` may be None if params.detokenize is False. num_spec_tokens: the engine's largest draft length."""
        self.request_id = request_id
        self.params = params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_cached_tokens = 0
        self.num_spec_tokens = num_spec_tokens
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        # Of the prompt's tokens so far; the first has no prediction.
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._sent_chars = 0
        self._histogram = [0] * (num_spec_tokens + 1)
        self._num_drafted = 0
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            assert tokenizer is not None, "detokenize needs a tokenizer"
            self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def update(self, delta: TokenDelta) -> OutputChunk:
        """Take one step's delta; what comes after the end (tokens of a step in flight) gives an empty chunk."""
        assert delta.request_id == self.request_id, (delta.request_id, self.request_id)
        if self.finished:
            return OutputChunk()
        self.num_cached_tokens = delta.num_cached_tokens
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(delta.prompt_logprobs or ())
        first_new = len(self.token_ids)
        stop_string = self._append_tokens(delta)
        num_kept = len(self.token_ids) - first_new
        logprobs = self._append_logprobs(delta, num_kept)
        self._count_step(delta, num_kept)
        if stop_string is not None:
            self.finish_reason, self.stop_reason = "stop", stop_string
        elif delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        return OutputChunk(
            text=self._take_text(),
            token_ids=tuple(self.token_ids[first_new:]),
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            abort=stop_string is not None and delta.finish_reason is None,
            error=delta.error if self.finish_reason == "error" else None,
        )

    def completion_output(self, index: int = 0) -> CompletionOutput:
        """Everything so far."""
        logprobs = None if self.logprobs is None else tuple(self.logprobs)
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def usage(self) -> Usage:
        """Counts so far; tokens end with the one that completed a stop."""
        accepted = self._num_accepted()
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=len(self.token_ids),
            cached_tokens=self.num_cached_tokens,
            accepted_prediction_tokens=accepted,
            rejected_prediction_tokens=self._num_drafted - accepted,
        )

    def spec_stats(self) -> SpecStats | None:
        """Acceptance so far; None if no step verified a draft."""
        steps, accepted = sum(self._histogram), self._num_accepted()
        if steps == 0:
            return None
        return SpecStats(
            mean_acceptance_length=1 + accepted / steps,
            draft_acceptance_rate=accepted / self._num_drafted,
            acceptance_histogram=tuple(self._histogram),
            num_spec_steps=steps,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=self._num_drafted,
            num_spec_tokens=self.num_spec_tokens,
        )

    def _num_accepted(self) -> int:
        return sum(count * steps for count, steps in enumerate(self._histogram))

    def _append_tokens(self, delta: TokenDelta) -> str | None:
        """Append ids and text up to a stop string's completing token; return that string."""
        ends_with_stop_id = delta.finish_reason == "stop" and not self.params.include_stop_str_in_output
        last = len(delta.token_ids) - 1
        for index, token_id in enumerate(delta.token_ids):
            self.token_ids.append(token_id)
            if self._detokenizer is None or (ends_with_stop_id and index == last):
                continue
            stop_string = self._append_text(self._detokenizer.feed(token_id))
            if stop_string is not None:
                return stop_string
        if self._detokenizer is not None and delta.finish_reason is not None:
            return self._append_text(self._detokenizer.flush())
        return None

    def _append_text(self, piece: str) -> str | None:
        """Append a piece; if a stop string ends inside it, cut the text there and return the string."""
        if not piece:
            return None
        before = len(self.text)
        self.text += piece
        if len(self.token_ids) <= self.params.min_tokens:
            return None
        found: tuple[int, int, str] | None = None
        for stop in self.params.stop:
            start = self.text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is None:
            return None
        end, start, stop = found
        self.text = self.text[: end if self.params.include_stop_str_in_output else start]
        return stop

    def _append_logprobs(self, delta: TokenDelta, num_kept: int) -> tuple[TokenLogprobs, ...] | None:
        if self.logprobs is None:
            return None
        entries = (delta.logprobs or ())[:num_kept]
        assert len(entries) == num_kept, (self.request_id, len(entries), num_kept)
        self.logprobs.extend(entries)
        return entries

    def _count_step(self, delta: TokenDelta, num_kept: int) -> None:
        drafted, accepted = delta.num_drafted, delta.num_accepted
        if num_kept < len(delta.token_ids):
            drafted = accepted = min(num_kept, accepted)
        if not delta.is_decode_step or drafted == 0:
            return
        assert accepted <= drafted <= self.num_spec_tokens, (accepted, drafted, self.num_spec_tokens)
        self._num_drafted += drafted
        self._histogram[accepted] += 1

    def _take_text(self) -> str:
        """Text not sent yet, short of the longest tail that may still become a stop string."""
        end = len(self.text)
        if not self.finished and not self.params.include_stop_str_in_output:
            end -= self._held_back()
        new = self.text[self._sent_chars : end]
        self._sent_chars = max(self._sent_chars, end)
        return new

    def _held_back(self) -> int:
        # A tail that begins in text already sent was no stop's prefix then, so it is none now.
        num_unsent = len(self.text) - self._sent_chars
        longest = 0
        for stop in self.params.stop:
            for length in range(min(len(stop) - 1, num_unsent), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
