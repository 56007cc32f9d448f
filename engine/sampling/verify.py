"""Exact-match verification: which drafts the target's own tokens confirm, and where the block ends.

Because every token of `target_RK1` is drawn with noise keyed by its position, the emitted tokens are those of plain
decoding whatever the drafts were: a draft decides how many of them one step yields, never which (DFlash and speculative
decoding with exact match). All shapes are fixed and nothing is read back, so the function can be captured.

Shape letters: R sequences, K draft columns (the program's width), S stop ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.sampler import stops_are_masked
from engine.step import Finish


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a step does to each sequence; all int64 [R].

    num_emitted_R: target columns that become output, 0..K+1.
    num_accepted_R: drafts that matched, before any cut by a stop or the length limit; <= k.
    finish_R: `Finish` values.
    last_token_R: the last emitted token; column 0 of the target where nothing is emitted (keep the old one there).
    """

    num_emitted_R: Tensor
    num_accepted_R: Tensor
    finish_R: Tensor
    last_token_R: Tensor


def verify(
    *,
    target_RK1: Tensor,
    draft_RK: Tensor,
    k_R: Tensor,
    committed_R: Tensor,
    max_len_R: Tensor,
    min_len_R: Tensor,
    stop_ids_RS: Tensor,
    finished_R: Tensor,
    valid_RK1: Tensor | None = None,
    synthetic_R: Tensor | None = None,
) -> Verdict:
    """Accept the leading drafts that match, emit them plus one token, cut at a stop id or at max_len.

    Args:
        target_RK1: int64 [R, K+1]; column j is the target's token at position committed + 1 + j.
        draft_RK: int64 [R, K]; columns from k on hold any filler and are never accepted.
        k_R: drafts of the row, 0..K.
        committed_R: tokens whose K/V existed before the step; the request has committed + 1 tokens.
        max_len_R: total tokens at which the request ends with LENGTH.
        min_len_R: a stop id at a position below this does not end the request (it is masked at sampling as well).
        stop_ids_RS: int64 [R, S], padded with -1; S may be 0.
        finished_R: bool; finished and padding rows emit nothing.
        valid_RK1: bool; False where a column's logits are not finite. The block ends before the first such column, with
            ERROR if plain decoding would have come to it as well. None: all are valid.
        synthetic_R: int64; so many drafts are accepted whatever they are, as far as the row has them. For measurements.
    """
    columns = target_RK1.shape[1]
    column_K1 = torch.arange(columns, device=target_RK1.device)
    position_RK1 = committed_R[:, None] + 1 + column_K1

    if valid_RK1 is None:
        valid_RK1 = torch.ones_like(target_RK1, dtype=torch.bool)
    match_RK = (draft_RK == target_RK1[:, :-1]) & (column_K1[:-1] < k_R[:, None]) & valid_RK1[:, :-1]
    accepted_R = match_RK.to(torch.int64).cumprod(dim=1).sum(dim=1)
    if synthetic_R is not None:
        accepted_R = torch.minimum(synthetic_R, k_R)

    is_stop_RK1 = (target_RK1[:, :, None] == stop_ids_RS[:, None, :]).any(dim=2) & (target_RK1 >= 0)
    is_stop_RK1 = is_stop_RK1 & ~stops_are_masked(position_RK1, min_len_R[:, None])
    until_stop_R = torch.where(is_stop_RK1, column_K1 + 1, columns + 1).amin(dim=1)  # columns + 1: no stop
    until_length_R = (max_len_R - committed_R - 1).clamp(min=0)
    until_invalid_R = torch.where(valid_RK1, columns + 1, column_K1).amin(dim=1)

    emitted_R = torch.minimum(torch.minimum(accepted_R + 1, until_stop_R), until_length_R)
    emitted_R = torch.where(finished_R, 0, emitted_R)
    finish_R = torch.where(emitted_R == until_length_R, int(Finish.LENGTH), int(Finish.NONE))
    finish_R = torch.where(emitted_R == until_stop_R, int(Finish.STOP), finish_R)  # a stop id on the limit is a stop
    finish_R = torch.where(until_invalid_R < emitted_R, int(Finish.ERROR), finish_R)
    emitted_R = torch.minimum(emitted_R, until_invalid_R)
    return Verdict(
        num_emitted_R=emitted_R,
        num_accepted_R=torch.where(finished_R, 0, accepted_R),
        finish_R=torch.where(finished_R, int(Finish.NONE), finish_R),
        last_token_R=target_RK1.gather(1, (emitted_R - 1).clamp(min=0)[:, None])[:, 0],
    )
