"""Which tokens the drafter proposes, given its logits.

greedy:        its most likely token.
coupled:       the token that the request's own sampling, with the target's noise of that position, would draw from the
               drafter's logits. Where the two models agree the two draws do, so exact match accepts more of them.
probabilistic: a draw of its own stream; the kept logits stay in the slot state, because rejection sampling weighs the
               draw by its probability.

A greedy request's drafts are greedy in each. Shape letters: S rows, K drafts, M = S * K, V local vocabulary shard.
"""

import torch

from engine.config.engine import EngineConfig
from engine.models.draft_head import DraftHead
from engine.parallel.tp_group import TpGroup
from engine.runner.slots import SlotState
from engine.sampling.filters import FilterFlags
from engine.sampling.noise import STREAM_DRAFT, gumbel_noise
from engine.sampling.sampler import argmax_pair, greedy_tokens, kept_logits, sample


class DraftTokens:
    """Chooses drafts alike on every rank. state.draft_logits is written where `draft_sampling` is probabilistic."""

    def __init__(self, config: EngineConfig, state: SlotState, tp: TpGroup) -> None:
        self._mode = config.draft_sampling
        self._padded_vocab_size = config.padded_vocab_size
        self._state = state
        self._tp = tp

    def are_greedy(self, flags: FilterFlags) -> bool:
        """Whether the rows' drafts are the drafter's likeliest tokens. flags: of their requests."""
        return self._mode == "greedy" or flags.all_greedy

    def choose(
        self, logits_MV: torch.Tensor, slots_S: torch.Tensor, draft_len: int, flags: FilterFlags, vocab_start: int
    ) -> torch.Tensor:
        """int64 [S, K]: drafts for positions committed_len + 1 .. committed_len + K of the slots.

        flags: of the rows' requests.
        """
        num_rows = slots_S.shape[0]
        if self.are_greedy(flags):
            return greedy_tokens(logits_MV, self._tp, vocab_start).view(num_rows, draft_len)
        return self._sampled(logits_MV, slots_S, draft_len, flags, self._tp, vocab_start)

    def choose_by_head(
        self, head: DraftHead, hidden_MH: torch.Tensor, slots_S: torch.Tensor, draft_len: int, flags: FilterFlags
    ) -> torch.Tensor:
        """`choose` where the drafter has a head of its own; target ids as well."""
        num_rows, logits_MV = slots_S.shape[0], head(hidden_MH)
        if self.are_greedy(flags):
            return head.target_ids[greedy_tokens(logits_MV, self._tp, head.vocab.start)].view(num_rows, draft_len)
        whole_MV = head.over_target_vocab(logits_MV, self._padded_vocab_size)
        return self._sampled(whole_MV, slots_S, draft_len, flags, TpGroup.solo(), 0)

    def _sampled(
        self,
        logits_MV: torch.Tensor,
        slots_S: torch.Tensor,
        draft_len: int,
        flags: FilterFlags,
        tp: TpGroup,
        vocab_start: int,
    ) -> torch.Tensor:
        """tp: the ranks that share the logits' vocabulary."""
        num_rows = slots_S.shape[0]
        column_K = torch.arange(draft_len, device=slots_S.device)
        position_M = (self._state.committed_len[slots_S, None] + 1 + column_K).flatten()
        rows = self._state.sampling_rows(slots_S.repeat_interleave(draft_len), position_M, flags)
        if self._mode == "coupled":
            return sample(logits_MV, rows, tp, vocab_start).view(num_rows, draft_len)
        logits_MV = tp.all_gather(logits_MV, dim=1)
        kept_MV = kept_logits(logits_MV, rows)
        ids_V = torch.arange(kept_MV.shape[1], device=kept_MV.device)
        noise_MV = gumbel_noise(rows.seed_N, rows.position_N, ids_V, stream=STREAM_DRAFT)
        drawn_M = torch.where(
            rows.temperature_N > 0, argmax_pair(kept_MV + noise_MV, 0)[1], argmax_pair(logits_MV, 0)[1]
        )
        assert self._state.draft_logits is not None, "slots hold draft logits where drafts are probabilistic"
        self._state.draft_logits[slots_S, :draft_len] = kept_MV.view(num_rows, draft_len, -1)
        return drawn_M.view(num_rows, draft_len)
