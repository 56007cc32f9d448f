"""What the paged attention kernels share: the pass over tiles of K and V, the last division, options and checks.

A tile of queries packs the G query heads of a KV head: row m is query m // G, head m % G, and all rows of a tile read
the same K and V once. Sums are float32; K and V past a sequence's length are never read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionOptions:
    """What a model may add to plain attention.

    window:   a query at position p sees none below min(p - window + 1, kv_len - 1); None: no lower bound.
    soft_cap: scores are soft_cap * tanh(score / soft_cap); None leaves them.
    sink_h:   one more score per head, float32, that takes weight and has no value; None without.
    """

    window: int | None = None
    soft_cap: float | None = None
    sink_h: Tensor | None = None


PLAIN = AttentionOptions()


@triton.jit
def scan(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    first_tile,
    end_tile,
    low_m,
    seen_m,
    kv_len,
    slot_stride,
    scale,
    soft_cap,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """(maximum [BM], sum [BM], weighted values [BM, DP]) over tiles first_tile .. end_tile - 1, scores in base 2.

    Row m sees positions below seen_m (at most kv_len) and, with a window, none below low_m.
    """
    best = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    values = tl.zeros([BM, DP], tl.float32)
    d = tl.arange(0, DP)
    next_place = first_tile * BN + tl.arange(0, BN)
    next_block = tl.load(table_ptr + next_place // BLOCK_SIZE, mask=next_place < kv_len, other=0)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        place = tile * BN + tl.arange(0, BN)
        exists = place < kv_len
        at = (next_block * BLOCK_SIZE + place % BLOCK_SIZE) * slot_stride
        next_place = place + BN
        next_block = tl.load(table_ptr + next_place // BLOCK_SIZE, mask=next_place < kv_len, other=0)
        read = exists[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + at[:, None] + d[None, :], mask=read, other=0.0)
        v = tl.load(v_ptr + at[:, None] + d[None, :], mask=read, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFT_CAP:
            score = soft_cap * (1.0 - 2.0 / (tl.exp2(2.0 * LOG2_E * score / soft_cap) + 1.0))
        visible = place[None, :] < seen_m[:, None]
        if WINDOW > 0:
            visible = visible & (place[None, :] >= low_m[:, None])
        score = tl.where(visible, score * LOG2_E, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        origin = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(score - origin[:, None])
        fade = tl.exp2(best - origin)
        total = total * fade + tl.sum(weight, 1)
        values = tl.dot(weight.to(v.dtype), v, values * fade[:, None], input_precision=PRECISION)
        best = new_best
    return best, total, values


@triton.jit
def finish(best, total, values, sink_ptr, head_m, real_m, SINK: tl.constexpr):
    """Weighted mean [BM, DP]; zero where a row sees nothing."""
    if SINK:
        sink = tl.load(sink_ptr + head_m, mask=real_m, other=0.0) * LOG2_E
        top = tl.maximum(best, sink)
        fade = tl.exp2(best - top)
        values = values * fade[:, None]
        total = total * fade + tl.exp2(sink - top)
    return values / tl.where(total == 0.0, 1.0, total)[:, None]


def padded_head(head_dim: int) -> int:
    """Columns of a tile: the head size, at least 16, rounded up to a power of two."""
    return max(16, triton.next_power_of_2(head_dim))


def precision(dtype: torch.dtype) -> str:
    """Of a dot's inputs: float32 stays float32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def check_layout(q_NhD: Tensor, k_cache: Tensor, v_cache: Tensor, out_NE: Tensor, block_table_RB: Tensor) -> None:
    assert q_NhD.stride(2) == 1
    assert q_NhD.stride(1) == q_NhD.shape[2]
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert k_cache.dtype == v_cache.dtype == q_NhD.dtype
    assert out_NE.stride(1) == 1
    assert block_table_RB.stride(1) == 1
