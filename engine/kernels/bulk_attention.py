"""Split-KV decode attention of large heads on SM90, with K and V brought by the tensor copy engine.

One warp only asks for K and V, as many tiles ahead as shared memory has room for, and groups of four only compute:
memory is read without a pause. Two such groups of a program take its tiles in turn, and the first adds up what both
found; so it goes where a program has an SM for itself. Otherwise one group computes and two programs share an SM. The
parts that several splits leave are merged by `engine.kernels.merge_splits`; at one split the mean is written at once.

Units of 16 positions go to the splits in turn and tiles to the groups, so which of them a position belongs to follows
from the position alone, and so do a query's bits: of a tile that it does not see, or sees in part, masked positions add
exact zeros.

Shapes: R sequences, Q queries each, h heads, g KV heads, G = h / g, D head size, S splits, B table columns.
"""

import math

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.cuda_choice import UNIT, BulkCut
from engine.kernels.attention_scan import check_layout
from engine.kernels.bulk_copies import HALF, UNIT_ROWS, bring, rows_of_tile
from engine.kernels.merge_splits import Workspace, merge_splits

_NEVER = gl.constexpr(-1e30)  # below every score, and minus infinity less this is no NaN
_MAX_REGISTERS = 128  # of a thread at launch, so that the next kernel's programs fit beside; warps then trade them
_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_PAIRS = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
_LINE = gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
def _attend(
    shared,
    G: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    CAUSAL: gl.constexpr,
    DIRECT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Attention of every GROUPS-th tile of a split's `left` units. longest: the positions of all rows.

    The first group leaves what all found: the mean, or a split's maximum, sum and weighted values.
    """
    (
        k_tiles,
        v_tiles,
        q_tile,
        k_full,
        v_full,
        empty,
        q_ready,
        other_ready,
        other_values,
        other_stat,
        q_ptr,
        out_ptr,
        part_ptr,
        stat_ptr,
        q_row_stride,
        out_row_stride,
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
    ) = shared
    UNITS: gl.constexpr = BN // UNIT_ROWS
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, VALUE, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])

    m = gl.arange(0, BM, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    real = m < Q * G
    q_row = sequence * Q + m // G
    column = (kv_head * G + m % G) * D
    if GROUP == 0:
        at = q_row * q_row_stride + column
        q_tile.store(gl.load(q_ptr + at[:, None] + d[None, :], mask=real[:, None], other=0.0))
        fence_async_shared()
        tl.debug_barrier()
        if GROUPS > 1:
            mbarrier.arrive(q_ready, count=1)
    else:
        mbarrier.wait(q_ready, 0)

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
    for tile in range(GROUP, (left + UNITS - 1) // UNITS, GROUPS):
        stage, phase = tile % STAGES, (tile // STAGES) & 1
        end = (split + (tile * UNITS + UNITS - 1) * num_splits + 1) * UNIT_ROWS
        mbarrier.wait(k_full.index(stage), phase)
        score = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        if end > seen_by_all:
            n = gl.arange(0, BN, gl.SliceLayout(0, SCORE))
            place = (split + (tile * UNITS + n // UNIT_ROWS) * num_splits) * UNIT_ROWS + n % UNIT_ROWS
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
            place = (split + (tile * UNITS + n // UNIT_ROWS) * num_splits) * UNIT_ROWS + n % UNIT_ROWS
            held = v_tiles.index(stage).load(WIDE)
            tl.debug_barrier()
            v_tiles.index(stage).store(gl.where((place < longest)[:, None], held, 0.0))
            fence_async_shared()
            tl.debug_barrier()
        values = warpgroup_mma(weight, v_tiles.index(stage), values, is_async=True)
        values = warpgroup_mma_wait(0, deps=(values,))
        tl.debug_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    if GROUP > 0:
        other_values.store(values)
        other_stat.index(0).store(best)
        other_stat.index(1).store(total)
        tl.debug_barrier()
        mbarrier.arrive(other_ready, count=1)
    else:
        if GROUPS > 1:
            mbarrier.wait(other_ready, 0)
            other_best = other_stat.index(0).load(ROW)
            top = gl.maximum(best, other_best)
            gain = gl.exp2(best - top)
            other_gain = gl.exp2(other_best - top)
            total = total * gain + other_stat.index(1).load(ROW) * other_gain
            best = top
            gain = gl.convert_layout(gain, gl.SliceLayout(1, VALUE))
            other_gain = gl.convert_layout(other_gain, gl.SliceLayout(1, VALUE))
            values = values * gain[:, None] + other_values.load(VALUE) * other_gain[:, None]
        if DIRECT:
            whole = gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, VALUE))
            q_tile.store((values / whole[:, None]).to(gl.bfloat16))
            tl.debug_barrier()
            at = q_row * out_row_stride + column
            gl.store(out_ptr + at[:, None] + d[None, :], q_tile.load(WIDE), mask=real[:, None])
        else:
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
    out_ptr,
    table_ptr,
    start_ptr,
    kv_len_ptr,
    part_ptr,
    stat_ptr,
    q_row_stride,
    out_row_stride,
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
    DIRECT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    SHARED: gl.constexpr,
    PAIRS: gl.constexpr,
    LINE: gl.constexpr,
    PDL: gl.constexpr,
):
    UNITS: gl.constexpr = BN // UNIT_ROWS
    HALVES: gl.constexpr = D // HALF
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], SHARED)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], SHARED)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BM, D], SHARED)
    # A tile lies in halves of 64 columns, each unit after unit: a copy is one unit of one half.
    k_units = k_tiles._reinterpret(gl.bfloat16, [STAGES * HALVES * UNITS, UNIT_ROWS, HALF], SHARED)
    v_units = v_tiles._reinterpret(gl.bfloat16, [STAGES * HALVES * UNITS, UNIT_ROWS, HALF], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    other_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(other_ready, count=1)
    other_values, other_stat = q_tile, q_tile
    if GROUPS > 1:
        other_values = gl.allocate_shared_memory(gl.float32, [BM, D], PAIRS)
        other_stat = gl.allocate_shared_memory(gl.float32, [2, BM], LINE)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head_of_all, split = gl.program_id(0), gl.program_id(1)
    sequence, kv_head = head_of_all // kv_heads, head_of_all % kv_heads
    start = gl.load(start_ptr + sequence).to(gl.int32)
    kv_len = gl.load(kv_len_ptr + sequence).to(gl.int32)
    table_ptr += sequence * table_stride
    rows = rows_of_tile(table_ptr, split, num_splits, columns, PAGE, UNITS)  # at once: before the length is known
    longest = kv_len
    if CAUSAL:
        longest = gl.minimum(start + Q, kv_len)
    num_units = (longest + UNIT_ROWS - 1) // UNIT_ROWS
    left = (num_units - split + num_splits - 1) // num_splits
    if split < num_units:
        shared = (
            k_tiles,
            v_tiles,
            q_tile,
            k_full,
            v_full,
            empty,
            q_ready,
            other_ready,
            other_values,
            other_stat,
            q_ptr,
            out_ptr,
            part_ptr,
            stat_ptr,
            q_row_stride,
            out_row_stride,
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
        )
        brought = (
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
        )
        if GROUPS > 1:
            gl.warp_specialize(
                [
                    (_attend, (shared, G, D, BM, BN, CAUSAL, DIRECT, STAGES, GROUPS, FIRST)),
                    (_attend, (shared, G, D, BM, BN, CAUSAL, DIRECT, STAGES, GROUPS, SECOND)),
                    (bring, (brought, PAGE, UNITS, D, STAGES)),
                ],
                [4, 1],
                [168, 40],
            )
        else:
            gl.warp_specialize(
                [
                    (_attend, (shared, G, D, BM, BN, CAUSAL, DIRECT, STAGES, GROUPS, FIRST)),
                    (bring, (brought, PAGE, UNITS, D, STAGES)),
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
    workspace: Workspace | None,
    pdl: bool = False,
) -> None:
    """Writes the attention of R x q_len rows, sequence by sequence, into out_NE [N, h * D]. bfloat16.

    See `engine.attention.context` for the other shapes. workspace: `Workspace.create` of the cut; None at one split.
    """
    _, h, D = q_NhD.shape
    blocks, block_size, g, _ = k_cache.shape
    check_layout(q_NhD, k_cache, v_cache, out_NE, block_table_RB)
    assert q_len * (h // g) <= cut.rows
    assert (cut.num_splits > 1) == (workspace is not None)
    nothing = out_NE  # a pointer nobody follows
    descs = [
        TensorDescriptor.from_tensor(cache.view(blocks * block_size, g * D), [UNIT, HALF.value], _SHARED)
        for cache in (k_cache, v_cache)
    ]
    _bulk_kernel[(block_table_RB.shape[0] * g, cut.num_splits)](
        q_NhD,
        *descs,
        out_NE,
        block_table_RB,
        q_start_R,
        kv_len_R,
        nothing if workspace is None else workspace.part,
        nothing if workspace is None else workspace.stat,
        q_NhD.stride(0),
        out_NE.stride(0),
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
        DIRECT=workspace is None,
        STAGES=cut.num_stages,
        GROUPS=cut.groups,
        SHARED=_SHARED,
        PAIRS=_PAIRS,
        LINE=_LINE,
        PDL=pdl,
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
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
            pdl=pdl,
        )
