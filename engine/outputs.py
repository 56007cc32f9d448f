"""What a caller gets back: chunks while a request runs, and its whole result. Messages only."""

from dataclasses import dataclass, field

from engine.step import TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecStats:
    """Acceptance of one request, the object vLLM calls `metrics.speculative_decoding`.

    num_spec_steps: decode steps that verified at least one draft.
    num_draft_tokens / num_accepted_draft_tokens: drafts at risk in those steps, and those accepted. A block that a stop
        or a limit cuts short is at risk up to the cut.
    acceptance_histogram: entry i counts the steps that accepted i drafts; num_spec_tokens + 1 entries. Their sum is
        num_spec_steps and their weighted sum num_accepted_draft_tokens.
    mean_acceptance_length: tokens per such step, 1 + accepted / steps. draft_acceptance_rate: accepted / drafted.
    num_spec_tokens: the most drafts a step may verify.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Token counts of one sequence. completion_tokens ends with the token that completed a stop."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputChunk:
    """What one engine step means for the client.

    text: new text, never half a character nor the beginning of what may become a stop string.
    token_ids: new ids, without those a stop string cut off; they may be ahead of the text.
    logprobs: one entry per id, or None where not asked for.
    finish_reason: None, "stop", "length", "abort" or "error"; stop_reason: the stop string or id, None at end of
    sequence.
    abort: the text ended the request but the engine does not know: tell it to abort.
    error: message for the client when finish_reason is "error".
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    abort: bool = False
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One sequence of a request. cumulative_logprob: the sum over token_ids, None without logprobs."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestMetrics:
    """Figures of one request.

    time_to_first_token_s: from the submission of the whole call to the first token of any of its sequences, waiting in
        the queue included; None without a token. duration_s: to the end of the last one.
    speculative_decoding: of its only sequence (None when n > 1 or nothing was drafted).
    """

    num_cached_tokens: int = 0
    time_to_first_token_s: float | None = None
    duration_s: float | None = None
    speculative_decoding: SpecStats | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """The result of one prompt. prompt is None when token ids were given.

    prompt_logprobs: one entry per prompt token, the first of them None; None where not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
