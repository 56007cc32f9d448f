"""What the splits of decode attention leave for each other, and the kernel that merges it.

Shapes: N query rows, h heads, g KV heads, G = h / g, D head size, S splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.attention.cuda_choice import UNIT, BulkCut, DecodeCut, merge_heads
from engine.kernels.attention_scan import LOG2_E, PLAIN, AttentionOptions, padded_head
from engine.kernels.device_ops import KEPT, begin, forget


@triton.jit
def tiles_of_a_split(num_tiles, num_splits, MIN_TILES: tl.constexpr):
    return tl.maximum(tl.cdiv(num_tiles, num_splits), MIN_TILES)


@triton.jit
def _splits_of_a_query(
    start,
    kv_len,
    query,
    num_splits,
    BN: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    IN_TURN: tl.constexpr,
):
    """How many splits hold what the query sees. IN_TURN: tiles of BN positions went to them in turn, not in runs."""
    seen = kv_len
    if CAUSAL:
        seen = tl.minimum(start + query + 1, kv_len)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(tl.minimum(start - WINDOW + 1, kv_len - 1), 0) // BN
    num_tiles = tl.maximum(tl.cdiv(seen, BN) - first, 1)
    if IN_TURN:
        active = tl.minimum(num_tiles, num_splits)
    else:
        active = tl.cdiv(num_tiles, tiles_of_a_split(num_tiles, num_splits, MIN_TILES))
    return active


@triton.jit(do_not_specialize=["Q", "kv_heads", "m_tiles", "num_splits"])
def _merge_kernel(
    part_ptr,
    stat_ptr,
    out_ptr,
    start_ptr,
    kv_len_ptr,
    sink_ptr,
    out_row_stride,
    kv_heads,
    m_tiles,
    num_splits,
    Q,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SP: tl.constexpr,
    HEADS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SINK: tl.constexpr,
    IN_TURN: tl.constexpr,
    FORGETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program merges one head of a query over all splits at once, or HEADS of them split by split.

    FORGETS: what one head's splits left is dropped from L2 once it is read.
    """
    begin(PDL)
    query_row = tl.program_id(0)
    sequence, query = query_row // Q, query_row % Q
    start = tl.load(start_ptr + sequence, eviction_policy=KEPT).to(tl.int32)
    kv_len = tl.load(kv_len_ptr + sequence, eviction_policy=KEPT).to(tl.int32)
    active = _splits_of_a_query(start, kv_len, query, num_splits, BN, MIN_TILES, CAUSAL, WINDOW, IN_TURN)
    d = tl.arange(0, DP)
    out_row_ptr = out_ptr + query_row.to(tl.int64) * out_row_stride
    if HEADS == 1:
        head = tl.program_id(1)
        m = query * G + head % G
        row = m % BM
        base = ((sequence * kv_heads + head // G) * m_tiles + m // BM).to(tl.int64) * num_splits
        s = tl.arange(0, SP)
        used = s < active
        # All at once, used or not, and what is not may be anything: so that no load waits for another.
        there = s < num_splits
        values = tl.load(part_ptr + ((base + s) * BM + row)[:, None] * DP + d[None, :], mask=there[:, None], other=0.0)
        best = tl.load(stat_ptr + (base + s) * 2 * BM + row, mask=there, other=0.0)
        total = tl.load(stat_ptr + (base + s) * 2 * BM + BM + row, mask=there, other=0.0)
        tl.debug_barrier()
        best = tl.where(used, best, float("-inf"))
        total = tl.where(used, total, 0.0)
        values = tl.where(used[:, None], values, 0.0)
        top = tl.max(best, 0)
        if SINK:
            sink = tl.load(sink_ptr + head) * LOG2_E
            top = tl.maximum(top, sink)
        origin = tl.where(top == float("-inf"), 0.0, top)
        gain = tl.exp2(best - origin)
        whole = tl.sum(total * gain, 0)
        if SINK:
            whole += tl.exp2(sink - origin)
        mean = tl.sum(values * gain[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
        tl.store(out_row_ptr + head * D + d, mean.to(out_ptr.dtype.element_ty), mask=d < D, eviction_policy=KEPT)
        if FORGETS:
            tl.debug_barrier()
            line = tl.arange(0, DP // 32) * 32
            written = tl.minimum(s, num_splits - 1)
            forget(part_ptr + ((base + written) * BM + row)[:, None] * DP + line[None, :])
    else:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        real = heads < G * kv_heads
        ms = query * G + heads % G
        rows = ms % BM
        bases = ((sequence * kv_heads + heads // G) * m_tiles + ms // BM).to(tl.int64) * num_splits
        tops = tl.full([HEADS], float("-inf"), tl.float32)
        for split in tl.static_range(SP):
            at = stat_ptr + (bases + split) * 2 * BM + rows
            tops = tl.maximum(tops, tl.load(at, mask=real & (split < active), other=float("-inf")))
        if SINK:
            sinks = tl.load(sink_ptr + heads, mask=real, other=0.0) * LOG2_E
            tops = tl.maximum(tops, sinks)
        tops = tl.where(tops == float("-inf"), 0.0, tops)
        wholes = tl.zeros([HEADS], tl.float32)
        if SINK:
            wholes += tl.exp2(sinks - tops)
        means = tl.zeros([HEADS, DP], tl.float32)
        for split in tl.static_range(SP):
            reads = real & (split < active)
            at = stat_ptr + (bases + split) * 2 * BM + rows
            gains = tl.exp2(tl.load(at, mask=reads, other=float("-inf")) - tops)
            wholes += tl.load(at + BM, mask=reads, other=0.0) * gains
            cells = part_ptr + ((bases + split) * BM + rows)[:, None] * DP + d[None, :]
            means += tl.load(cells, mask=reads[:, None], other=0.0) * gains[:, None]
        means /= tl.where(wholes == 0.0, 1.0, wholes)[:, None]
        out_at = out_row_ptr + heads[:, None] * D + d[None, :]
        tl.store(out_at, means.to(out_ptr.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """What the splits of one call leave for the merge."""

    part: Tensor
    stat: Tensor

    @classmethod
    def create(cls, units: int, cut: DecodeCut | BulkCut, head_dim: int, device: torch.device) -> "Workspace":
        """For `units` = sequences x KV heads x row tiles."""
        cells = units * cut.num_splits * cut.rows
        return cls(
            part=torch.empty(cells * padded_head(head_dim), dtype=torch.float32, device=device),
            stat=torch.empty(2 * cells, dtype=torch.float32, device=device),
        )


def row_tiles(queries: int, group: int, rows: int) -> int:
    """Tiles of `rows` rows that hold a sequence's queries times the query heads of a KV head."""
    return -(-queries * group // rows)


def merge_splits(
    workspace: Workspace,
    out_NE: Tensor,
    *,
    q_len: int,
    q_start_R: Tensor,
    kv_len_R: Tensor,
    kv_heads: int,
    head_dim: int,
    causal: bool,
    cut: DecodeCut | BulkCut,
    options: AttentionOptions = PLAIN,
    pdl: bool = False,
) -> None:
    """Writes what the parts in the workspace amount to. Launched right behind the kernel that left them."""
    N, width = out_NE.shape
    h = width // head_dim
    positions, min_tiles = (UNIT, 1) if isinstance(cut, BulkCut) else (cut.positions, cut.min_tiles)
    splits = triton.next_power_of_2(cut.num_splits)
    heads = merge_heads(rows=N, heads=h, num_splits=splits)
    _merge_kernel[(N, -(-h // heads))](
        workspace.part,
        workspace.stat,
        out_NE,
        q_start_R,
        kv_len_R,
        out_NE if options.sink_h is None else options.sink_h,
        out_NE.stride(0),
        kv_heads,
        row_tiles(q_len, h // kv_heads, cut.rows),
        cut.num_splits,
        q_len,
        G=h // kv_heads,
        D=head_dim,
        DP=padded_head(head_dim),
        BM=cut.rows,
        BN=positions,
        SP=splits,
        HEADS=heads,
        MIN_TILES=min_tiles,
        CAUSAL=causal,
        WINDOW=options.window or 0,
        SINK=options.sink_h is not None,
        IN_TURN=isinstance(cut, BulkCut),
        FORGETS=isinstance(cut, BulkCut) and out_NE.is_cuda,
        PDL=pdl,
        num_warps=1 if heads == 1 and splits <= 16 else 4,
        launch_pdl=pdl,
    )
