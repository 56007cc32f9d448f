"""D: decide what the target's logits commit, feed the drafter's context, draft the next block.

One order, always: sample, verify, commit, context, draft. Only the last is skipped at draft length 0; the context is
made of every step, so that drafting can start again at any time with nothing missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.attention.kv_cache_tensors import KvCache
from engine.config.engine import EngineConfig
from engine.kernels.row_state import Commit, TargetRows
from engine.layers.upload import upload
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.runner.batch import DecodeBlock, ForwardInputs, InputBuilder
from engine.runner.draft_tokens import DraftTokens
from engine.runner.fused_rows import FusedRows
from engine.runner.pending_context import PendingContext
from engine.runner.piece_rows import drawn_columns, rows_to_verify
from engine.runner.slots import SlotState
from engine.runner.target_program import TargetStep
from engine.sampling.chain import chain_tokens
from engine.sampling.filters import FilterFlags
from engine.sampling.rejection import Proposals, verified_tokens
from engine.sampling.sampler import SamplingRows, greedy_pairs, joined_pairs, peak_logits, sample
from engine.sampling.synthetic import synthetic_accepted
from engine.sampling.verify import verify
from engine.step import PrefillChunk, SlotInit, StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingNeeds:
    """Which code a batch's sampling runs; known on the host. mask_stops: some row may not stop yet."""

    filters: FilterFlags
    mask_stops: bool

    @classmethod
    def of(cls, inits: Sequence[SlotInit]) -> "SamplingNeeds":
        filters = FilterFlags.of(
            [i.temperature for i in inits],
            [i.top_k for i in inits],
            [i.top_p for i in inits],
            [i.min_p for i in inits],
        )
        return cls(filters=filters, mask_stops=any([i.min_len > i.prompt_len for i in inits]))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a step decided, rows in plan order: R decode rows, then F prompts that ended.

    tokens_SE: the target's tokens, [R+F, K+1]; the first num_emitted of each row count.
    num_fed_S: columns of each decode row that the drafter's context takes; None: those emitted.
    fused: of decode rows that were decided by `engine.runner.fused_rows`, what the rest of D goes on with.
    """

    slots_S: torch.Tensor
    tokens_SE: torch.Tensor
    num_emitted_S: torch.Tensor
    num_accepted_S: torch.Tensor
    num_drafted_S: torch.Tensor
    finish_S: torch.Tensor
    num_fed_S: torch.Tensor | None = None
    fused: Commit | None = None


class DecideAndDraft:
    """The second program of a step. All ranks run it on equal inputs and decide alike."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        target: TargetModel,
        drafter: DFlashDrafter | None,
        kv: KvCache,
        state: SlotState,
        builder: InputBuilder,
        tp: TpGroup,
        fused: FusedRows | None = None,
    ) -> None:
        self._config = config
        self._fused = fused
        self._target = target
        self._drafter = drafter
        self._kv = kv
        self._state = state
        self._builder = builder
        self._tp = tp
        self._draft_tokens = DraftTokens(config, state, tp)
        self._pending: PendingContext | None = None
        if drafter is not None and fused is not None and config.device == "cpu" and tp.size == 1:
            self._pending = PendingContext(drafter, kv, config.block_size)

    @property
    def has_drafter(self) -> bool:
        """Whether contexts are written and drafts made."""
        return self._drafter is not None

    def decide(
        self,
        step: TargetStep,
        decode: DecodeBlock | None,
        prefill: tuple[PrefillChunk, ...],
        verify_len: int,
        needs: SamplingNeeds,
    ) -> Decision | None:
        """Sample, verify and commit. None when no row of the step samples (prompt chunks in the middle only)."""
        if step.logits_MV is None and step.headless_MH is None:
            return None
        state = self._state
        device = step.inputs.ids_N.device
        width = verify_len + 1
        ends = [c for c in prefill if c.samples]
        rows = _rows_to_decide(decode, ends, verify_len, device)
        num_decode = rows.slots_R.shape[0] - len(ends)
        if step.headless_MH is not None and needs.filters.all_greedy and not needs.mask_stops:
            peak_M, drawn_M = joined_pairs(*self._target.peaks(step.headless_MH), self._tp)
        else:
            logits_MV = step.logits_MV
            if step.headless_MH is not None:
                logits_MV = self._target.logits(step.headless_MH)
            assert logits_MV is not None
            drawn_M, peak_M = self._sample(logits_MV, rows, num_decode, width, needs)
        if self._fused is not None and rows.fused is not None:
            return self._decide_fused(self._fused, rows, rows.fused, drawn_M, peak_M, verify_len)
        valid_M = peak_M < torch.inf  # also False for NaN; -inf is what padded ids hold
        tokens_SE = _rows_of(drawn_M.masked_fill(~valid_M, 0), num_decode, width, len(ends))
        valid_SE = _rows_of(valid_M, num_decode, width, len(ends))
        if rows.size_R is not None:
            rows, tokens_SE, valid_SE = rows_to_verify(rows, tokens_SE, valid_SE, state.filler_slot)
        slots_S, committed_S = rows.slots_R, rows.committed_R
        verdict = verify(
            target_RK1=tokens_SE,
            draft_RK=rows.drafts_RK,
            k_R=rows.k_R,
            committed_R=committed_S,
            max_len_R=state.max_len[slots_S],
            min_len_R=state.min_len[slots_S],
            stop_ids_RS=state.stop_ids[slots_S],
            finished_R=rows.finished_R,
            valid_RK1=valid_SE,
            synthetic_R=self._synthetic(slots_S, committed_S) if verify_len else None,
        )
        emits_S = verdict.num_emitted_R > 0
        state.committed_len[slots_S] = committed_S + verdict.num_emitted_R
        state.last_token[slots_S] = torch.where(emits_S, verdict.last_token_R, state.last_token[slots_S])
        state.finished[slots_S] = rows.finished_R | (verdict.finish_R != 0)
        num_fed_S = None
        if rows.size_R is not None:
            num_fed_S = torch.where(rows.size_R == 0, verdict.num_emitted_R, rows.size_R.abs())
        return Decision(
            slots_S=slots_S,
            tokens_SE=tokens_SE,
            num_emitted_S=verdict.num_emitted_R,
            num_accepted_S=verdict.num_accepted_R,
            num_drafted_S=rows.k_R,
            finish_S=verdict.finish_R,
            num_fed_S=num_fed_S,
        )

    def _decide_fused(
        self,
        fused: FusedRows,
        decode: DecodeBlock,
        rows: TargetRows,
        drawn_M: torch.Tensor,
        peak_M: torch.Tensor,
        verify_len: int,
    ) -> Decision:
        length = self._config.synthetic_acceptance_length
        made = fused.commit(decode.slots_R, rows, drawn_M, peak_M, verify_len, length, decode.size_R, decode.results)
        return Decision(
            slots_S=decode.slots_R,
            tokens_SE=made.tokens_RQ,
            num_emitted_S=made.emitted_R,
            num_accepted_S=made.accepted_R,
            num_drafted_S=decode.k_R,
            finish_S=made.finish_R,
            fused=made,
        )

    def _synthetic(self, slots_S: torch.Tensor, committed_S: torch.Tensor) -> torch.Tensor | None:
        length = self._config.synthetic_acceptance_length
        return None if length is None else synthetic_accepted(length, self._state.seed[slots_S], committed_S)

    def prepare_context(self, plan: StepPlan) -> None:
        """To be called before anything of an eager step: see `PendingContext.prepare`."""
        if self._pending is not None:
            self._pending.prepare(plan)

    def write_context(
        self,
        step: TargetStep,
        decision: Decision | None,
        num_decode: int,
        verify_len: int,
        *,
        may_wait: bool = False,
    ) -> None:
        """Drafter K/V for every token this step committed: accepted decode rows and all prompt rows.

        may_wait: nothing is drafted now, so `PendingContext` may take the rows.
        """
        if self._drafter is None:
            return
        assert step.taps_NTH is not None, "the target kept no taps"
        if decision is not None and decision.fused is not None:
            made = decision.fused
            rows = step.taps_NTH, made.context_positions_N, made.context_slots_N
            if may_wait and self._pending is not None:
                self._pending.add(*rows)
            else:
                self._drafter.feed_context(*rows, self._kv)
            return
        slot_mapping_N = step.inputs.context.slot_mapping_N
        if num_decode:
            assert decision is not None
            columns_Q = torch.arange(verify_len + 1, device=slot_mapping_N.device)
            num_fed_S = decision.num_emitted_S if decision.num_fed_S is None else decision.num_fed_S
            kept = (columns_Q < num_fed_S[:num_decode, None]).flatten()
            slot_mapping_N = slot_mapping_N.clone()
            # Rejected rows go to the null block: their positions are written again, by the tokens that replace them.
            slot_mapping_N[: kept.shape[0]] = slot_mapping_N[: kept.shape[0]].masked_fill(~kept, 0)
        positions_N = step.inputs.positions_N
        # A position past the drafter's table has no rotary row; such rows never draft, so nobody reads their context.
        limit = self._drafter.config.max_position_embeddings
        slot_mapping_N = slot_mapping_N.masked_fill(positions_N >= limit, 0)
        self._drafter.feed_context(step.taps_NTH, positions_N.clamp(max=limit - 1), slot_mapping_N, self._kv)

    def draft_after(self, decision: Decision, draft_len: int, filters: FilterFlags) -> None:
        """`draft` for the rows of a decision, from what it left where it was fused. filters: as decided with."""
        if self._fused is None or decision.fused is None or self._drafter is None or draft_len == 0:
            self.draft(decision.slots_S, draft_len, filters)
            return
        inputs = self._fused.draft_inputs(decision.slots_S, decision.fused)
        drafts_SK = self._drafts(inputs, decision.slots_S, draft_len, filters)
        self._fused.store_drafts(decision.slots_S, drafts_SK, decision.fused)

    def draft(self, slots_S: torch.Tensor, draft_len: int, filters: FilterFlags) -> None:
        """One parallel pass of the drafter; the head runs on the first draft_len mask rows. filters: the decision's."""
        state = self._state
        if self._drafter is None or draft_len == 0:
            state.draft_count.index_fill_(0, slots_S, 0)
            return
        config, width = self._drafter.config, self._config.block_width
        live_S = ~state.finished[slots_S] & (state.committed_len[slots_S] + width <= config.max_position_embeddings)
        inputs = self._builder.draft_inputs(
            slots_S, state.last_token[slots_S], live_S, width, config.mask_token_id, config.max_position_embeddings
        )
        state.draft_tokens[slots_S, :draft_len] = self._drafts(inputs, slots_S, draft_len, filters)
        state.draft_count[slots_S] = torch.where(live_S, draft_len, 0)

    def _drafts(
        self, inputs: ForwardInputs, slots_S: torch.Tensor, draft_len: int, filters: FilterFlags
    ) -> torch.Tensor:
        """[rows, draft_len] of the block rows."""
        drafter, target = self._drafter, self._target
        assert drafter is not None
        width = self._config.block_width
        block = drafter.enter(target.embedding, inputs.ids_N, inputs.positions_N)
        masks_MH = drafter.draft_hidden(block, inputs.context, self._kv, block_width=width, num_drafts=draft_len)
        if drafter.head is not None:
            return self._draft_tokens.choose_by_head(drafter.head, masks_MH, slots_S, draft_len, filters)
        if self._draft_tokens.are_greedy(filters) and target.finds_draft_peaks(masks_MH.shape[0]):
            return joined_pairs(*target.peaks(masks_MH), self._tp)[1].view(-1, draft_len)
        logits_MV = target.draft_logits(masks_MH)
        return self._draft_tokens.choose(logits_MV, slots_S, draft_len, filters, target.vocab_start)

    def _sample(
        self, logits_MV: torch.Tensor, decided: DecodeBlock, num_decode: int, width: int, needs: SamplingNeeds
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token of the target's own per logit row, and the row's largest logit (NaN if it holds one).

        With exact match a row's token depends on its request and position alone; with rejection sampling also on the
        draft it verifies.
        """
        flags, mask_stops, start = needs.filters, needs.mask_stops, self._target.vocab_start
        if flags.all_greedy and not mask_stops:
            peak_M, drawn_M = greedy_pairs(logits_MV, self._tp, start)
            return drawn_M, peak_M
        columns_Q = torch.arange(width, device=logits_MV.device)
        slots_S, committed_S = decided.slots_R, decided.committed_R
        drawn_at_M = torch.cat(
            [(committed_S[:num_decode, None] + 1 + columns_Q).flatten(), committed_S[num_decode:] + 1]
        )
        slots_M = torch.cat([slots_S[:num_decode, None].expand(-1, width).flatten(), slots_S[num_decode:]])
        rows = self._state.sampling_rows(slots_M, drawn_at_M, flags, mask_stops=mask_stops)
        if decided.size_R is not None:
            # Nobody asks for the tokens of a prompt: the largest logit costs least.
            counts_M = drawn_columns(decided.size_R, width).flatten()
            rows = replace(rows, temperature_N=rows.temperature_N.masked_fill(~counts_M, 0.0))
        if not self._config.use_rejection_sampling or flags.all_greedy or num_decode == 0 or width == 1:
            drawn_M = sample(logits_MV, rows, self._tp, start)
        else:
            drawn_M = self._verified(logits_MV, rows, decided, num_decode)
        return drawn_M, peak_logits(logits_MV, self._tp)

    def _verified(
        self, logits_MV: torch.Tensor, rows: SamplingRows, decided: DecodeBlock, num_decode: int
    ) -> torch.Tensor:
        """Rejection sampling: accepted drafts, and draws where there is none or it is rejected."""
        start, proposals = self._target.vocab_start, self._proposals(decided, num_decode, logits_MV.shape[0])
        if proposals.logits_NV is None or logits_MV.device.type != "cuda":
            return verified_tokens(logits_MV, rows, proposals, self._tp, start)
        width = decided.drafts_RK.shape[1] + 1
        return chain_tokens(
            logits_MV, rows, proposals, width=width, num_chains=num_decode, tp=self._tp, vocab_start=start
        )

    def _proposals(self, decided: DecodeBlock, num_decode: int, num_rows: int) -> Proposals:
        """The drafts beside the step's logit rows; neither a block's last row nor a prompt's verifies one."""
        R, K = num_decode, decided.drafts_RK.shape[1]
        column_K = torch.arange(K, device=decided.drafts_RK.device)
        token_N = decided.drafts_RK.new_full((num_rows,), -1)
        drafts_RK = decided.drafts_RK[:R].masked_fill(column_K >= decided.k_R[:R, None], -1)
        token_N[: R * (K + 1)].view(R, K + 1)[:, :K] = drafts_RK
        if self._state.draft_logits is None:
            return Proposals(token_N=token_N)
        draft_RKV = self._state.draft_logits[decided.slots_R[:R], :K]
        logits_NV = draft_RKV.new_zeros(num_rows, draft_RKV.shape[2])
        logits_NV[: R * (K + 1)].view(R, K + 1, -1)[:, :K] = draft_RKV
        return Proposals(token_N=token_N, logits_NV=logits_NV)


def _rows_to_decide(
    decode: DecodeBlock | None, ends: list[PrefillChunk], verify_len: int, device: torch.device
) -> DecodeBlock:
    """The decode rows, then the prompts that ended, as rows without drafts.

    A prompt of n tokens has no bonus token yet: with n-1 committed the same arithmetic emits position n.
    """
    if not ends:
        assert decode is not None
        return decode
    num_ends = len(ends)
    slots_F = upload([c.slot for c in ends], device)
    prompts = DecodeBlock(
        slots_R=slots_F,
        drafts_RK=slots_F.new_full((num_ends, verify_len), -1),
        k_R=torch.zeros_like(slots_F),
        committed_R=upload([c.start + len(c.token_ids) - 1 for c in ends], device),
        finished_R=torch.zeros_like(slots_F, dtype=torch.bool),
    )
    if decode is None:
        return prompts
    return DecodeBlock(
        slots_R=torch.cat([decode.slots_R, prompts.slots_R]),
        drafts_RK=torch.cat([decode.drafts_RK, prompts.drafts_RK]),
        k_R=torch.cat([decode.k_R, prompts.k_R]),
        committed_R=torch.cat([decode.committed_R, prompts.committed_R]),
        finished_R=torch.cat([decode.finished_R, prompts.finished_R]),
    )


def _rows_of(drawn_M: torch.Tensor, num_decode: int, width: int, num_ends: int) -> torch.Tensor:
    """[R*(K+1) + F] drawn tokens as [R+F, K+1]; a prompt's single token fills its row's first column."""
    decode_RE = drawn_M[: num_decode * width].view(num_decode, width)
    if num_ends == 0:
        return decode_RE
    ends_FE = drawn_M[num_decode * width :, None].expand(num_ends, width)
    return torch.cat([decode_RE, ends_FE])
