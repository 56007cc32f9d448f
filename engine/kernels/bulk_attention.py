"""Split-KV decode attention of few large heads on SM90, with K and V brought by the tensor copy engine.

One warp only asks for K and V, as many tiles ahead as shared memory has room for, and four only compute: memory is read
without a pause. The parts that the splits leave are merged as those of `engine.kernels.decode_attention`.

Units of 16 positions go to the splits in turn, so which split a position belongs to follows from the position alone,
and so do a query's bits: of a tile that it does not see, or sees in part, masked positions add exact zeros.

Shapes: R sequences, Q queries of each, h heads, g KV heads, G = h / g, D head size, S splits, B table columns.
"""

import math

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.cuda_choice import UNIT, BulkCut
from engine.kernels.attention_scan import check_layout
from engine.kernels.decode_attention import Workspace, merge_splits

_UNIT = gl.constexpr(UNIT)
_HALF = gl.constexpr(64)  # columns of a copy: 128 bytes, the width of the swizzle
_NEVER = gl.constexpr(-1e30)  # below every score, and minus infinity less this is no NaN
_MAX_REGISTERS = 128  # of a thread at launch, so that the next kernel's programs fit beside; warps then trade them
_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def _rows_of_tile(table_ptr, first_unit, num_splits, columns, PAGE: gl.constexpr, UNITS: gl.constexpr):
    """First row in the cache of each unit of a tile; past the table's end some row that exists."""
    PER_PAGE: gl.constexpr = PAGE // _UNIT
    rows = ()
    for i in gl.static_range(UNITS):
        unit = first_unit + i * num_splits
        page = gl.minimum(unit // PER_PAGE, columns - 1)
        block = gl.load(table_ptr + page).to(gl.int32)
        rows = rows + (block * PAGE + unit % PER_PAGE * _UNIT,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _ask(desc, rows, column, units, first, full, left, UNITS: gl.constexpr, D: gl.constexpr):
    """Brings the first `left` units of a tile to units[first ..]."""
    HALVES: gl.constexpr = D // _HALF
    UNIT_BYTES: gl.constexpr = _UNIT * D * 2
    for i in gl.static_range(UNITS - 1):
        mbarrier.expect(full, (i + 1) * UNIT_BYTES, pred=left == i + 1)
    mbarrier.expect(full, UNITS * UNIT_BYTES, pred=left >= UNITS)
    for i in gl.static_range(UNITS):
        for half in gl.static_range(HALVES):
            at = [rows[i], column + half * _HALF]
            tma.async_copy_global_to_shared(desc, at, full, units.index(first + half * UNITS + i), pred=left > i)


@gluon.jit
def _bring(
    k_desc,
    v_desc,
    k_units,
    v_units,
    k_full,
    v_full,
    empty,
    table_ptr,
    rows,
    columns,
    column,
    split,
    num_splits,
    left,
    PAGE: gl.constexpr,
    UNITS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Brings a split's `left` units of one head, tile by tile. rows: of its first tile."""
    unit = split
    for tile in range((left + UNITS - 1) // UNITS):
        stage = tile % STAGES
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        first = stage * UNITS * (D // _HALF)
        _ask(k_desc, rows, column, k_units, first, k_full.index(stage), left, UNITS, D)
        _ask(v_desc, rows, column, v_units, first, v_full.index(stage), left, UNITS, D)
        unit += UNITS * num_splits
        rows = _rows_of_tile(table_ptr, unit, num_splits, columns, PAGE, UNITS)
        left -= UNITS


@gluon.jit
def _attend(
    k_tiles,
    v_tiles,
    q_tile,
    k_full,
    v_full,
    empty,
    q_ptr,
    part_ptr,
    stat_ptr,
    q_row_stride,
    scale,
    start,
    kv_len,
    longest,
    head_of_all,
    sequence,
    kv_head,
    split,
    num_splits,
    left,
    Q,
    G: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Leaves maximum, sum and weighted values of a split's `left` units. longest: the positions of all rows."""
    UNITS: gl.constexpr = BN // _UNIT
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, VALUE, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])

    m = gl.arange(0, BM, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    at = (sequence * Q + m // G) * q_row_stride + (kv_head * G + m % G) * D
    q_tile.store(gl.load(q_ptr + at[:, None] + d[None, :], mask=(m < Q * G)[:, None], other=0.0))
    fence_async_shared()
    tl.debug_barrier()

    row = gl.arange(0, BM, ROW)
    seen = gl.zeros([BM], gl.int32, ROW) + kv_len
    seen_by_all = kv_len
    if CAUSAL:
        seen = gl.minimum(start + row // G + 1, kv_len)
        seen_by_all = gl.minimum(start + 1, kv_len)
    factor = scale * 1.4426950408889634
    nothing = gl.zeros([BM, BN], gl.float32, SCORE)
    best = gl.full([BM], _NEVER, gl.float32, ROW)
    total = gl.zeros([BM], gl.float32, ROW)
    values = gl.zeros([BM, D], gl.float32, VALUE)
    for tile in range((left + UNITS - 1) // UNITS):
        stage = tile % STAGES
        phase = (tile // STAGES) & 1
        end = (split + (tile * UNITS + UNITS - 1) * num_splits + 1) * _UNIT
        mbarrier.wait(k_full.index(stage), phase)
        score = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        if end > seen_by_all:
            n = gl.arange(0, BN, gl.SliceLayout(0, SCORE))
            place = (split + (tile * UNITS + n // _UNIT) * num_splits) * _UNIT + n % _UNIT
            score = gl.where(place[None, :] < seen[:, None], score, float("-inf"))
        new_best = gl.maximum(best, gl.max(score, 1) * factor)
        weight = gl.exp2(score * factor - new_best[:, None])
        fade = gl.exp2(best - new_best)
        total = total * fade + gl.sum(weight, 1)
        best = new_best
        values = values * gl.convert_layout(fade, gl.SliceLayout(1, VALUE))[:, None]
        weight = gl.convert_layout(weight.to(gl.bfloat16), WEIGHT)
        mbarrier.wait(v_full.index(stage), phase)
        if end > longest:
            # What lies past the length, or was not brought, may be no number: zero times that would be none.
            n = gl.arange(0, BN, gl.SliceLayout(1, WIDE))
            place = (split + (tile * UNITS + n // _UNIT) * num_splits) * _UNIT + n % _UNIT
            held = v_tiles.index(stage).load(WIDE)
            tl.debug_barrier()
            v_tiles.index(stage).store(gl.where((place < longest)[:, None], held, 0.0))
            fence_async_shared()
            tl.debug_barrier()
        values = warpgroup_mma(weight, v_tiles.index(stage), values, is_async=True)
        values = warpgroup_mma_wait(0, deps=(values,))
        tl.debug_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    part_at = (head_of_all.to(gl.int64) * num_splits + split) * BM
    gl.store(stat_ptr + 2 * part_at + row, best)
    gl.store(stat_ptr + 2 * part_at + BM + row, total)
    m = gl.arange(0, BM, gl.SliceLayout(1, VALUE))
    d = gl.arange(0, D, gl.SliceLayout(0, VALUE))
    gl.store(part_ptr + part_at * D + m[:, None] * D + d[None, :], values, mask=(m < Q * G)[:, None])


@gluon.jit(do_not_specialize=["Q", "kv_heads", "num_splits", "columns"])
def _bulk_kernel(
    q_ptr,
    k_desc,
    v_desc,
    table_ptr,
    start_ptr,
    kv_len_ptr,
    part_ptr,
    stat_ptr,
    q_row_stride,
    table_stride,
    scale,
    kv_heads,
    num_splits,
    columns,
    Q,
    G: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    PAGE: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
    PDL: gl.constexpr,
):
    UNITS: gl.constexpr = BN // _UNIT
    HALVES: gl.constexpr = D // _HALF
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], SHARED)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], SHARED)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BM, D], SHARED)
    # A tile lies in halves of 64 columns, each unit after unit: a copy is one unit of one half.
    k_units = k_tiles._reinterpret(gl.bfloat16, [STAGES * HALVES * UNITS, _UNIT, _HALF], SHARED)
    v_units = v_tiles._reinterpret(gl.bfloat16, [STAGES * HALVES * UNITS, _UNIT, _HALF], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()  # what follows waits, too: see `engine.kernels.device_ops.begin`
        gdc_wait()
    head_of_all, split = gl.program_id(0), gl.program_id(1)
    sequence = head_of_all // kv_heads
    kv_head = head_of_all % kv_heads
    start = gl.load(start_ptr + sequence).to(gl.int32)
    kv_len = gl.load(kv_len_ptr + sequence).to(gl.int32)
    table_ptr += sequence * table_stride
    rows = _rows_of_tile(table_ptr, split, num_splits, columns, PAGE, UNITS)  # at once: before the length is known
    longest = kv_len
    if CAUSAL:
        longest = gl.minimum(start + Q, kv_len)
    num_units = (longest + _UNIT - 1) // _UNIT
    left = (num_units - split + num_splits - 1) // num_splits
    if split < num_units:
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        k_tiles,
                        v_tiles,
                        q_tile,
                        k_full,
                        v_full,
                        empty,
                        q_ptr,
                        part_ptr,
                        stat_ptr,
                        q_row_stride,
                        scale,
                        start,
                        kv_len,
                        longest,
                        head_of_all,
                        sequence,
                        kv_head,
                        split,
                        num_splits,
                        left,
                        Q,
                        G,
                        D,
                        BM,
                        BN,
                        CAUSAL,
                        STAGES,
                    ),
                ),
                (
                    _bring,
                    (
                        k_desc,
                        v_desc,
                        k_units,
                        v_units,
                        k_full,
                        v_full,
                        empty,
                        table_ptr,
                        rows,
                        columns,
                        kv_head * D,
                        split,
                        num_splits,
                        left,
                        PAGE,
                        UNITS,
                        D,
                        STAGES,
                    ),
                ),
            ],
            [1],
            [40],
        )


def bulk_attention(
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
    cut: BulkCut,
    workspace: Workspace,
    pdl: bool = False,
) -> None:
    """Writes the attention of R x q_len rows, sequence by sequence, into out_NE [N, h * D]. bfloat16.

    See `engine.attention.context` for the other shapes. workspace: `Workspace.create` of the cut.
    """
    _, h, D = q_NhD.shape
    blocks, block_size, g, _ = k_cache.shape
    check_layout(q_NhD, k_cache, v_cache, out_NE, block_table_RB)
    assert q_len * (h // g) <= cut.rows
    descs = [
        TensorDescriptor.from_tensor(cache.view(blocks * block_size, g * D), [UNIT, _HALF.value], _SHARED)
        for cache in (k_cache, v_cache)
    ]
    _bulk_kernel[(block_table_RB.shape[0] * g, cut.num_splits)](
        q_NhD,
        *descs,
        block_table_RB,
        q_start_R,
        kv_len_R,
        workspace.part,
        workspace.stat,
        q_NhD.stride(0),
        block_table_RB.stride(0),
        1.0 / math.sqrt(D),
        g,
        cut.num_splits,
        block_table_RB.shape[1],
        q_len,
        G=h // g,
        D=D,
        BM=cut.rows,
        BN=cut.positions,
        PAGE=block_size,
        CAUSAL=causal,
        STAGES=cut.num_stages,
        SHARED=_SHARED,
        PDL=pdl,
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
        launch_pdl=pdl,
    )
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
        pdl=pdl,
    )
