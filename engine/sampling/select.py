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


def selected_thresholds(
    scaled_NV: Tensor, *, top_k_N: Tensor | None, top_p_N: Tensor | None, min_p_N: Tensor
) -> Tensor:
    """Threshold of all filters together, float32 [N]: a token stays iff its scaled logit is at least this.

    top_k_N, top_p_N: None where the deployment has no such filter; its passes are skipped.
    """
    max_N = scaled_NV.amax(dim=1)
    floor_N = min_p_threshold(max_N, min_p_N)
    if top_k_N is not None:
        floor_N = torch.maximum(floor_N, _top_k_threshold(scaled_NV, max_N, top_k_N))
    if top_p_N is not None:
        floor_N = torch.maximum(floor_N, _top_p_threshold(scaled_NV, max_N, floor_N, top_p_N))
    return floor_N


def _top_k_threshold(scaled_NV: Tensor, max_N: Tensor, top_k_N: Tensor) -> Tensor:
    """The largest key that at least k keys reach."""
    key_NV, lowest_N, low_N, high_N = _search_range(scaled_NV, max_N)
    for _ in range(_BITS):
        middle_N = (low_N + high_N + 1) >> 1
        enough_N = (key_NV >= middle_N.to(torch.int32)[:, None]).sum(dim=1) >= top_k_N
        low_N, high_N = torch.where(enough_N, middle_N, low_N), torch.where(enough_N, high_N, middle_N - 1)
    off_N = (top_k_N <= 0) | (top_k_N > scaled_NV.shape[1])
    return torch.where(off_N, lowest_N, _value(low_N))


def _top_p_threshold(scaled_NV: Tensor, max_N: Tensor, floor_N: Tensor, top_p_N: Tensor) -> Tensor:
    """The smallest key above which less than top_p of what reaches the floor lies."""
    key_NV, lowest_N, low_N, high_N = _search_range(scaled_NV, max_N)
    weight_NV = torch.exp(scaled_NV.to(torch.float64) - max_N.to(torch.float64)[:, None])
    weight_NV = torch.where(scaled_NV >= floor_N[:, None], weight_NV, 0.0)
    enough_mass_N = top_p_N.to(torch.float64) * weight_NV.sum(dim=1)
    for _ in range(_BITS):
        middle_N = (low_N + high_N) >> 1
        above_N = torch.where(key_NV > middle_N.to(torch.int32)[:, None], weight_NV, 0.0).sum(dim=1)
        kept_N = above_N < enough_mass_N
        low_N, high_N = torch.where(kept_N, low_N, middle_N + 1), torch.where(kept_N, middle_N, high_N)
    return torch.where(top_p_N >= 1.0, lowest_N, _value(high_N))


def _search_range(scaled_NV: Tensor, max_N: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(keys, -inf, key of -inf, key of the row's largest)."""
    lowest_N = torch.full_like(max_N, -math.inf)
    return (
        _ordered(scaled_NV),
        lowest_N,
        _ordered(lowest_N).to(torch.int64),
        _ordered(max_N).to(torch.int64),
    )


def _ordered(x: Tensor) -> Tensor:
    """int32 of the same order as the float32 values; 0.0 and -0.0 are one."""
    bits = (x.to(torch.float32) + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ _MAGNITUDE, bits)


def _value(key_N: Tensor) -> Tensor:
    """The float32 of an ordered key."""
    key_N = key_N.to(torch.int32)
    return torch.where(key_N < 0, key_N ^ _MAGNITUDE, key_N).view(torch.float32)
