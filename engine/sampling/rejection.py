"""Rejection sampling of drafts (arXiv 2211.17192, 2302.01318): tokens that keep the target's distribution exactly.

A row's draft d is accepted with probability min(1, p(d) / q(d)), else the row's token is drawn from the residual
max(0, p - q). p is the target's distribution after temperature and filters, q the one d was drawn from; a draft that
was no draw has q = 1 at d, so it is accepted with probability p(d) and the residual is p without d. A rejected row
never gives its draft: the tokens that come from here go through the same `verify` as those of exact match, and a draft
is accepted there exactly where it was accepted here.

Coin, residual and plain draws take separate streams of the row's (seed, position) key. A position whose outcome was not
used, because an earlier draft was rejected, may use them again: nothing that was emitted depends on that outcome.

Shape letters: N rows, V local vocabulary shard and after the gather the whole vocabulary, M drawing rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.noise import STREAM_ACCEPT, STREAM_RESIDUAL, STREAM_TOKEN, gumbel_noise, uniform_noise
from engine.sampling.sampler import SamplingRows, VocabGroup, argmax_pair, kept_logits, mask_stop_ids, sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposals:
    """The drafts that rows verify.

    token_N: int64, -1 where a row verifies none. logits_NV: float32 kept logits (`sampler.kept_logits`) over the whole
    vocabulary that each was drawn from, anything where token_N is -1; None: the drafts are no draws.
    """

    token_N: Tensor
    logits_NV: Tensor | None = None

    def take(self, row_indices: Tensor) -> "Proposals":
        logits_NV = None if self.logits_NV is None else self.logits_NV[row_indices]
        return Proposals(token_N=self.token_N[row_indices], logits_NV=logits_NV)


def verified_tokens(
    logits_NV: Tensor, rows: SamplingRows, proposals: Proposals, tp: VocabGroup, vocab_start: int
) -> Tensor:
    """One token id per row, int64 [N], equal on every rank: the draft where it is accepted, else a draw.

    Arguments as those of `sampler.sample`. Rows of temperature 0 give their largest logit. Whole rows are gathered over
    the ranks.
    """
    if rows.all_greedy:
        return sample(logits_NV, rows, tp, vocab_start)
    logits_NV = mask_stop_ids(logits_NV, rows.stop_ids_NS, rows.mask_stops_N, vocab_start)
    if tp.size > 1:
        logits_NV = tp.all_gather(logits_NV, dim=1)
    greedy_N = argmax_pair(logits_NV, 0)[1]
    drawing_N = rows.temperature_N > 0
    if logits_NV.device.type == "cpu":  # reading back costs nothing: greedy rows pay no more than their argmax
        index_M = drawing_N.nonzero()[:, 0]
        greedy_N[index_M] = _accept_or_draw(logits_NV[index_M], rows.take(index_M), proposals.take(index_M))
        return greedy_N
    return torch.where(drawing_N, _accept_or_draw(logits_NV, rows, proposals), greedy_N)


def _accept_or_draw(logits_NV: Tensor, rows: SamplingRows, proposals: Proposals) -> Tensor:
    target_NV = kept_logits(logits_NV, rows)
    accepted_N, residual_NV = _accept(target_NV, rows, proposals)
    has_draft_N = proposals.token_N >= 0
    rejected_N = has_draft_N & ~accepted_N
    ids_V = torch.arange(target_NV.shape[1], device=target_NV.device)
    stream_N = torch.where(rejected_N, STREAM_RESIDUAL, STREAM_TOKEN)
    noise_NV = gumbel_noise(rows.seed_N, rows.position_N, ids_V, stream=stream_N)
    drawn_N = argmax_pair(torch.where(rejected_N[:, None], residual_NV, target_NV) + noise_NV, 0)[1]
    return torch.where(has_draft_N & accepted_N, proposals.token_N, drawn_N)


def _accept(target_NV: Tensor, rows: SamplingRows, proposals: Proposals) -> tuple[Tensor, Tensor]:
    """(accepted [N], logits of the residual [N, V]); both mean nothing in a row without a draft."""
    draft_N1 = proposals.token_N.clamp(min=0)[:, None]
    id_1 = torch.zeros(1, dtype=torch.int64, device=target_NV.device)
    coin_N = uniform_noise(rows.seed_N, rows.position_N, id_1, stream=STREAM_ACCEPT)[:, 0]
    if proposals.logits_NV is None:
        total_N = torch.logsumexp(target_NV, dim=1)
        p_draft_N = torch.exp(target_NV.gather(1, draft_N1)[:, 0] - total_N)
        return coin_N < p_draft_N, target_NV.scatter(1, draft_N1, -math.inf)
    p_NV, q_NV = torch.softmax(target_NV, dim=1), torch.softmax(proposals.logits_NV, dim=1)
    accepted_N = coin_N * q_NV.gather(1, draft_N1)[:, 0] < p_NV.gather(1, draft_N1)[:, 0]
    residual_NV = (p_NV - q_NV).clamp_(min=0.0).log_()
    # p = q up to rounding leaves nothing; a rejection is then an accident of rounding as well, and p is right.
    empty_N1 = residual_NV.amax(dim=1, keepdim=True) == -math.inf
    return accepted_N, torch.where(empty_N1, target_NV, residual_NV)
