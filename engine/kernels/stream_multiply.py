"""What the warps of `engine.kernels.stream_gemm` that multiply do with the tiles that are brought, and behind them.

Shapes: M rows, K inputs, N outputs, P parts of a row's sum of squares.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.device_ops import KEPT, forget
from engine.kernels.stream_copies import TILE
from engine.kernels.stream_int8 import widened


@gluon.jit
def _rounded(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def multiply(
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
    K: gl.constexpr,
    STEPS: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    PARTS: gl.constexpr,
    SPLITS: gl.constexpr,
    INT8: gl.constexpr,
    NORM: gl.constexpr,
    SWIGLU: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    SCALED: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """own_units units from first_unit on. See `row_gemm` for what is fused behind a product."""
    OUT: gl.constexpr = TILE // 2 if SWIGLU else TILE
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LONG: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    END: gl.constexpr = gl.BlockedLayout([4 if SWIGLU else 8, 1], [8, 4], [1, 4], [0, 1])
    LIST: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    m = gl.arange(0, BM, gl.SliceLayout(0, END))
    real = m < M
    factor = gl.full([BM], 1.0, gl.float32, gl.SliceLayout(0, END))
    if NORM:
        row = gl.arange(0, BM, gl.SliceLayout(1, LIST))
        part = gl.arange(0, PARTS, gl.SliceLayout(0, LIST))
        read = (row < M)[:, None] & (part < num_parts)[None, :]
        squares = gl.load(squares_ptr + row[:, None] * num_parts + part[None, :], mask=read, other=0.0)
    for own in range(own_units):
        unit = first_unit + own
        tile, split = unit % num_tiles, unit // num_tiles
        n = tile * OUT + gl.arange(0, OUT, gl.SliceLayout(1, END))
        write = real[None, :] & (n < N)[:, None]
        residual = gl.zeros([OUT, BM], gl.float32, END)
        if BIAS:
            bias = gl.load(bias_ptr + n, mask=n < N, other=0.0, eviction_policy=KEPT).to(gl.float32)
        if SCALED:
            norm = gl.load(next_norm_ptr + n, mask=n < N, other=0.0, eviction_policy=KEPT).to(gl.float32)
        if RESIDUAL:
            at = residual_ptr + m[None, :] * residual_stride + n[:, None]
            residual = gl.load(at, mask=write, other=0.0).to(gl.float32)
        sums = gl.zeros([TILE, BM], gl.float32, SUMS)
        for step in range(STEPS):
            number = own * STEPS + step
            stage = number % STAGES
            phase = (number // STAGES) & 1
            mbarrier.wait(w_full.index(stage), phase)
            mbarrier.wait(x_full.index(stage), phase)
            weights = widened(w_tiles.index(stage), BK, SUMS) if INT8 else w_tiles.index(stage)
            sums = warpgroup_mma(weights, x_tiles.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            tl.debug_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        if NORM:  # behind the product, which so does not wait for the squares
            factor = gl.convert_layout(gl.rsqrt(gl.sum(squares, 1) / K + eps), gl.SliceLayout(0, END))
        y = gl.convert_layout(sums, LONG)
        last = True
        if SPLITS > 1:
            weight_row = gl.arange(0, TILE, gl.SliceLayout(1, LONG))
            cell = weight_row[:, None] + TILE * gl.arange(0, BM, gl.SliceLayout(0, LONG))[None, :]
            part_at = part_ptr + tile * (SPLITS * BM * TILE) + cell
            gl.store(part_at + split * (BM * TILE), y, eviction_policy=KEPT)
            tl.debug_barrier()
            last = gl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
            if last:
                gl.store(count_ptr + tile, 0)
                y = gl.zeros([TILE, BM], gl.float32, LONG)
                for other in gl.static_range(SPLITS):
                    y += gl.load(part_at + other * (BM * TILE), cache_modifier=".cg")
        if last:
            if INT8:
                of = gl.arange(0, TILE, gl.SliceLayout(1, LONG))
                y *= gl.load(scale_ptr + tile * OUT + of % OUT + of // OUT * N)[:, None]
            if SWIGLU:
                y_tile.store(y)
                tl.debug_barrier()
                gate = y_tile.slice(0, OUT, dim=0).load(END) * factor[None, :]
                up = y_tile.slice(OUT, OUT, dim=0).load(END) * factor[None, :]
                tl.debug_barrier()
                gate = _rounded(gate)
                value = _rounded(gate / (1.0 + gl.exp(-gate))) * _rounded(up)
            else:
                value = gl.convert_layout(y, END) * factor[None, :]
                if BIAS:
                    value += bias[:, None]
            if RESIDUAL:
                value = _rounded(value) + residual
            out = value.to(out_ptr.dtype.element_ty)
            gl.store(out_ptr + m[None, :] * out_stride + n[:, None], out, mask=write, eviction_policy=KEPT)
            if SCALED:
                value = out.to(gl.float32)
                scaled = (value * norm[:, None]).to(gl.bfloat16)
                gl.store(scaled_ptr + m[None, :] * N + n[:, None], scaled, mask=write, eviction_policy=KEPT)
                total = gl.sum(gl.where(write, value * value, 0.0), 0)
                gl.store(squares_out_ptr + m * num_tiles + tile, total, mask=real, eviction_policy=KEPT)
            if SPLITS > 1:
                tl.debug_barrier()
                line = gl.arange(0, BM * TILE // 32, gl.BlockedLayout([1], [32], [4], [0])) * 32
                for other in gl.static_range(SPLITS):
                    forget(part_ptr + (tile * SPLITS + other) * (BM * TILE) + line)
