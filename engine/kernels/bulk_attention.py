"""Split-KV decode attention of few large heads on SM90, with K and V brought by the tensor copy engine.

The work is dealt as in `engine.kernels.decode_attention`, whose merge follows, but one warp only asks for pages, as
many tiles ahead as shared memory holds, and four only compute.

Shapes: R sequences, Q queries of each, g KV heads, G query heads of each, D head size, S splits, B table columns.
"""

import triton
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

HALF = gl.constexpr(64)  # columns of a copy: 128 bytes, the width of the swizzle
NEVER = gl.constexpr(-1e30)  # a maximum below every score: subtracting it from minus infinity is no NaN


@gluon.jit
def _rows_of_tile(table_ptr, first_page, num_splits, columns, PAGE: gl.constexpr, PAGES: gl.constexpr):
    rows = ()
    for page in gl.static_range(PAGES):
        at = gl.minimum(first_page + page * num_splits, columns - 1)
        rows = rows + (gl.load(table_ptr + at).to(gl.int32) * PAGE,)  # noqa: RUF005
    return rows


@gluon.jit
def _ask(desc, rows, column, pages, first, full, left, PAGE: gl.constexpr, PAGES: gl.constexpr, D: gl.constexpr):
    HALVES: gl.constexpr = D // HALF
    for page in gl.static_range(PAGES):
        if page + 1 < PAGES:
            mbarrier.expect(full, (page + 1) * PAGE * D * 2, pred=left == page + 1)
        else:
            mbarrier.expect(full, (page + 1) * PAGE * D * 2, pred=left >= page + 1)
    for page in gl.static_range(PAGES):
        for half in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                desc,
                [rows[page], column + half * HALF],
                full,
                pages.index(first + half * PAGES + page),
                pred=left > page,
            )


@gluon.jit
def _bring(
    k_desc,
    v_desc,
    k_pages,
    v_pages,
    k_full,
    v_full,
    empty,
    table_ptr,
    rows,
    columns,
    column,
    split,
    num_splits,
    num_pages,
    BN: gl.constexpr,
    D: gl.constexpr,
    PAGE: gl.constexpr,
    STAGES: gl.constexpr,
    KEYS: gl.constexpr,
    VALUES: gl.constexpr,
):
    PAGES: gl.constexpr = BN // PAGE
    HALVES: gl.constexpr = D // HALF
    left = (num_pages - split + num_splits - 1) // num_splits
    page = split
    for tile in range((left + PAGES - 1) // PAGES):
        stage = tile % STAGES
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        first = stage * HALVES * PAGES
        if KEYS:
            _ask(k_desc, rows, column, k_pages, first, k_full.index(stage), left, PAGE, PAGES, D)
        if VALUES:
            _ask(v_desc, rows, column, v_pages, first, v_full.index(stage), left, PAGE, PAGES, D)
        page += PAGES * num_splits
        rows = _rows_of_tile(table_ptr, page, num_splits, columns, PAGE, PAGES)
        left -= PAGES


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
    unit,
    sequence,
    kv_head,
    split,
    num_splits,
    num_pages,
    Q,
    G: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    PAGE: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    IDLE: gl.constexpr,
):
    PAGES: gl.constexpr = BN // PAGE
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
    gl.thread_barrier()

    row = gl.arange(0, BM, ROW)
    position = start + row // G
    # First position that some row may not see.
    sure = kv_len
    seen = gl.zeros([BM], gl.int32, ROW) + kv_len
    if CAUSAL:
        sure = gl.minimum(start + 1, kv_len)
        seen = gl.minimum(position + 1, kv_len)
    factor = scale * 1.4426950408889634
    nothing = gl.zeros([BM, BN], gl.float32, SCORE)
    best = gl.full([BM], NEVER, gl.float32, ROW)
    total = gl.zeros([BM], gl.float32, ROW)
    values = gl.zeros([BM, D], gl.float32, VALUE)
    my_pages = (num_pages - split + num_splits - 1) // num_splits
    my_tiles = (my_pages + PAGES - 1) // PAGES
    if AHEAD:
        mbarrier.wait(k_full.index(0), 0)
        score = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
    if IDLE:
        for tile in range(my_tiles):
            mbarrier.wait(k_full.index(tile % STAGES), (tile // STAGES) & 1)
            mbarrier.wait(v_full.index(tile % STAGES), (tile // STAGES) & 1)
            gl.thread_barrier()
            mbarrier.arrive(empty.index(tile % STAGES), count=1)
        my_tiles = 0
    for tile in range(my_tiles):
        stage = tile % STAGES
        phase = (tile // STAGES) & 1
        end = (split + (tile * PAGES + PAGES - 1) * num_splits + 1) * PAGE
        if AHEAD:
            later = (tile + 1) % STAGES
            mbarrier.wait(k_full.index(later), ((tile + 1) // STAGES) & 1, pred=tile + 1 < my_tiles)
            coming = warpgroup_mma(q_tile, k_tiles.index(later).permute((1, 0)), nothing, use_acc=False, is_async=True)
        else:
            mbarrier.wait(k_full.index(stage), phase)
            score = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            score = warpgroup_mma_wait(0, deps=(score,))
        if end > sure:
            column = gl.arange(0, BN, gl.SliceLayout(0, SCORE))
            place = (split + (tile * PAGES + column // PAGE) * num_splits) * PAGE + column % PAGE
            score = gl.where(place[None, :] < seen[:, None], score, float("-inf"))
        new_best = gl.maximum(best, gl.max(score, 1) * factor)
        weight = gl.exp2(score * factor - new_best[:, None])
        fade = gl.exp2(best - new_best)
        total = total * fade + gl.sum(weight, 1)
        best = new_best
        values = values * gl.convert_layout(fade, gl.SliceLayout(1, VALUE))[:, None]
        packed = gl.convert_layout(weight.to(gl.bfloat16), WEIGHT)
        mbarrier.wait(v_full.index(stage), phase)
        if end > longest:
            # What lies past the length may be no number, and zero times that would be none.
            at_row = gl.arange(0, BN, gl.SliceLayout(1, WIDE))
            held_place = (split + (tile * PAGES + at_row // PAGE) * num_splits) * PAGE + at_row % PAGE
            held = v_tiles.index(stage).load(WIDE)
            gl.thread_barrier()
            v_tiles.index(stage).store(gl.where((held_place < longest)[:, None], held, 0.0))
            fence_async_shared()
            gl.thread_barrier()
        values = warpgroup_mma(packed, v_tiles.index(stage), values, is_async=True)
        if AHEAD:
            values, score = warpgroup_mma_wait(0, deps=(values, coming))
        else:
            values = warpgroup_mma_wait(0, deps=(values,))
        gl.thread_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    part_at = (unit * num_splits + split) * BM
    gl.store(stat_ptr + 2 * part_at + row, best)
    gl.store(stat_ptr + 2 * part_at + BM + row, total)
    out_row = gl.arange(0, BM, gl.SliceLayout(1, VALUE))
    out_d = gl.arange(0, D, gl.SliceLayout(0, VALUE))
    gl.store(part_ptr + part_at * D + out_row[:, None] * D + out_d[None, :], values, mask=(out_row < Q * G)[:, None])


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
    AHEAD: gl.constexpr,
    TWO: gl.constexpr,
    IDLE: gl.constexpr,
    PDL: gl.constexpr,
):
    PAGES: gl.constexpr = BN // PAGE
    HALVES: gl.constexpr = D // HALF
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], SHARED)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], SHARED)
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [BM, D], SHARED)
    # A tile lies as halves of 64 columns, each page after page: a copy is 16 rows of one half.
    k_pages = k_tiles._reinterpret(gl.bfloat16, [STAGES * HALVES * PAGES, PAGE, HALF], SHARED)
    v_pages = v_tiles._reinterpret(gl.bfloat16, [STAGES * HALVES * PAGES, PAGE, HALF], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    unit, split = gl.program_id(0), gl.program_id(1)
    sequence = unit // kv_heads
    kv_head = unit % kv_heads
    start = gl.load(start_ptr + sequence).to(gl.int32)
    kv_len = gl.load(kv_len_ptr + sequence).to(gl.int32)
    table_ptr += sequence * table_stride
    rows = _rows_of_tile(table_ptr, split, num_splits, columns, PAGE, PAGES)
    longest = kv_len
    if CAUSAL:
        longest = gl.minimum(start + Q, kv_len)
    num_pages = (longest + PAGE - 1) // PAGE
    if split < num_pages:
        if TWO:
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
                            unit,
                            sequence,
                            kv_head,
                            split,
                            num_splits,
                            num_pages,
                            Q,
                            G,
                            D,
                            BM,
                            BN,
                            PAGE,
                            CAUSAL,
                            STAGES,
                            AHEAD,
                            IDLE,
                        ),
                    ),
                    (
                        _bring,
                        (
                            k_desc,
                            v_desc,
                            k_pages,
                            v_pages,
                            k_full,
                            v_full,
                            empty,
                            table_ptr,
                            rows,
                            columns,
                            kv_head * D,
                            split,
                            num_splits,
                            num_pages,
                            BN,
                            D,
                            PAGE,
                            STAGES,
                            True,
                            False,
                        ),
                    ),
                    (
                        _bring,
                        (
                            k_desc,
                            v_desc,
                            k_pages,
                            v_pages,
                            k_full,
                            v_full,
                            empty,
                            table_ptr,
                            rows,
                            columns,
                            kv_head * D,
                            split,
                            num_splits,
                            num_pages,
                            BN,
                            D,
                            PAGE,
                            STAGES,
                            False,
                            True,
                        ),
                    ),
                ],
                [1, 1],
                [40, 40],
            )
        else:
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
                            unit,
                            sequence,
                            kv_head,
                            split,
                            num_splits,
                            num_pages,
                            Q,
                            G,
                            D,
                            BM,
                            BN,
                            PAGE,
                            CAUSAL,
                            STAGES,
                            AHEAD,
                            IDLE,
                        ),
                    ),
                    (
                        _bring,
                        (
                            k_desc,
                            v_desc,
                            k_pages,
                            v_pages,
                            k_full,
                            v_full,
                            empty,
                            table_ptr,
                            rows,
                            columns,
                            kv_head * D,
                            split,
                            num_splits,
                            num_pages,
                            BN,
                            D,
                            PAGE,
                            STAGES,
                            True,
                            True,
                        ),
                    ),
                ],
                [1],
                [40],
            )


@triton.jit(do_not_specialize=["Q", "kv_heads", "num_splits"])
def _bulk_merge_kernel(
    part_ptr,
    stat_ptr,
    out_ptr,
    start_ptr,
    kv_len_ptr,
    out_row_stride,
    kv_heads,
    num_splits,
    Q,
    G: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    SP: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program merges one (query, head) over all splits."""
    if PDL and not EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    query_row, head = tl.program_id(0), tl.program_id(1)
    sequence, query = query_row // Q, query_row % Q
    row = query * G + head % G
    unit = sequence * kv_heads + head // G
    start = tl.load(start_ptr + sequence, volatile=EARLY).to(tl.int32)
    kv_len = tl.load(kv_len_ptr + sequence, volatile=EARLY).to(tl.int32)
    seen = kv_len
    if CAUSAL:
        seen = tl.minimum(start + query + 1, kv_len)
    active = tl.minimum(tl.cdiv(seen, PAGE), num_splits)
    s, d = tl.arange(0, SP), tl.arange(0, D)
    used = s < active
    at = (unit * num_splits + s) * BM
    if PDL and EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    best = tl.load(stat_ptr + 2 * at + row, mask=used, other=-1e30)
    total = tl.load(stat_ptr + 2 * at + BM + row, mask=used, other=0.0)
    values = tl.load(part_ptr + (at + row)[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
    gain = tl.exp2(best - tl.max(best, 0))
    whole = tl.sum(total * gain, 0)
    mean = tl.sum(values * gain[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out_ptr + query_row.to(tl.int64) * out_row_stride + head * D + d, mean.to(out_ptr.dtype.element_ty))


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
    num_splits: int,
    positions: int,
    num_stages: int,
    part: Tensor,
    stat: Tensor,
    pdl: bool,
    max_registers: int = 128,
    ahead: bool = False,
    two: bool = False,
    idle: bool = False,
    early: bool = True,
    merge_warps: int = 1,
) -> None:
    """`bulk_splits` and the merge."""
    bulk_splits(
        q_NhD,
        k_cache,
        v_cache,
        q_len=q_len,
        q_start_R=q_start_R,
        kv_len_R=kv_len_R,
        block_table_RB=block_table_RB,
        causal=causal,
        num_splits=num_splits,
        positions=positions,
        num_stages=num_stages,
        part=part,
        stat=stat,
        pdl=pdl,
        max_registers=max_registers,
        ahead=ahead,
        two=two,
        idle=idle,
    )
    N, h, D = q_NhD.shape
    g = k_cache.shape[2]
    _bulk_merge_kernel[(N, h)](
        part,
        stat,
        out_NE,
        q_start_R,
        kv_len_R,
        out_NE.stride(0),
        g,
        num_splits,
        q_len,
        G=h // g,
        D=D,
        BM=64,
        SP=triton.next_power_of_2(num_splits),
        PAGE=k_cache.shape[1],
        CAUSAL=causal,
        EARLY=early,
        PDL=pdl,
        num_warps=merge_warps,
        launch_pdl=pdl,
    )


def bulk_splits(
    q_NhD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_len: int,
    q_start_R: Tensor,
    kv_len_R: Tensor,
    block_table_RB: Tensor,
    causal: bool,
    num_splits: int,
    positions: int,
    num_stages: int,
    part: Tensor,
    stat: Tensor,
    pdl: bool,
    max_registers: int = 128,
    ahead: bool = False,
    two: bool = False,
    idle: bool = False,
) -> None:
    """Leaves the parts of every split for the merge of `engine.kernels.decode_attention`."""
    _, h, D = q_NhD.shape
    blocks, page, g, _ = k_cache.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    descs = [
        TensorDescriptor.from_tensor(cache.view(blocks * page, g * D), [page, 64], layout)
        for cache in (k_cache, v_cache)
    ]
    _bulk_kernel[(block_table_RB.shape[0] * g, num_splits)](
        q_NhD,
        *descs,
        block_table_RB,
        q_start_R,
        kv_len_R,
        part,
        stat,
        q_NhD.stride(0),
        block_table_RB.stride(0),
        D**-0.5,
        g,
        num_splits,
        block_table_RB.shape[1],
        q_len,
        G=h // g,
        D=D,
        BM=64,
        BN=positions,
        PAGE=page,
        CAUSAL=causal,
        STAGES=num_stages,
        AHEAD=ahead,
        TWO=two,
        IDLE=idle,
        PDL=pdl,
        num_warps=4,
        maxnreg=max_registers,
        launch_pdl=pdl,
    )
