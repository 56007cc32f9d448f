"""FlashInfer's fused rejection sampling for drafts that are draws of the drafter, on CUDA.

The same law as `engine.sampling.rejection`, one kernel instead of several passes over [rows, vocabulary]. Its generator
knows one seed for the batch (FlashInfer 0.6 reads the first element of a seed tensor only) and the row of the batch: a
request's tokens then depend on its neighbours and on where in the batch it lies, so its own seed does not reproduce
them on CUDA, not even at equal draft lengths. The seed handed over is made of every row's key, so that no row sees the
same noise twice: the key of a single row comes again where two requests share a seed.

Shape letters: N rows: R sequences of K + 1 rows each, then F single rows; V local vocabulary shard, after the gather
the whole vocabulary.
"""

import math

import torch
from torch import Tensor

from engine.sampling.noise import STREAM_ACCEPT, gumbel_noise, row_seeds
from engine.sampling.rejection import Proposals
from engine.sampling.sampler import SamplingRows, VocabGroup, argmax_pair, kept_logits, mask_stop_ids

_FILLER_COLUMNS = 4  # one would do; the kernel reads rows in vectors of four when their length is a multiple


def chain_tokens(
    logits_NV: Tensor,
    rows: SamplingRows,
    proposals: Proposals,
    *,
    width: int,
    num_chains: int,
    tp: VocabGroup,
    vocab_start: int,
) -> Tensor:
    """`rejection.verified_tokens` for probabilistic drafts; behind a chain's first rejection its columns hold 0.

    width, num_chains: K + 1 and R; the rows behind the chains verify no draft.
    """
    logits_NV = mask_stop_ids(logits_NV, rows.stop_ids_NS, rows.mask_stops_N, vocab_start)
    if tp.size > 1:
        logits_NV = tp.all_gather(logits_NV, dim=1)
    kept_NV, best_N = kept_logits(logits_NV, rows), argmax_pair(logits_NV, 0)[1]
    ids_V = torch.arange(kept_NV.shape[1], device=kept_NV.device)
    assert proposals.logits_NV is not None, "only draws of the drafter have probabilities"
    # In a greedy row both models give their token for certain.
    greedy_N1 = (rows.temperature_N == 0)[:, None]
    kept_NV = torch.where(greedy_N1, _certain(best_N, ids_V), kept_NV)
    draft_NV = torch.where(greedy_N1, _certain(proposals.token_N, ids_V), proposals.logits_NV)

    chained = slice(0, num_chains * width)
    first = slice(0, num_chains * width, width)
    seed_1 = row_seeds(rows.seed_N[first], rows.position_N[first], stream=STREAM_ACCEPT).sum(dim=0, keepdim=True)
    draft_RK1 = proposals.token_N[chained].view(num_chains, width)
    draft_RK1V, target_RK1V = (x[chained].view(num_chains, width, -1) for x in (draft_NV, kept_NV))
    tokens_RK1 = _chain(target_RK1V, draft_RK1[:, :-1], draft_RK1V[:, :-1], seed_1)
    # Nothing is drawn in a greedy row, whatever the kernel makes of a coin that is exactly 1.
    best_RK1, greedy_RK1 = (x[chained].view(num_chains, width) for x in (best_N, greedy_N1[:, 0]))
    tokens_RK1 = torch.where(greedy_RK1, best_RK1, tokens_RK1)

    single = slice(num_chains * width, None)
    noise_FV = gumbel_noise(rows.seed_N[single], rows.position_N[single], ids_V)
    return torch.cat([tokens_RK1.flatten(), argmax_pair(kept_NV[single] + noise_FV, 0)[1]])


def _certain(token_N: Tensor, ids_V: Tensor) -> Tensor:
    """Logits [N, V] of distributions that hold one token; without an id (-1) the row is no distribution."""
    return torch.where(ids_V == token_N[:, None], 0.0, -math.inf)


def _chain(target_RK1V: Tensor, draft_RK: Tensor, draft_RKV: Tensor, seed_1: Tensor) -> Tensor:
    """Tokens int64 [R, K+1] from kept logits of both models; draft_RK is -1 where a row verifies no draft."""
    from flashinfer.sampling import chain_speculative_sampling

    R, K, V = draft_RKV.shape
    p_RK1V, q_RKV = (torch.zeros(R, n, V + _FILLER_COLUMNS, device=draft_RK.device) for n in (K + 1, K))
    p_RK1V[:, :, :V] = torch.softmax(target_RK1V, dim=2)
    q_RKV[:, :, :V] = torch.softmax(draft_RKV, dim=2)
    # The kernel wants K drafts of every row: a missing one is a token that p never gives and q gives for certain, so it
    # ends the row with a draw from p.
    missing_RK = draft_RK < 0
    q_RKV.masked_fill_(missing_RK[:, :, None], 0.0)  # also NaN, where there was no distribution
    q_RKV[:, :, V] = missing_RK.to(q_RKV.dtype)
    tokens_RK1, _num_accepted_R, _num_emitted_R = chain_speculative_sampling(
        q_RKV,
        torch.where(missing_RK, V, draft_RK).to(torch.int32),
        p_RK1V,
        deterministic=True,
        seed=seed_1,
        offset=torch.zeros_like(seed_1),
    )
    return tokens_RK1.to(torch.int64).clamp(min=0, max=V - 1)
