"""Matrix products of few rows in Triton: y = x @ weight.T with what surrounds it in a decoder layer fused in.

After the product: the factor of an RMS norm, bias, SwiGLU of two halves of the weight, residual addition. Products and
sums are float32, and `num_splits` programs may share a sum: see `tile_product`.

A norm is split between two kernels, so that neither reads a row twice nor touches x on its way to the matrix units: the
one that makes a residual row also writes it times the next norm's weight, and its columns' sum of squares (`Scaled`);
the one that reads those multiplies by 1 / rms at the end. There is one rounding where the norm itself has two.

Shapes: M rows, K inputs, N outputs, P parts of a row's sum of squares.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_scan import precision
from engine.kernels.device_ops import KEPT, begin, prefetch_rows, rounded, row_squares
from engine.kernels.gemm_choice import GemmCut
from engine.kernels.tile_product import shared_sum, tile_product


@triton.jit(do_not_specialize=["M", "num_parts", "ahead"])
def _row_gemm_kernel(
    x_ptr,
    weight_ptr,
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
    ahead,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WEIGHT_SCALE: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    TURNED: tl.constexpr,
    STAGGERED: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    PDL: tl.constexpr,
):
    OUT: tl.constexpr = BN // 2 if SWIGLU else BN
    STEPS: tl.constexpr = (K + BK - 1) // BK
    PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    tile, split, m_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = split * PER_SPLIT
    # Rows past the end read the last one: what comes of them is not written.
    row = tl.arange(0, BN)
    weight_row = tl.minimum(tile * OUT + row % OUT, N - 1)
    if SWIGLU:
        weight_row += row // OUT * N
    weight_at = weight_ptr + weight_row.to(tl.int64) * K
    steps = tl.minimum(first + PER_SPLIT, STEPS) - first
    turn = 0
    if STAGGERED:
        turn = (tile * 5) % tl.maximum(steps, 1)
    if PDL:  # without it there is nothing to ask ahead of, and a GPU older than SM90 cannot ask so
        rest = (K - (first + turn) * BK) * ITEM_BYTES // 32 * 16  # half of what is left of a row; < 0 in an empty split
        prefetch_rows(weight_at + (first + turn) * BK, tl.maximum(tl.minimum(ahead, rest), 0), ITEM_BYTES)
    begin(PDL)
    m = m_tile * BM + tl.arange(0, BM)
    real = m < M
    x_at = x_ptr + m * x_stride
    n = tile * OUT + tl.arange(0, OUT)
    exists = n < N
    write = real[:, None] & exists[None, :]
    # What the end needs is asked for ahead of the loop.
    if NORM:
        squares = row_squares(squares_ptr, m, real, num_parts, PARTS)
    if RESIDUAL:
        residual = tl.load(residual_ptr + m[:, None] * residual_stride + n[None, :], mask=write, other=0.0)
    sums = tile_product(
        x_at, real, weight_at, first, first + steps, turn, K, BM, BN, BK, PRECISION, STAGES, TURNED, STAGGERED
    )
    last = True
    if SPLITS > 1:
        unit = m_tile * tl.num_programs(0) + tile
        last, sums = shared_sum(sums, part_ptr, count_ptr, unit, split, BM, BN, SPLITS)
    if last:
        y = sums
        if WEIGHT_SCALE:
            y *= tl.load(scale_ptr + weight_row)[None, :]
        if NORM:
            y *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        if BIAS:
            y += tl.load(bias_ptr + n, mask=exists, other=0.0).to(tl.float32)[None, :]
        if SWIGLU:
            gate, up = tl.split(tl.permute(tl.reshape(y, [BM, 2, OUT]), [0, 2, 1]))
            gate = rounded(gate, out_ptr)
            y = rounded(gate / (1.0 + tl.exp(-gate)), out_ptr) * rounded(up, out_ptr)
        if RESIDUAL:
            y = rounded(y, out_ptr) + residual.to(tl.float32)
        out = y.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + m[:, None] * out_stride + n[None, :], out, mask=write, eviction_policy=KEPT)
        if SCALED:
            value = out.to(tl.float32)
            norm = tl.load(next_norm_ptr + n, mask=exists, other=0.0).to(tl.float32)
            scaled = (value * norm[None, :]).to(scaled_ptr.dtype.element_ty)
            tl.store(scaled_ptr + m[:, None] * N + n[None, :], scaled, mask=write, eviction_policy=KEPT)
            made = tl.sum(tl.where(exists[None, :], value * value, 0.0), 1)
            tl.store(squares_out_ptr + m * tl.num_programs(0) + tile, made, mask=real, eviction_policy=KEPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """Rows ready for a norm's reader: x times the norm's weight [M, K], sums of squares of x [M, P] float32, eps."""

    x_MK: Tensor
    squares_MP: Tensor
    eps: float


def tile_rows(rows: int) -> int:
    """Rows of a tile of x."""
    return min(64, max(16, triton.next_power_of_2(rows)))


def row_gemm(
    x_MK: Tensor | Scaled,
    weight: Tensor,
    out_MN: Tensor,
    *,
    cut: GemmCut,
    scale: Tensor | None = None,
    count: Tensor | None = None,
    bias: Tensor | None = None,
    swiglu: bool = False,
    residual_MN: Tensor | None = None,
    next_norm: tuple[Tensor, float] | None = None,
    pdl: bool = False,
) -> Scaled | None:
    """Writes x @ weight.T, with bias, SwiGLU and residual where given, into out; of a Scaled x, its norm.

    weight [N, K], with swiglu [2 * N, K] (gate rows, up rows). x, residual and out may have any row stride; out's type
    may be float32 where nothing is fused behind. next_norm: (weight [N], eps) of the norm that reads out; its Scaled
    rows are returned. count: int32, needed at num_splits > 1: as many zeros as the weight has rows, which are zeros
    again afterwards; calls that may run at the same time need their own.
    """
    scaled_in = x_MK if isinstance(x_MK, Scaled) else None
    x = x_MK.x_MK if isinstance(x_MK, Scaled) else x_MK
    M, K = x.shape
    N = out_MN.shape[1]
    assert weight.shape == ((2 if swiglu else 1) * N, K)
    assert weight.is_contiguous()
    assert weight.dtype == (x.dtype if scale is None else torch.int8)
    assert scale is None or (scale.shape == weight.shape[:1] and scale.dtype == torch.float32)
    assert x.stride(1) == out_MN.stride(1) == 1
    assert residual_MN is None or (residual_MN.stride(1) == 1 and residual_MN.shape == out_MN.shape)
    assert bias is None or not swiglu
    BN = (2 if swiglu else 1) * cut.outputs
    per_split = triton.cdiv(triton.cdiv(K, cut.inputs), cut.num_splits)
    BM = tile_rows(M)
    m_tiles, n_tiles = triton.cdiv(M, BM), triton.cdiv(N, cut.outputs)
    part = None
    if cut.num_splits > 1:
        assert count is not None and m_tiles * n_tiles <= count.numel()
        # Free again behind the call: the allocator's memory is in the order of the stream.
        part = torch.empty(m_tiles * n_tiles * cut.num_splits * BM * BN, dtype=torch.float32, device=x.device)
    made = None
    if next_norm is not None:
        squares = torch.empty(M, n_tiles, dtype=torch.float32, device=x.device)
        made = Scaled(x_MK=x.new_empty(M, N), squares_MP=squares, eps=next_norm[1])
    parts = 1 if scaled_in is None else scaled_in.squares_MP.shape[1]
    item = weight.element_size()
    ahead = (
        min(cut.ahead // BN, per_split * cut.inputs * item, K * item) // 32 * 16 if pdl and K * item % 16 == 0 else 0
    )
    nothing = out_MN  # a pointer nobody follows
    _row_gemm_kernel[(n_tiles, cut.num_splits, m_tiles)](
        x,
        weight,
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
        parts,
        ahead,
        x.stride(0),
        0 if residual_MN is None else residual_MN.stride(0),
        out_MN.stride(0),
        0.0 if scaled_in is None else scaled_in.eps,
        K=K,
        BM=BM,
        BN=BN,
        BK=cut.inputs,
        PARTS=max(64, triton.next_power_of_2(parts)),  # few kernels for all the cuts that may come before
        SPLITS=cut.num_splits,
        WEIGHT_SCALE=scale is not None,
        NORM=scaled_in is not None,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        RESIDUAL=residual_MN is not None,
        SCALED=made is not None,
        PRECISION=precision(x.dtype),
        STAGES=cut.num_stages,
        TURNED=cut.turned,
        STAGGERED=cut.staggered,
        ITEM_BYTES=item,
        PDL=pdl,
        num_warps=cut.num_warps,
        launch_pdl=pdl,
    )
    return made
