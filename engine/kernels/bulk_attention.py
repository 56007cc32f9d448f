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

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.cuda_choice import UNIT, BulkCut
from engine.kernels.attention_scan import check_layout
from engine.kernels.bulk_copies import HALF, UNIT_ROWS, bring, rows_of_tile
from engine.kernels.bulk_scan import attend
from engine.kernels.device_ops import KEPT
from engine.kernels.merge_splits import Workspace, merge_splits
from engine.kernels.turn_heads import Unturned

_MAX_REGISTERS = 128  # of a thread at launch, so that the next kernel's programs fit beside; warps then trade them
_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_PAIRS = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
_LINE = gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit(do_not_specialize=["Q", "kv_heads", "num_splits", "columns"])
def _bulk_kernel(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    table_ptr,
    start_ptr,
    kv_len_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    k_ptr,
    v_ptr,
    angle_stride,
    eps,
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
    TURN: gl.constexpr,
    HEAD_NORM: gl.constexpr,
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
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    q_ready, other_ready = empty, empty
    other_values, other_stat = q_tile, q_tile
    if GROUPS > 1:
        # One group has no use for these, and where nobody uses a barrier any more the compiler puts what the warps are
        # told: the number of units and their rows would lie over an object that still is a barrier.
        q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        other_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(q_ready, count=1)
        mbarrier.init(other_ready, count=1)
        other_values = gl.allocate_shared_memory(gl.float32, [BM, D], PAIRS)
        other_stat = gl.allocate_shared_memory(gl.float32, [2, BM], LINE)
    fence_async_shared()
    if PDL and not TURN:
        gdc_wait()
        gdc_launch_dependents()
    head_of_all, split = gl.program_id(0), gl.program_id(1)
    sequence = head_of_all // kv_heads
    kv_head = head_of_all % kv_heads
    start = gl.load(start_ptr + sequence, eviction_policy=KEPT).to(gl.int32)
    kv_len = gl.load(kv_len_ptr + sequence, eviction_policy=KEPT).to(gl.int32)
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
            kv_heads,
            split,
            num_splits,
            left,
            Q,
        )
        turn = (norm_ptr, cos_ptr, sin_ptr, slot_ptr, k_ptr, v_ptr, angle_stride, eps)
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
                    (
                        attend,
                        (
                            shared,
                            turn,
                            G,
                            D,
                            BM,
                            BN,
                            CAUSAL,
                            DIRECT,
                            STAGES,
                            GROUPS,
                            FIRST,
                            SHARED,
                            TURN,
                            HEAD_NORM,
                            PDL,
                        ),
                    ),
                    (
                        attend,
                        (
                            shared,
                            turn,
                            G,
                            D,
                            BM,
                            BN,
                            CAUSAL,
                            DIRECT,
                            STAGES,
                            GROUPS,
                            SECOND,
                            SHARED,
                            TURN,
                            HEAD_NORM,
                            PDL,
                        ),
                    ),
                    (bring, (brought, PAGE, UNITS, D, STAGES)),
                ],
                [4, 1],
                [168, 40],
            )
        else:
            gl.warp_specialize(
                [
                    (
                        attend,
                        (
                            shared,
                            turn,
                            G,
                            D,
                            BM,
                            BN,
                            CAUSAL,
                            DIRECT,
                            STAGES,
                            GROUPS,
                            FIRST,
                            SHARED,
                            TURN,
                            HEAD_NORM,
                            PDL,
                        ),
                    ),
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
    unturned: Unturned | None = None,
    pdl: bool = False,
) -> None:
    """Writes the attention of R x q_len rows, sequence by sequence, into out_NE [N, h * D]. bfloat16.

    See `engine.attention.context` for the other shapes. workspace: `Workspace.create` of the cut; None at one split.
    unturned: q_NhD are all heads [N, h + 2g, D] as the product leaves them, keys and values are written to the cache,
        and this is launched right behind the product: what older kernels left is read before that has ended.
    """
    blocks, block_size, g, D = k_cache.shape
    h = out_NE.shape[1] // D
    check_layout(q_NhD, k_cache, v_cache, out_NE, block_table_RB)
    assert q_NhD.shape[1] == (h if unturned is None else h + 2 * g)
    # Each of the block's units is another split's, its last.
    assert unturned is None or (q_len <= UNIT * (cut.num_splits - 1) and cut.groups == 1)
    assert q_len * (h // g) <= cut.rows
    assert (cut.num_splits > 1) == (workspace is not None)
    # A stage is one group's alone, which so has seen every phase of its barriers: to who has not, one that is still to
    # come looks like the one before, and a tile that came late would be taken for there.
    assert cut.num_stages % cut.groups == 0
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
        nothing if unturned is None or unturned.norm is None else unturned.norm,
        nothing if unturned is None else unturned.angles[0],
        nothing if unturned is None else unturned.angles[1],
        q_start_R if unturned is None else unturned.slots_N,
        k_cache,
        v_cache,
        0 if unturned is None else unturned.angles[0].stride(0),
        0.0 if unturned is None else unturned.eps,
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
        TURN=unturned is not None,
        HEAD_NORM=unturned is not None and unturned.norm is not None,
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
