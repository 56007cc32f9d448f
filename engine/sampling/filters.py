"""Temperature, min-p, top-k and top-p as pure functions, applied in that order (vLLM's).

Each filter keeps every token whose scaled logit reaches a threshold, so the three together are one threshold per row:

    min_p  keeps p(token) >= min_p * p(most likely)            (a ratio: the normaliser does not matter)
    top_k  keeps the k largest, and whatever ties with the k-th
    top_p  over what min_p and top_k left, renormalised: keeps a token while the tokens strictly more likely than it
           hold less than top_p together; ties are kept or dropped together

Thresholds make the result independent of how a sort orders equal values, of the batch row and of the vocabulary's
sharding. Masses are summed in float64 in descending order, so neither depends on the width that happened to be sorted.

Shape letters: N rows, V the whole vocabulary, M sorted columns.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Widest partial sort: 1,024 of 49,152 cost 0.5 ms a row on one core, the full sort 4.3 ms, 64 of them 0.15 ms.
MAX_PARTIAL_SORT = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterFlags:
    """What the host knows about a batch of sampling rows, so that the device need not be asked.

    all_greedy: no row draws. any_filter: a drawing row uses top_k, top_p or min_p.
    sort_width: columns in descending order that decide every row's threshold; 0: the whole vocabulary.
    """

    all_greedy: bool
    any_filter: bool
    sort_width: int

    @classmethod
    def of(
        cls, temperature: Sequence[float], top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]
    ) -> "FilterFlags":
        """Flags of the rows with these parameters (equally long sequences, one entry per row)."""
        width = 1
        all_greedy, any_filter = True, False
        for row_temperature, row_k, row_p, row_min_p in zip(temperature, top_k, top_p, min_p, strict=True):
            if row_temperature == 0.0:
                continue
            all_greedy = False
            if row_k > 0 or row_p < 1.0 or row_min_p > 0.0:
                any_filter = True
            if row_k > 0:
                width = max(width, row_k)
            elif row_p < 1.0:
                width = MAX_PARTIAL_SORT + 1
        # Powers of two: a captured program then exists for few widths.
        sort_width = 1 << (width - 1).bit_length() if width <= MAX_PARTIAL_SORT else 0
        return cls(all_greedy=all_greedy, any_filter=any_filter, sort_width=sort_width)


def scale_by_temperature(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """Logits / temperature, float32 [N, V]; rows with temperature 0 (greedy) are left as they are."""
    divisor_N = torch.where(temperature_N > 0, temperature_N, torch.ones_like(temperature_N))
    return logits_NV.to(torch.float32) / divisor_N.to(torch.float32)[:, None]


def min_p_threshold(max_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Smallest scaled logit min_p keeps, float32 [N]; -inf where min_p is 0. `max_N`: each row's largest."""
    return (max_N.to(torch.float64) + torch.log(min_p_N.to(torch.float64))).to(torch.float32)


def top_k_threshold(sorted_NM: Tensor, top_k_N: Tensor) -> Tensor:
    """The k-th largest scaled logit, float32 [N]; -inf where top_k <= 0 (off) or reaches past the whole vocabulary.

    `sorted_NM`: descending; M must be at least every top_k that is below the vocabulary's size.
    """
    width = sorted_NM.shape[1]
    index_N = (top_k_N.to(torch.int64) - 1).clamp(min=0, max=width - 1)
    kth_N = sorted_NM.gather(1, index_N[:, None])[:, 0]
    off_N = (top_k_N <= 0) | (top_k_N > width)
    return torch.where(off_N, -math.inf, kth_N)


def top_p_threshold(sorted_NM: Tensor, floor_N: Tensor, top_p_N: Tensor, total_N: Tensor) -> Tensor:
    """Smallest scaled logit of the nucleus, float32 [N]; -inf where top_p is 1 (off).

    Args:
        sorted_NM: the M largest scaled logits, descending, holding the whole nucleus.
        floor_N: threshold of the filters before; smaller values carry no mass.
        top_p_N: in (0, 1].
        total_N: float64 mass of all kept tokens, relative to the most likely one's.
    """
    mass_NM = torch.cumsum(_weights(sorted_NM, floor_N), dim=1)
    above_NM = torch.cat([torch.zeros_like(mass_NM[:, :1]), mass_NM[:, :-1]], dim=1)  # of the tokens ahead of each
    kept_NM = above_NM < (top_p_N.to(torch.float64) * total_N)[:, None]
    last_N1 = (kept_NM.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    # Equal values share their group's first `above`, so cutting at the value keeps or drops a group as one.
    return torch.where(top_p_N >= 1.0, -math.inf, sorted_NM.gather(1, last_N1)[:, 0])


def row_thresholds(
    scaled_NV: Tensor, *, top_k_N: Tensor | None, top_p_N: Tensor | None, min_p_N: Tensor, sorted_NM: Tensor
) -> Tensor:
    """Threshold of all filters together, float32 [N]: a token stays iff its scaled logit is at least this.

    top_k_N, top_p_N: None where the deployment has no such filter; its work is skipped. `sorted_NM` is the descending
    head of every row, wide enough for its top_k, and the whole row where top_p is used without top_k
    (`FilterFlags.sort_width`).
    """
    floor_N = min_p_threshold(sorted_NM[:, 0], min_p_N)
    if top_k_N is not None:
        floor_N = torch.maximum(floor_N, top_k_threshold(sorted_NM, top_k_N))
    if top_p_N is None:
        return floor_N
    # A kept token outside the head can only tie with the k-th: its mass is known without sorting further.
    outside_N = (scaled_NV >= floor_N[:, None]).sum(dim=1) - (sorted_NM >= floor_N[:, None]).sum(dim=1)
    weight_NM = _weights(sorted_NM, floor_N)
    tie_N = torch.exp(sorted_NM[:, -1].to(torch.float64) - sorted_NM[:, 0].to(torch.float64))
    total_N = weight_NM.sum(dim=1) + torch.where(outside_N > 0, outside_N * tie_N, 0.0)
    return torch.maximum(floor_N, top_p_threshold(sorted_NM, floor_N, top_p_N, total_N))


def nucleus_threshold_of_head(scaled_1V: Tensor, floor_1: Tensor, top_p_1: Tensor, head_1M: Tensor) -> Tensor | None:
    """`row_thresholds` of one row without top_k from its M largest logits alone; None if they hold less than top_p.

    Reads a value back: CPU only. The total comes from an unsorted pass over the vocabulary.
    """
    weight_1V = _weights(scaled_1V, floor_1, head_1M[:, 0])
    total_1 = weight_1V.sum(dim=1)
    if not bool(_weights(head_1M, floor_1).sum(dim=1) >= top_p_1.to(torch.float64) * total_1):
        return None
    return torch.maximum(floor_1, top_p_threshold(head_1M, floor_1, top_p_1, total_1))


def _weights(scaled_NM: Tensor, floor_N: Tensor, max_N: Tensor | None = None) -> Tensor:
    """float64 weights relative to each row's largest (by default its first column); 0 below the floor."""
    largest_N = scaled_NM[:, 0] if max_N is None else max_N
    weight_NM = torch.exp(scaled_NM.to(torch.float64) - largest_N.to(torch.float64)[:, None])
    return torch.where(scaled_NM >= floor_N[:, None], weight_NM, 0.0)
