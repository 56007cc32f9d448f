"""Matrix products of few rows in Triton: y = x @ weight.T with what surrounds it in a decoder layer fused in.

After the product: the factor of an RMS norm, bias, SwiGLU of two halves of the weight, residual addition. Products and
sums are float32. `num_splits` programs may share the sum over K: each leaves its part, and the last one adds them in
order, so a result does not depend on timing. A program makes few columns: with few rows the weights are all there is to
read, and every SM should read some.

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
from engine.kernels.device_ops import begin, inverse_rms, prefetch, rounded
from engine.kernels.gemm_choice import GemmCut

_LINE_BYTES = 128
_MOST_LINES = 1024  # of weights asked for ahead of the wait


@triton.jit(do_not_specialize=["M", "num_parts"])
def _row_gemm_kernel(
    x_ptr,
    weight_ptr,
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
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    LINE_ELEMENTS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, split, m_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * BN + tl.arange(0, BN)
    exists = n < N
    weight_at = weight_ptr + tile.to(tl.int64) * BN * K
    left = (N - tile * BN) * K
    prefetch(weight_at, left, LINES, LINE_ELEMENTS)
    if SWIGLU:
        prefetch(weight_at + N * K, left, LINES, LINE_ELEMENTS)
    begin(PDL)
    m = m_tile * BM + tl.arange(0, BM)
    real = m < M
    k = tl.arange(0, BK)
    rows = tl.arange(0, BN)[:, None] * K
    sums = tl.zeros([BM, BN], tl.float32)
    if SWIGLU:
        up_sums = tl.zeros([BM, BN], tl.float32)
    STEPS: tl.constexpr = (K + BK - 1) // BK
    PER_SPLIT: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    first = split * PER_SPLIT
    for step in tl.range(first, tl.minimum(first + PER_SPLIT, STEPS), num_stages=STAGES):
        at = step * BK + k
        inside = at < K
        x = tl.load(x_ptr + m[:, None] * x_stride + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        read = exists[:, None] & inside[None, :]
        weight = tl.load(weight_at + rows + at[None, :], mask=read, other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision=PRECISION)
        if SWIGLU:
            up_weight = tl.load(weight_at + N * K + rows + at[None, :], mask=read, other=0.0)
            up_sums = tl.dot(x, tl.trans(up_weight), up_sums, input_precision=PRECISION)
    write = real[:, None] & exists[None, :]
    last = True
    if SPLITS > 1:
        unit = m_tile * tl.num_programs(0) + tile
        cells = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        part = part_ptr + unit.to(tl.int64) * SPLITS * BM * BN + cells
        tl.store(part + split * BM * BN, sums)
        tl.debug_barrier()  # every thread's part comes before the count
        last = tl.atomic_add(count_ptr + unit, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(count_ptr + unit, 0)  # ready for the next launch
            sums = tl.zeros([BM, BN], tl.float32)
            for other in tl.static_range(SPLITS):
                sums += tl.load(part + other * BM * BN, cache_modifier=".cg")
    if last:
        if NORM:
            rms = inverse_rms(squares_ptr, m, real, num_parts, eps, K, PARTS)[:, None]
            sums *= rms
            if SWIGLU:
                up_sums *= rms
        if BIAS:
            sums += tl.load(bias_ptr + n, mask=exists, other=0.0).to(tl.float32)[None, :]
        if SWIGLU:
            gate = rounded(sums, out_ptr)
            sums = rounded(gate / (1.0 + tl.exp(-gate)), out_ptr) * rounded(up_sums, out_ptr)
        if RESIDUAL:
            residual = tl.load(residual_ptr + m[:, None] * residual_stride + n[None, :], mask=write, other=0.0)
            sums = rounded(sums, out_ptr) + residual.to(tl.float32)
        out = sums.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + m[:, None] * out_stride + n[None, :], out, mask=write)
        if SCALED:
            value = out.to(tl.float32)
            norm = tl.load(next_norm_ptr + n, mask=exists, other=0.0).to(tl.float32)
            scaled = (value * norm[None, :]).to(scaled_ptr.dtype.element_ty)
            tl.store(scaled_ptr + m[:, None] * N + n[None, :], scaled, mask=write)
            squares = tl.sum(tl.where(exists[None, :], value * value, 0.0), 1)
            tl.store(squares_out_ptr + m * tl.num_programs(0) + tile, squares, mask=real)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """Rows ready for a norm's reader: x times the norm's weight [M, K], sums of squares of x [M, P] float32, eps."""

    x_MK: Tensor
    squares_MP: Tensor
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmWorkspace:
    """Parts of split sums, and counters, which are zero between calls. Calls that may run at the same time need their
    own; calls of one stream may share."""

    part: Tensor
    count: Tensor

    @classmethod
    def create(cls, device: torch.device, *, part_elements: int, counters: int) -> "GemmWorkspace":
        return cls(
            part=torch.empty(part_elements, dtype=torch.float32, device=device),
            count=torch.zeros(counters, dtype=torch.int32, device=device),
        )


def part_elements(rows: int, outputs: int, cut: GemmCut) -> int:
    """Numbers in the parts of a product of so many rows and outputs."""
    BM = _tile_rows(rows)
    return triton.cdiv(rows, BM) * BM * triton.cdiv(outputs, cut.outputs) * cut.outputs * cut.num_splits


def _tile_rows(rows: int) -> int:
    return min(64, max(16, triton.next_power_of_2(rows)))


def row_gemm(
    x_MK: Tensor | Scaled,
    weight: Tensor,
    out_MN: Tensor,
    *,
    cut: GemmCut,
    workspace: GemmWorkspace | None = None,
    bias: Tensor | None = None,
    swiglu: bool = False,
    residual_MN: Tensor | None = None,
    next_norm: tuple[Tensor, float] | None = None,
    pdl: bool = False,
) -> Scaled | None:
    """Writes x @ weight.T, with bias, SwiGLU and residual where given, into out; of a Scaled x, its norm.

    weight [N, K], with swiglu [2 * N, K] (gate rows, up rows). x, residual and out may have any row stride; out's type
    may be float32 where nothing is fused behind. next_norm: (weight [N], eps) of the norm that reads out; its Scaled
    rows are returned. workspace: needed at num_splits > 1.
    """
    scaled_in = x_MK if isinstance(x_MK, Scaled) else None
    x = x_MK.x_MK if isinstance(x_MK, Scaled) else x_MK
    M, K = x.shape
    N = out_MN.shape[1]
    assert weight.shape == ((2 if swiglu else 1) * N, K)
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    assert x.stride(1) == out_MN.stride(1) == 1
    assert residual_MN is None or (residual_MN.stride(1) == 1 and residual_MN.shape == out_MN.shape)
    assert cut.num_splits == 1 or (not swiglu and workspace is not None)
    BM = _tile_rows(M)
    m_tiles, n_tiles = triton.cdiv(M, BM), triton.cdiv(N, cut.outputs)
    if workspace is not None and cut.num_splits > 1:
        assert m_tiles * n_tiles <= workspace.count.numel()
        assert part_elements(M, N, cut) <= workspace.part.numel()
    made = None
    if next_norm is not None:
        squares = torch.empty(M, n_tiles, dtype=torch.float32, device=x.device)
        made = Scaled(x_MK=x.new_empty(M, N), squares_MP=squares, eps=next_norm[1])
    parts = 1 if scaled_in is None else scaled_in.squares_MP.shape[1]
    line_elements = _LINE_BYTES // weight.element_size()
    lines = min(_MOST_LINES, triton.next_power_of_2(triton.cdiv(cut.outputs * K, line_elements)))
    nothing = out_MN  # a pointer nobody follows
    _row_gemm_kernel[(n_tiles, cut.num_splits, m_tiles)](
        x,
        weight,
        nothing if bias is None else bias,
        nothing if scaled_in is None else scaled_in.squares_MP,
        nothing if residual_MN is None else residual_MN,
        out_MN,
        nothing if next_norm is None else next_norm[0],
        nothing if made is None else made.x_MK,
        nothing if made is None else made.squares_MP,
        nothing if workspace is None else workspace.part,
        nothing if workspace is None else workspace.count,
        M,
        N,
        parts,
        x.stride(0),
        0 if residual_MN is None else residual_MN.stride(0),
        out_MN.stride(0),
        0.0 if scaled_in is None else scaled_in.eps,
        K=K,
        BM=BM,
        BN=cut.outputs,
        BK=cut.inputs,
        PARTS=triton.next_power_of_2(parts),
        SPLITS=cut.num_splits,
        NORM=scaled_in is not None,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        RESIDUAL=residual_MN is not None,
        SCALED=made is not None,
        PRECISION=precision(x.dtype),
        STAGES=cut.num_stages,
        LINES=lines if pdl else 0,
        LINE_ELEMENTS=line_elements,
        PDL=pdl,
        num_warps=cut.num_warps,
        launch_pdl=pdl,
    )
    return made
