"""The threshold of top_k, top_p and min_p without sorting: halving the range of float32's ordered bit patterns.

Every pass counts or adds over the vocabulary, 32 of them for top_k and 32 for top_p, in memory for one row's weights
however many rows there are. For devices, where a sort of whole rows costs several times the logits' memory. Same
threshold as `filters.row_thresholds`, which sums in another order: a token whose mass decides within 1e-15 may differ.

Shape letters: N rows, V the whole vocabulary.
"""

import math

import torch
from torch import Tensor

from engine.sampling.filters import min_p_threshold

_MAGNITUDE = 0x7FFFFFFF
_BITS = 32


def selected_thresholds(scaled_NV: Tensor, *, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """Threshold of all filters together, float32 [N]: a token stays iff its scaled logit is at least this."""
    key_NV = _ordered(scaled_NV)
    max_N = scaled_NV.amax(dim=1)
    lowest_N = torch.full_like(max_N, -math.inf)
    low_N, high_N = _ordered(lowest_N).to(torch.int64), _ordered(max_N).to(torch.int64)
    floor_N = min_p_threshold(max_N, min_p_N)

    # top_k: the largest key that at least k keys reach.
    low_K, high_K = low_N, high_N
    for _ in range(_BITS):
        middle_N = (low_K + high_K + 1) >> 1
        enough_N = (key_NV >= middle_N.to(torch.int32)[:, None]).sum(dim=1) >= top_k_N
        low_K, high_K = torch.where(enough_N, middle_N, low_K), torch.where(enough_N, high_K, middle_N - 1)
    off_N = (top_k_N <= 0) | (top_k_N > scaled_NV.shape[1])
    floor_N = torch.maximum(floor_N, torch.where(off_N, lowest_N, _value(low_K)))

    # top_p: the smallest key above which less than top_p lies.
    weight_NV = torch.exp(scaled_NV.to(torch.float64) - max_N.to(torch.float64)[:, None])
    weight_NV = torch.where(scaled_NV >= floor_N[:, None], weight_NV, 0.0)
    enough_mass_N = top_p_N.to(torch.float64) * weight_NV.sum(dim=1)
    for _ in range(_BITS):
        middle_N = (low_N + high_N) >> 1
        above_N = torch.where(key_NV > middle_N.to(torch.int32)[:, None], weight_NV, 0.0).sum(dim=1)
        kept_N = above_N < enough_mass_N
        low_N, high_N = torch.where(kept_N, low_N, middle_N + 1), torch.where(kept_N, middle_N, high_N)
    return torch.maximum(floor_N, torch.where(top_p_N >= 1.0, lowest_N, _value(high_N)))


def _ordered(x: Tensor) -> Tensor:
    """int32 of the same order as the float32 values; 0.0 and -0.0 are one."""
    bits = (x.to(torch.float32) + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ _MAGNITUDE, bits)


def _value(key_N: Tensor) -> Tensor:
    """The float32 of an ordered key."""
    key_N = key_N.to(torch.int32)
    return torch.where(key_N < 0, key_N ^ _MAGNITUDE, key_N).view(torch.float32)
