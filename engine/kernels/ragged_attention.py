"""One-pass attention of prompt chunks of any lengths over the paged cache in Triton: where flash-attn is absent.

Shapes: N rows, R sequences, h heads, g KV heads, G = h / g, D head size, T tiles of queries, B table columns.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.cuda_choice import RaggedCut
from engine.kernels.attention_scan import PLAIN, AttentionOptions, check_layout, finish, padded_head, precision, scan
from engine.kernels.device_ops import begin


@triton.jit
def _ragged_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    start_ptr,
    kv_len_ptr,
    sink_ptr,
    tile_ptr,
    q_row_stride,
    out_row_stride,
    table_stride,
    slot_stride,
    scale,
    soft_cap,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINK: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """tile_ptr [tiles, 4]: sequence, first query within it, number of queries, first row."""
    begin(PDL)
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(tile_ptr + 4 * tile)
    first_query = tl.load(tile_ptr + 4 * tile + 1).to(tl.int32)
    num_queries = tl.load(tile_ptr + 4 * tile + 2).to(tl.int32)
    first_row = tl.load(tile_ptr + 4 * tile + 3)
    m = tl.arange(0, BM)
    real = m < num_queries * G
    query, head = m // G, kv_head * G + m % G
    d = tl.arange(0, DP)
    start = tl.load(start_ptr + sequence).to(tl.int32)
    kv_len = tl.load(kv_len_ptr + sequence).to(tl.int32)
    position = start + first_query + query
    if CAUSAL:
        seen = tl.minimum(position + 1, kv_len)
        longest = tl.minimum(start + first_query + num_queries, kv_len)
    else:
        seen = tl.zeros([BM], tl.int32) + kv_len
        longest = kv_len
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.minimum(start + first_query - WINDOW + 1, kv_len - 1), 0) // BN
    row = (first_row + query).to(tl.int64)
    inside = real[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + row[:, None] * q_row_stride + head[:, None] * D + d[None, :], mask=inside, other=0.0)
    best, total, values = scan(
        q,
        k_ptr + kv_head * D,
        v_ptr + kv_head * D,
        table_ptr + sequence * table_stride,
        first,
        tl.cdiv(longest, BN),
        tl.minimum(position - WINDOW + 1, kv_len - 1),
        seen,
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
    mean = finish(best, total, values, sink_ptr, head, real, SINK)
    out_at = out_ptr + row[:, None] * out_row_stride + head[:, None] * D + d[None, :]
    tl.store(out_at, mean.to(out_ptr.dtype.element_ty), mask=inside)


def ragged_attention(
    q_NhD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out_NE: Tensor,
    *,
    tiles_T4: Tensor,
    q_start_R: Tensor,
    kv_len_R: Tensor,
    block_table_RB: Tensor,
    causal: bool,
    cut: RaggedCut,
    options: AttentionOptions = PLAIN,
    pdl: bool = False,
) -> None:
    """Writes the attention of sequences of any lengths into out_NE [N, h * D]. tiles_T4: `ragged_tiles` of them at
    the cut's rows."""
    _, h, D = q_NhD.shape
    _, block_size, g, _ = k_cache.shape
    check_layout(q_NhD, k_cache, v_cache, out_NE, block_table_RB)
    assert cut.rows >= h // g
    _ragged_kernel[(tiles_T4.shape[0], g)](
        q_NhD,
        k_cache,
        v_cache,
        out_NE,
        block_table_RB,
        q_start_R,
        kv_len_R,
        out_NE if options.sink_h is None else options.sink_h,
        tiles_T4,
        q_NhD.stride(0),
        out_NE.stride(0),
        block_table_RB.stride(0),
        k_cache.stride(1),
        1.0 / math.sqrt(D),
        options.soft_cap or 0.0,
        G=h // g,
        D=D,
        DP=padded_head(D),
        BM=cut.rows,
        BN=cut.positions,
        BLOCK_SIZE=block_size,
        CAUSAL=causal,
        WINDOW=options.window or 0,
        SOFT_CAP=options.soft_cap is not None,
        SINK=options.sink_h is not None,
        PRECISION=precision(q_NhD.dtype),
        STAGES=cut.num_stages,
        PDL=pdl,
        num_warps=cut.num_warps,
        launch_pdl=pdl,
    )


def uniform_tiles(q_lens: tuple[int, ...], *, group: int, rows: int, device: torch.device) -> Tensor:
    """`ragged_tiles` of equally long sequences as a tensor made on the device, so that a call can be captured."""
    length, per_tile = q_lens[0], rows // group
    per_sequence = -(-length // per_tile)
    tile_T = torch.arange(len(q_lens) * per_sequence - 1, -1, -1, device=device)
    sequence_T, query_T = tile_T // per_sequence, tile_T % per_sequence * per_tile
    num_T = (length - query_T).clamp(max=per_tile)
    return torch.stack([sequence_T, query_T, num_T, sequence_T * length + query_T], dim=1)


def ragged_tiles(q_lens: tuple[int, ...], *, group: int, rows: int) -> list[list[int]]:
    """(sequence, first query, queries, first row) of each tile; the longest contexts come first in a causal chunk."""
    per_tile = rows // group
    tiles: list[list[int]] = []
    first_row = 0
    for sequence, length in enumerate(q_lens):
        for query in range(0, length, per_tile):
            tiles.append([sequence, query, min(per_tile, length - query), first_row + query])
        first_row += length
    return tiles[::-1]
