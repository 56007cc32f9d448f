"""Split-KV decode attention over the paged cache in Triton: few queries per sequence, causal tail or not.

The tiles of a sequence's visible positions are dealt to at most `num_splits` programs, from the length on the device:
a graph captured for long sequences reads no more on short ones. Each leaves its maximum, sum and weighted values, and a
second kernel merges them (a merge by a sequence's last program was measured: it takes longer). Grids depend on shapes
alone and nothing is read back: a call can be captured.

Without a window, how a query's tiles are dealt follows from its own position alone, so that its bits do not depend on
where in a block of drafts it stands. Where a block's queries differ in that, the tiles are passed over once for each
kind.

Shapes: N rows, R sequences, Q queries of each, h heads, g KV heads, G = h / g, D head size, S splits, B table columns.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from engine.attention.cuda_choice import DecodeCut
from engine.kernels.attention_scan import (
    PLAIN,
    AttentionOptions,
    check_layout,
    finish,
    padded_head,
    precision,
    scan,
)
from engine.kernels.device_ops import begin
from engine.kernels.merge_splits import Workspace, merge_splits, row_tiles, tiles_of_a_split


@triton.jit(do_not_specialize=["Q", "kv_heads", "m_tiles", "num_splits"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    start_ptr,
    kv_len_ptr,
    sink_ptr,
    part_ptr,
    stat_ptr,
    q_row_stride,
    out_row_stride,
    table_stride,
    slot_stride,
    scale,
    soft_cap,
    kv_heads,
    m_tiles,
    num_splits,
    Q,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINK: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    unit, split = tl.program_id(0), tl.program_id(1)
    sequence = unit // (kv_heads * m_tiles)
    kv_head = (unit // m_tiles) % kv_heads
    m = (unit % m_tiles) * BM + tl.arange(0, BM)
    real = m < Q * G
    query, head = m // G, kv_head * G + m % G
    d = tl.arange(0, DP)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    kv_len = tl.load(kv_len_ptr + sequence).to(tl.int32)
    position = start + query
    if CAUSAL:
        seen = tl.minimum(position + 1, kv_len)
        longest = tl.minimum(start + Q, kv_len)
    else:
        seen = tl.zeros([BM], tl.int32) + kv_len
        longest = kv_len
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.minimum(start - WINDOW + 1, kv_len - 1), 0) // BN
    num_tiles = tl.maximum(tl.cdiv(longest, BN) - first, 1)
    most = tiles_of_a_split(num_tiles, num_splits, MIN_TILES)
    least = most
    if SPLIT and CAUSAL:
        shortest = tl.maximum(tl.cdiv(tl.minimum(start + 1, kv_len), BN) - first, 1)
        least = tiles_of_a_split(shortest, num_splits, MIN_TILES)
    # The block is no longer than a tile (see `decode_attention`), so there are at most these two kinds.
    per_m = tiles_of_a_split(tl.maximum(tl.cdiv(seen, BN) - first, 1), num_splits, MIN_TILES)
    if split < tl.cdiv(num_tiles, least):
        at = (sequence * Q + query).to(tl.int64)
        inside = real[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + at[:, None] * q_row_stride + head[:, None] * D + d[None, :], mask=inside, other=0.0)
        for per_split in tl.range(least, most + 1, tl.maximum(most - least, 1)):
            mine = real
            visible = seen
            if SPLIT and CAUSAL:
                mine = real & (per_m == per_split)
                visible = tl.where(mine, seen, 0)
            own = first + split * per_split
            best, total, values = scan(
                q,
                k_ptr + kv_head * D,
                v_ptr + kv_head * D,
                table_ptr + sequence.to(tl.int64) * table_stride,
                own,
                tl.minimum(own + per_split, first + num_tiles),
                tl.minimum(position - WINDOW + 1, kv_len - 1),
                visible,
                kv_len,
                slot_stride,
                scale,
                soft_cap,
                D,
                DP,
                BM,
                BN,
                BLOCK_SIZE,
                WINDOW,
                SOFT_CAP,
                PRECISION,
                STAGES,
            )
            if SPLIT:
                rows = tl.arange(0, BM)
                place = (unit.to(tl.int64) * num_splits + split) * BM
                tl.store(stat_ptr + 2 * place + rows, best, mask=mine)
                tl.store(stat_ptr + 2 * place + BM + rows, total, mask=mine)
                tl.store(part_ptr + place * DP + rows[:, None] * DP + d[None, :], values, mask=mine[:, None])
            else:
                mean = finish(best, total, values, sink_ptr, head, real, SINK)
                out_at = out_ptr + at[:, None] * out_row_stride + head[:, None] * D + d[None, :]
                tl.store(out_at, mean.to(out_ptr.dtype.element_ty), mask=inside)


def decode_attention(
    q_NhD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_NE: Tensor,
    *,
    q_len: int,
    q_start_R: Tensor,
    kv_len_R: Tensor,
    block_table_RB: Tensor,
    causal: bool,
    cut: DecodeCut,
    workspace: Workspace | None,
    options: AttentionOptions = PLAIN,
    pdl: bool = False,
) -> None:
    """Writes the attention of R x q_len rows, sequence by sequence, into out_NE [N, h * D].

    See `engine.attention.context` for the other shapes. workspace: `Workspace.create` of the cut; None at one split.
    """
    N, h, D = q_NhD.shape
    _, block_size, g, _ = k_cache.shape
    check_layout(q_NhD, k_cache, v_cache, out_NE, block_table_RB)
    R, G = block_table_RB.shape[0], h // g
    assert R * q_len == N
    assert q_len <= cut.positions or not causal  # the queries' last tiles are two at most
    m_tiles = row_tiles(q_len, G, cut.rows)
    split = cut.num_splits > 1
    assert split == (workspace is not None)
    nothing = out_NE  # a pointer nobody follows
    sink = nothing if options.sink_h is None else options.sink_h
    _decode_kernel[(R * g * m_tiles, cut.num_splits)](
        q_NhD,
        k_cache,
        v_cache,
        out_NE,
        block_table_RB,
        q_start_R,
        kv_len_R,
        sink,
        nothing if workspace is None else workspace.part,
        nothing if workspace is None else workspace.stat,
        q_NhD.stride(0),
        out_NE.stride(0),
        block_table_RB.stride(0),
        k_cache.stride(1),
        1.0 / math.sqrt(D),
        options.soft_cap or 0.0,
        g,
        m_tiles,
        cut.num_splits,
        q_len,
        G=G,
        D=D,
        DP=padded_head(D),
        BM=cut.rows,
        BN=cut.positions,
        BLOCK_SIZE=block_size,
        MIN_TILES=cut.min_tiles,
        CAUSAL=causal,
        WINDOW=options.window or 0,
        SOFT_CAP=options.soft_cap is not None,
        SINK=options.sink_h is not None,
        SPLIT=split,
        PRECISION=precision(q_NhD.dtype),
        STAGES=cut.num_stages,
        PDL=pdl,
        num_warps=cut.num_warps,
        launch_pdl=pdl,
    )
    if workspace is not None:
        merge_splits(
            workspace,
            out_NE,
            q_len=q_len,
            q_start_R=q_start_R,
            kv_len_R=kv_len_R,
            kv_heads=g,
            head_dim=D,
            causal=causal,
            cut=cut,
            options=options,
            pdl=pdl,
        )
