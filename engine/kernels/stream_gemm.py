"""Matrix products of few rows on SM90, their weights brought by the tensor copy engine: what `row_gemm` computes.

One warp only asks for weights and rows of x, as many steps ahead as shared memory has room for, and on from one unit of
a program to the next; four only multiply. A unit is a share of the sum over K of one tile of 64 weight rows, units of a
tile lie `num_tiles` apart. With `pdl` the first weights are asked for before the wait for the kernel before this one:
what fills shared memory is on its way when that ends. Weights are never written while kernels run.

A row's bits depend on that row alone: not on the others, their number, or timing.

Shapes: M rows, K inputs, N outputs, P parts of a row's sum of squares.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from engine.kernels.gemm_choice import STREAM_TILE, StreamCut
from engine.kernels.row_gemm import Scaled
from engine.kernels.stream_copies import BOX, TILE, bring
from engine.kernels.stream_int8 import SHARED_INT8
from engine.kernels.stream_multiply import multiply

_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_MAX_REGISTERS = 64  # of a thread at launch, so that the next kernel's programs fit beside


@gluon.jit(do_not_specialize=["M", "num_parts"])
def _stream_kernel(
    w_desc,
    x_desc,
    scale_ptr,
    bias_ptr,
    squares_ptr,
    residual_ptr,
    out_ptr,
    next_norm_ptr,
    scaled_ptr,
    squares_out_ptr,
    part_ptr,
    count_ptr,
    M,
    N,
    num_tiles,
    num_units,
    num_parts,
    residual_stride,
    out_stride,
    eps,
    K: gl.constexpr,
    STEPS: gl.constexpr,
    UNITS: gl.constexpr,
    EVEN: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    HALVES: gl.constexpr,
    PARTS: gl.constexpr,
    SPLITS: gl.constexpr,
    INT8: gl.constexpr,
    NORM: gl.constexpr,
    SWIGLU: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    SCALED: gl.constexpr,
    STAGGERED: gl.constexpr,
    STAGES: gl.constexpr,
    W_SHARED: gl.constexpr,
    SHARED: gl.constexpr,
    PDL: gl.constexpr,
):
    W_TYPE: gl.constexpr = gl.int8 if INT8 else gl.bfloat16
    W_BOX: gl.constexpr = 2 * BOX if INT8 else BOX
    w_tiles = gl.allocate_shared_memory(W_TYPE, [STAGES, TILE, BK], W_SHARED)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], SHARED)
    y_tile = gl.allocate_shared_memory(gl.float32, [TILE, BM], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # A tile lies in pieces of 128 bytes of columns, row after row: a copy is one of them, or its gate or up rows.
    w_units = w_tiles._reinterpret(W_TYPE, [STAGES * (BK // W_BOX) * HALVES, TILE // HALVES, W_BOX], W_SHARED)
    x_units = x_tiles._reinterpret(gl.bfloat16, [STAGES * (BK // BOX), BM, BOX], SHARED)
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(w_full.index(stage), count=1)
        mbarrier.init(x_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    first_unit = gl.program_id(0) * UNITS
    own_units = UNITS if EVEN else min(UNITS, num_units - first_unit)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    w_tiles,
                    x_tiles,
                    y_tile,
                    w_full,
                    x_full,
                    empty,
                    first_unit,
                    own_units,
                    num_tiles,
                    scale_ptr,
                    bias_ptr,
                    squares_ptr,
                    residual_ptr,
                    out_ptr,
                    next_norm_ptr,
                    scaled_ptr,
                    squares_out_ptr,
                    part_ptr,
                    count_ptr,
                    M,
                    N,
                    num_parts,
                    residual_stride,
                    out_stride,
                    eps,
                    K,
                    STEPS,
                    BM,
                    BK,
                    PARTS,
                    SPLITS,
                    INT8,
                    NORM,
                    SWIGLU,
                    BIAS,
                    RESIDUAL,
                    SCALED,
                    STAGES,
                    PDL,
                ),
            ),
            (
                bring,
                (
                    w_desc,
                    x_desc,
                    w_units,
                    x_units,
                    w_full,
                    x_full,
                    empty,
                    first_unit,
                    own_units,
                    num_tiles,
                    N,
                    STEPS,
                    BM,
                    BK,
                    HALVES,
                    1 if INT8 else 2,
                    STAGGERED,
                    STAGES,
                    PDL,
                ),
            ),
        ],
        [1],
        [40],
    )


def stream_gemm(
    x_MK: Tensor | Scaled,
    weight: Tensor,
    out_MN: Tensor,
    *,
    cut: StreamCut,
    scale: Tensor | None = None,
    count: Tensor | None = None,
    bias: Tensor | None = None,
    swiglu: bool = False,
    residual_MN: Tensor | None = None,
    next_norm: tuple[Tensor, float] | None = None,
    pdl: bool = False,
) -> Scaled | None:
    """The arguments are those of `engine.kernels.row_gemm.row_gemm`. bfloat16, at most the cut's rows.

    The copies' descriptors are arguments of the launch: a captured one keeps them.
    """
    scaled_in = x_MK if isinstance(x_MK, Scaled) else None
    x = x_MK.x_MK if isinstance(x_MK, Scaled) else x_MK
    M, K = x.shape
    N = out_MN.shape[1]
    num_tiles = weight.shape[0] // STREAM_TILE
    units = num_tiles * cut.num_splits
    steps = K // cut.inputs // cut.num_splits
    assert cut.rows >= M
    assert weight.shape == ((2 if swiglu else 1) * N, K)
    assert num_tiles * STREAM_TILE == weight.shape[0]
    assert steps * cut.inputs * cut.num_splits == K
    assert x.dtype == torch.bfloat16
    assert weight.dtype == (torch.bfloat16 if scale is None else torch.int8)
    assert out_MN.dtype == torch.bfloat16 or (out_MN.dtype == torch.float32 and residual_MN is None and not swiglu)
    assert scale is None or (cut.inputs in (128, 256) and scale.dtype == torch.float32)
    assert weight.is_contiguous()
    assert x.stride(1) == out_MN.stride(1) == 1
    assert residual_MN is None or (residual_MN.stride(1) == 1 and residual_MN.shape == out_MN.shape)
    assert bias is None or not swiglu
    part = None
    if cut.num_splits > 1:
        assert count is not None and num_tiles <= count.numel()
        # Free again behind the call: the allocator's memory is in the order of the stream.
        part = torch.empty(units * cut.rows * STREAM_TILE, dtype=torch.float32, device=x.device)
    made = None
    if next_norm is not None:
        squares = torch.empty(M, num_tiles, dtype=torch.float32, device=x.device)
        made = Scaled(x_MK=x.new_empty(M, N), squares_MP=squares, eps=next_norm[1])
    parts = 1 if scaled_in is None else scaled_in.squares_MP.shape[1]
    halves = 2 if swiglu else 1
    nothing = out_MN  # a pointer nobody follows
    w_shared, w_box = (_SHARED, BOX.value) if scale is None else (SHARED_INT8, 2 * BOX.value)
    _stream_kernel[(-(-units // cut.units),)](
        TensorDescriptor.from_tensor(weight, [STREAM_TILE // halves, w_box], w_shared),
        TensorDescriptor.from_tensor(x, [cut.rows, BOX.value], _SHARED),
        nothing if scale is None else scale,
        nothing if bias is None else bias,
        nothing if scaled_in is None else scaled_in.squares_MP,
        nothing if residual_MN is None else residual_MN,
        out_MN,
        nothing if next_norm is None else next_norm[0],
        nothing if made is None else made.x_MK,
        nothing if made is None else made.squares_MP,
        nothing if part is None else part,
        nothing if part is None else count,
        M,
        N,
        num_tiles,
        units,
        parts,
        0 if residual_MN is None else residual_MN.stride(0),
        out_MN.stride(0),
        0.0 if scaled_in is None else scaled_in.eps,
        K=K,
        STEPS=steps,
        UNITS=cut.units,
        EVEN=units % cut.units == 0,
        BM=cut.rows,
        BK=cut.inputs,
        HALVES=halves,
        PARTS=max(64, 1 << (parts - 1).bit_length()),  # few kernels for all the cuts that may come before
        SPLITS=cut.num_splits,
        INT8=scale is not None,
        NORM=scaled_in is not None,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        RESIDUAL=residual_MN is not None,
        SCALED=made is not None,
        STAGGERED=cut.staggered,
        STAGES=cut.num_stages,
        W_SHARED=w_shared,
        SHARED=_SHARED,
        PDL=pdl,
        num_warps=4,
        maxnreg=_MAX_REGISTERS,
        launch_pdl=pdl,
    )
    return made
