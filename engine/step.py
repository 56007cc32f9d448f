"""What crosses the line between the host (scheduler) and the device (runner) in one engine step.

The scheduler writes a `StepPlan`; every rank executes the same plan; rank 0's `StepResult` comes back. Both are plain
messages (msgspec), so a plan travels to the other ranks as bytes. Nothing here knows torch, Ray or HTTP.

Lengths, for one request (positions are absolute, 0-based):

    0 ........ committed_len-1 | committed_len | committed_len+1 .. committed_len+k | .. committed_len+W-1
    target and draft K/V exist | last_token    | drafts, verified by the next T     | drafter's block (lookahead)

`committed_len` counts tokens whose target K/V exist. `last_token` (the bonus token) sits at position committed_len and
is the first input of the next verify. A request therefore has committed_len + 1 tokens.
"""

import enum

import msgspec


class Finish(enum.IntEnum):
    """Why the device ended a request in this step."""

    NONE = 0
    STOP = 1  # an end-of-sequence or stop token id; it is the last emitted token
    LENGTH = 2  # the request's own max_len
    ERROR = 3  # the target's logits are not finite where the next token would come from


class LogitsRules(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a request changes about the target's logits before its tokens are drawn (`engine.sampling.processors`).

    logit_bias: (id, value) pairs, ids distinct. allowed_ids: empty: every id.
    bad_words: token sequences that the output may not contain.
    prompt_ids: distinct ids of the prompt, filled where a repetition penalty needs them.
    output_ids: tokens emitted before the request took this slot (it resumes after a preemption), filled where penalties
        or bad words look at them.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()

    @property
    def has_penalty(self) -> bool:
        """Any of the three penalties."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class SlotInit(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """State uploaded when a request takes a slot (first admission, or resume after preemption).

    prompt_len:  tokens of the user's prompt; output begins at this position (also after a resume).
    max_len:     total tokens (prompt + output) at which the request ends with LENGTH; <= max_model_len.
    min_len:     stop ids are masked out of the sampling while the request has fewer than this many tokens in total.
    stop_token_ids: every id that ends the request (end-of-sequence ids included unless ignored).
    num_logprobs: -1 none; n >= 0: the emitted token's log-probability and the n most likely alternatives.
    num_prompt_logprobs: the same for the tokens of the prompt.
    rules: None where the target's logits are used as they are.
    """

    slot: int
    generation: int
    prompt_len: int
    max_len: int
    min_len: int
    temperature: float
    top_k: int  # 0: off
    top_p: float  # 1.0: off
    min_p: float  # 0.0: off
    seed: int
    stop_token_ids: tuple[int, ...]
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    rules: LogitsRules | None = None


class PrefillChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`token_ids` at positions start .. start+len-1 of a slot. samples: it ends the prompt, so a token is drawn.

    scored_next: the prompt tokens at positions scored_from + 1 on, whose log-probabilities are asked for; the rows that
        predict them lie in this chunk.
    """

    slot: int
    start: int
    token_ids: tuple[int, ...]
    samples: bool
    scored_from: int = 0
    scored_next: tuple[int, ...] = ()


class BlockTableUpdate(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Block ids written to a slot's block table from entry `first_index` on."""

    slot: int
    first_index: int
    block_ids: tuple[int, ...]


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One step: T over the decode slots (verify_len drafts each) and the prefill chunks, then D.

    verify_len: K of T. A row's own drafts are min(verify_len, its draft_count, max_len - 2 - committed_len).
    draft_len:  K of D: drafts made for the next step; 0 skips the drafting but never the drafter's context.
    report_drafts: the rows' results carry the drafts that this D makes.
    zero_blocks: their K/V, and the null block's, are zeroed: a former owner wrote values that are not finite.
    Order of application: zero_blocks, new_slots, block_updates, T, D.
    """

    step_id: int
    verify_len: int
    draft_len: int
    decode_slots: tuple[int, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    new_slots: tuple[SlotInit, ...] = ()
    block_updates: tuple[BlockTableUpdate, ...] = ()
    zero_blocks: tuple[int, ...] = ()
    report_drafts: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Raw-model log-probabilities (before temperature and filters) of one emitted token.

    rank: 1-based rank of the token. top_ids/top_logprobs: the num_logprobs most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RowResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one sampling row did. token_ids is empty for a row that was already finished on the device, and may be for
    one that ends with ERROR.

    num_drafted:  k, the row's own drafts in this verify (0 for a prefill row).
    num_accepted: drafts that matched, before any cut by a stop or by the length limit (<= num_drafted).
    len(token_ids) <= num_accepted + 1; smaller only when the block was cut.
    drafts:       what D drafted behind the last token, if the plan says report_drafts and the row goes on.
    """

    slot: int
    generation: int
    token_ids: tuple[int, ...]
    num_drafted: int = 0
    num_accepted: int = 0
    finish: Finish = Finish.NONE
    logprobs: tuple[TokenLogprobs, ...] | None = None
    drafts: tuple[int, ...] = ()


class PromptScores(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities of a chunk's `scored_next`."""

    slot: int
    generation: int
    logprobs: tuple[TokenLogprobs, ...]


class StepResult(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Rows in plan order: every decode slot, then every prefill chunk that samples.

    duration_s: device time of the step, up to its results where a prompt's context and drafts follow them.
    prompt_scores: one for each chunk that names tokens to score, in plan order.
    """

    step_id: int
    rows: tuple[RowResult, ...]
    duration_s: float
    prompt_scores: tuple[PromptScores, ...] = ()
