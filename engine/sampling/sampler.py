"""Drawing one token per row from target logits, the same on every rank, device and batch row.

Greedy rows (temperature 0) take the largest logit, ties to the lowest id. Drawing rows take the argmax of scaled logit
plus Gumbel noise over the tokens that the filters keep, which is an exact draw from the softmax of the kept logits.

Under tensor parallelism each rank holds a contiguous vocabulary shard in rank order. Without filters a rank reduces its
shard to one (value, id) pair, the pairs are all-gathered and reduced in rank order. With filters whole rows are
gathered and every rank does the same work on the same bits.

Shape letters: N rows, V local vocabulary shard (the whole one at size 1), S stop ids per row.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.layers.cpu_rows import MIN_PEAK_SIZE, row_kernels
from engine.layers.cuda_rows import CudaRows, cuda_rows
from engine.sampling.filters import (
    MAX_PARTIAL_SORT,
    min_p_threshold,
    nucleus_threshold_of_head,
    row_thresholds,
    scale_by_temperature,
)
from engine.sampling.noise import gumbel_noise, gumbel_noise_pairs
from engine.sampling.select import selected_thresholds

# Logits drawn from at a time on a device: the weights and masks of a draw take several times their memory.
_DRAW_ELEMENTS = 1 << 25


class VocabGroup(Protocol):
    """What sampling needs of a tensor-parallel group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x: Tensor, *, dim: int) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Parameters of N rows, on the logits' device, and what the host knows about them.

    temperature_N: float32, 0 greedy. top_k_N: int, <= 0 off. top_p_N: float32 in (0, 1], 1 off. min_p_N: float32 in
        [0, 1], 0 off. Filters of greedy rows have no effect.
    seed_N, position_N: int64 key of the noise; position of the token being drawn.
    stop_ids_NS / mask_stops_N: the row's stop ids (padded with -1) are masked out where mask_stops_N is True; None when
        no row asks for it.
    all_greedy, any_filter, sort_width: host flags, see `FilterFlags`. has_top_k, has_top_p: False where the deployment
        has no such filter, so that none of the rows asks for it and its work is skipped.
    """

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    seed_N: Tensor
    position_N: Tensor
    all_greedy: bool
    any_filter: bool
    sort_width: int = 0
    has_top_k: bool = True
    has_top_p: bool = True
    stop_ids_NS: Tensor | None = None
    mask_stops_N: Tensor | None = None

    def take(self, row_indices: Tensor | slice) -> "SamplingRows":
        """The rows at these indices (flags unchanged; stop masking is not carried, it is applied before)."""
        return SamplingRows(
            temperature_N=self.temperature_N[row_indices],
            top_k_N=self.top_k_N[row_indices],
            top_p_N=self.top_p_N[row_indices],
            min_p_N=self.min_p_N[row_indices],
            seed_N=self.seed_N[row_indices],
            position_N=self.position_N[row_indices],
            all_greedy=self.all_greedy,
            any_filter=self.any_filter,
            sort_width=self.sort_width,
            has_top_k=self.has_top_k,
            has_top_p=self.has_top_p,
        )

    @property
    def used_top_k_N(self) -> Tensor | None:
        """top_k_N if there is such a filter."""
        return self.top_k_N if self.has_top_k else None

    @property
    def used_top_p_N(self) -> Tensor | None:
        """top_p_N if there is such a filter."""
        return self.top_p_N if self.has_top_p else None


def sample(logits_NV: Tensor, rows: SamplingRows, tp: VocabGroup, vocab_start: int) -> Tensor:
    """One token id per row, int64 [N], equal on every rank.

    Args:
        logits_NV: float32 [N, V] of this rank's vocabulary shard; padded ids are -inf. Not modified.
        rows: parameters of the N rows.
        tp: the group that shares the vocabulary.
        vocab_start: global id of the shard's first column; rank * V.

    No host sync on an accelerator; on the CPU, where a read costs nothing, drawing rows are treated apart from greedy
    ones.
    """
    assert vocab_start == tp.rank * logits_NV.shape[1], (vocab_start, tp.rank, logits_NV.shape)
    logits_NV = mask_stop_ids(logits_NV, rows.stop_ids_NS, rows.mask_stops_N, vocab_start)
    if rows.all_greedy:
        return greedy_tokens(logits_NV, tp, vocab_start)
    if rows.any_filter and tp.size > 1:
        logits_NV = tp.all_gather(logits_NV, dim=1)
    start = 0 if rows.any_filter else vocab_start
    if logits_NV.device.type == "cpu":
        value_N, id_N = _split_greedy_and_drawn(logits_NV, rows, start)
    else:
        value_N, id_N = _draw_any_row(logits_NV, rows, start)
    return id_N if rows.any_filter else _reduce_pairs(value_N, id_N, tp)


def kept_logits(logits_NV: Tensor, rows: SamplingRows) -> Tensor:
    """Scaled logits float32 [N, V] with -inf where a filter cuts: their softmax is what `sample` draws a row from.

    logits_NV: the whole vocabulary; the rows of temperature 0 are left unscaled.
    """
    scaled_NV = scale_by_temperature(logits_NV, rows.temperature_N)
    if not rows.any_filter:
        return scaled_NV
    on_gpu = cuda_rows(logits_NV) if logits_NV.dtype == torch.float32 else None
    if logits_NV.device.type == "cpu":
        threshold_N = _thresholds_by_kind(scaled_NV, rows)
    elif on_gpu is not None:
        threshold_N = _kernel_thresholds(logits_NV, rows, on_gpu)
    else:
        threshold_N = _fixed_shape_thresholds(scaled_NV, rows)
    return torch.where(scaled_NV < threshold_N[:, None], -math.inf, scaled_NV)


def greedy_tokens(logits_NV: Tensor, tp: VocabGroup, vocab_start: int) -> Tensor:
    """The most likely id of each row, int64 [N], ties to the lowest id, equal on every rank."""
    return greedy_pairs(logits_NV, tp, vocab_start)[1]


def greedy_pairs(logits_NV: Tensor, tp: VocabGroup, vocab_start: int) -> tuple[Tensor, Tensor]:
    """(largest logit [N], `greedy_tokens`); the logit is NaN where the row holds a NaN on any rank."""
    return joined_pairs(*argmax_pair(logits_NV, vocab_start), tp)


def joined_pairs(value_N: Tensor, id_N: Tensor, tp: VocabGroup) -> tuple[Tensor, Tensor]:
    """`greedy_pairs` from each rank's `argmax_pair`."""
    if tp.size == 1:
        return value_N, id_N
    pair_NR2 = _gather_pairs(value_N, id_N, tp)
    return pair_NR2[:, :, 0].amax(dim=1).to(value_N.dtype), _best_id(pair_NR2)


def peak_logits(logits_NV: Tensor, tp: VocabGroup) -> Tensor:
    """The largest logit of each row [N] over all ranks; NaN where the row holds a NaN on any rank."""
    peak_N = logits_NV.amax(dim=1)
    return peak_N if tp.size == 1 else tp.all_gather(peak_N[:, None].contiguous(), dim=1).amax(dim=1)


def stops_are_masked(position: Tensor, min_len: Tensor) -> Tensor:
    """True where a stop id may not be drawn: the request has fewer than min_len tokens before this position's."""
    return position < min_len


def mask_stop_ids(
    logits_NV: Tensor, stop_ids_NS: Tensor | None, mask_stops_N: Tensor | None, vocab_start: int
) -> Tensor:
    """Logits with the stop ids of the flagged rows at -inf (a copy; the same tensor where nothing is asked)."""
    if stop_ids_NS is None or mask_stops_N is None:
        return logits_NV
    vocab = logits_NV.shape[1]
    local_NS = stop_ids_NS.to(torch.int64) - vocab_start
    hit_NS = (stop_ids_NS >= 0) & (local_NS >= 0) & (local_NS < vocab) & mask_stops_N[:, None]
    # One spare column takes the writes that mean nothing, so shapes do not depend on the data.
    column_NS = torch.where(hit_NS, local_NS, vocab)
    spare_N1 = logits_NV.new_zeros(logits_NV.shape[0], 1)
    return torch.cat([logits_NV, spare_N1], dim=1).scatter_(1, column_NS, -math.inf)[:, :vocab]


def argmax_pair(score_NV: Tensor, vocab_start: int) -> tuple[Tensor, Tensor]:
    """(largest value [N], its lowest global id int64 [N]). A row holding NaN gives a valid id."""
    on_gpu = cuda_rows(score_NV)
    if on_gpu is not None:
        return on_gpu.shard_argmax(score_NV, vocab_start)
    if score_NV.device.type == "cpu" and score_NV.dtype == torch.float32 and score_NV.shape[1] >= MIN_PEAK_SIZE:
        kernels = row_kernels(torch.float32)
        if kernels is not None:
            return kernels.row_peaks(score_NV.contiguous(), vocab_start)
    value_N, column_N = score_NV.max(dim=1)  # torch documents the first of equal values
    return value_N, column_N + vocab_start


def _reduce_pairs(value_N: Tensor, id_N: Tensor, tp: VocabGroup) -> Tensor:
    """The id of the largest value over the ranks; equal values go to the lower rank, which holds the lower ids."""
    return id_N if tp.size == 1 else _best_id(_gather_pairs(value_N, id_N, tp))


def _gather_pairs(value_N: Tensor, id_N: Tensor, tp: VocabGroup) -> Tensor:
    """float64 [N, ranks, 2]: it holds both a float32 value and an id exactly, so one collective takes the pair."""
    pair_N1_2 = torch.stack([value_N.to(torch.float64), id_N.to(torch.float64)], dim=1)[:, None, :]
    return tp.all_gather(pair_N1_2.contiguous(), dim=1)


def _best_id(pair_NR2: Tensor) -> Tensor:
    best_N = pair_NR2[:, 0, :]
    for rank in range(1, pair_NR2.shape[1]):
        other_N = pair_NR2[:, rank, :]
        best_N = torch.where(other_N[:, :1] > best_N[:, :1], other_N, best_N)
    return best_N[:, 1].to(torch.int64)


def _split_greedy_and_drawn(logits_NV: Tensor, rows: SamplingRows, vocab_start: int) -> tuple[Tensor, Tensor]:
    """(value, id) per row on the CPU: greedy rows pay an argmax, drawing rows what their own parameters need."""
    drawn_N = rows.temperature_N > 0
    if bool(drawn_N.all()):
        return _draw_rows(logits_NV, rows, vocab_start)
    value_N, id_N = argmax_pair(logits_NV, vocab_start)
    drawn_M = drawn_N.nonzero()[:, 0]
    value_N[drawn_M], id_N[drawn_M] = _draw_rows(logits_NV[drawn_M], rows.take(drawn_M), vocab_start)
    return value_N, id_N


def _draw_rows(logits_NV: Tensor, rows: SamplingRows, vocab_start: int) -> tuple[Tensor, Tensor]:
    """(value, id) of drawing rows on the CPU; filters, if any, mean that logits_NV is the whole vocabulary."""
    scaled_NV = scale_by_temperature(logits_NV, rows.temperature_N)
    if not rows.any_filter:
        return _noisy_argmax(scaled_NV, rows, vocab_start)
    assert vocab_start == 0, vocab_start
    threshold_N = _thresholds_by_kind(scaled_NV, rows)
    kept_NV = ~(scaled_NV < threshold_N[:, None])  # NaN is kept, so that every row has candidates
    # Noise for the kept pairs alone; a row without filters keeps its whole vocabulary.
    row_M, id_M = kept_NV.nonzero(as_tuple=True)
    score_M = scaled_NV[row_M, id_M] + gumbel_noise_pairs(rows.seed_N, rows.position_N, row_M, id_M)
    count, vocab = scaled_NV.shape
    value_N = torch.full((count,), -math.inf).scatter_reduce(0, row_M, score_M, "amax")
    candidate_M = torch.where(score_M < value_N[row_M], vocab, id_M)
    return value_N, torch.full((count,), vocab).scatter_reduce(0, row_M, candidate_M, "amin")


def _thresholds_by_kind(scaled_NV: Tensor, rows: SamplingRows) -> Tensor:
    """Every row's threshold, float32 [N], from as short a head of the sorted vocabulary as its kind of row needs.

    No filter or min_p alone: the maximum. top_k up to MAX_PARTIAL_SORT: one partial sort for all such rows. Everything
    else one by one: MAX_PARTIAL_SORT columns if they hold the nucleus, or a full sort.
    """
    threshold_N = torch.empty(scaled_NV.shape[0])
    partial_N = (rows.top_k_N > 0) & (rows.top_k_N <= MAX_PARTIAL_SORT)
    largest_N = (rows.top_k_N <= 0) & (rows.top_p_N >= 1.0)
    for kind_N, is_partial in ((partial_N, True), (largest_N, False)):
        index_M = kind_N.nonzero()[:, 0]
        if index_M.numel() > 0:
            scaled_MV, part = scaled_NV[index_M], rows.take(index_M)
            width = min(int(part.top_k_N.max()), scaled_NV.shape[1]) if is_partial else 1
            threshold_N[index_M] = _thresholds(scaled_MV, part, scaled_MV.topk(width, dim=1).values)
    for index_1 in (~partial_N & ~largest_N).nonzero():
        threshold_N[index_1] = _nucleus_threshold(scaled_NV[index_1], rows.take(index_1))
    return threshold_N


def _nucleus_threshold(scaled_1V: Tensor, row: SamplingRows) -> Tensor:
    """The threshold [1] of one row whose sorted head has no known width."""
    if int(row.top_k_N) <= 0 and scaled_1V.shape[1] > MAX_PARTIAL_SORT:
        head_1M = scaled_1V.topk(MAX_PARTIAL_SORT, dim=1).values
        floor_1 = min_p_threshold(head_1M[:, 0], row.min_p_N)
        threshold_1 = nucleus_threshold_of_head(scaled_1V, floor_1, row.top_p_N, head_1M)
        if threshold_1 is not None:
            return threshold_1
    return _thresholds(scaled_1V, row, scaled_1V.sort(dim=1, descending=True).values)


def _thresholds(scaled_NV: Tensor, rows: SamplingRows, sorted_NM: Tensor) -> Tensor:
    return row_thresholds(
        scaled_NV, top_k_N=rows.used_top_k_N, top_p_N=rows.used_top_p_N, min_p_N=rows.min_p_N, sorted_NM=sorted_NM
    )


def _draw_any_row(logits_NV: Tensor, rows: SamplingRows, vocab_start: int) -> tuple[Tensor, Tensor]:
    """(value, id) per row with fixed shapes and no read-back; by torch alone every row pays for the dearest one."""
    on_gpu = cuda_rows(logits_NV) if logits_NV.dtype == torch.float32 else None
    if on_gpu is not None:
        return on_gpu.draw_rows(
            logits_NV,
            temperature_N=rows.temperature_N,
            threshold_N=_kernel_thresholds(logits_NV, rows, on_gpu) if rows.any_filter else None,
            seed_N=rows.seed_N,
            position_N=rows.position_N,
            vocab_start=vocab_start,
        )
    count, vocab = logits_NV.shape
    step = max(1, _DRAW_ELEMENTS // vocab)
    parts = [
        _draw_some_rows(logits_NV[first : first + step], rows.take(slice(first, first + step)), vocab_start)
        for first in range(0, count, step)
    ]
    if len(parts) == 1:
        return parts[0]
    values, ids = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(ids)


def _draw_some_rows(logits_NV: Tensor, rows: SamplingRows, vocab_start: int) -> tuple[Tensor, Tensor]:
    drawn_N1 = (rows.temperature_N > 0)[:, None]
    scaled_NV = scale_by_temperature(logits_NV, rows.temperature_N)
    score_NV = scaled_NV + _noise(rows, vocab_start, logits_NV)
    if rows.any_filter:
        score_NV = torch.where(scaled_NV < _fixed_shape_thresholds(scaled_NV, rows)[:, None], -math.inf, score_NV)
    return argmax_pair(torch.where(drawn_N1, score_NV, scaled_NV), vocab_start)


def _kernel_thresholds(logits_NV: Tensor, rows: SamplingRows, on_gpu: CudaRows) -> Tensor:
    return on_gpu.filter_thresholds(
        logits_NV,
        temperature_N=rows.temperature_N,
        top_k_N=rows.used_top_k_N,
        top_p_N=rows.used_top_p_N,
        min_p_N=rows.min_p_N,
    )


def _fixed_shape_thresholds(scaled_NV: Tensor, rows: SamplingRows) -> Tensor:
    if 0 < rows.sort_width < scaled_NV.shape[1]:
        return _thresholds(scaled_NV, rows, scaled_NV.topk(rows.sort_width, dim=1).values)
    return selected_thresholds(scaled_NV, top_k_N=rows.used_top_k_N, top_p_N=rows.used_top_p_N, min_p_N=rows.min_p_N)


def _noisy_argmax(scaled_NV: Tensor, rows: SamplingRows, vocab_start: int) -> tuple[Tensor, Tensor]:
    return argmax_pair(_noise(rows, vocab_start, scaled_NV).add_(scaled_NV), vocab_start)


def _noise(rows: SamplingRows, vocab_start: int, like_NV: Tensor) -> Tensor:
    ids_V = torch.arange(vocab_start, vocab_start + like_NV.shape[1], device=like_NV.device)
    return gumbel_noise(rows.seed_N, rows.position_N, ids_V)
