"""q, k and v of few rows in one kernel: norm, projection, bias, q/k norm, rotation, and the writes to the cache.

A program makes the pairs (d, d + D/2) of one head of one layer: all of them where the head has a norm, else a slice, so
that more SMs read weights. The drafter's context takes the same kernel with the K and V heads of all its layers side by
side. Of the norm before the projection only its factor is applied here: see `Scaled` in `row_gemm`.

Shapes: M rows, K inputs, L layers, h query heads (0 for context), g KV heads, D head size.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_scan import precision
from engine.kernels.device_ops import begin, inverse_rms, prefetch, rounded
from engine.kernels.gemm_choice import HeadCut
from engine.kernels.row_gemm import Scaled

_LINE_BYTES = 128


@triton.jit(do_not_specialize=["M", "num_parts"])
def _head_gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    squares_ptr,
    head_norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    M,
    num_parts,
    x_stride,
    angle_stride,
    q_stride,
    layer_stride,
    eps,
    head_eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    LINE_ELEMENTS: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    unit, m_tile, slice_of_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    layer, head = unit // (H + 2 * G), unit % (H + 2 * G)
    weight_at = weight_ptr + unit.to(tl.int64) * D * K + slice_of_head * WIDTH * K
    prefetch(weight_at, WIDTH * K, LINES, LINE_ELEMENTS)
    prefetch(weight_at + HALF * K, WIDTH * K, LINES, LINE_ELEMENTS)
    begin(PDL)
    m = m_tile * BM + tl.arange(0, BM)
    real = m < M
    k = tl.arange(0, BK)
    rows = tl.arange(0, WIDTH)[:, None] * K
    low = tl.zeros([BM, WIDTH], tl.float32)
    high = tl.zeros([BM, WIDTH], tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        at = first + k
        inside = at < K
        x = tl.load(x_ptr + m[:, None] * x_stride + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        low_weight = tl.load(weight_at + rows + at[None, :], mask=inside[None, :], other=0.0)
        high_weight = tl.load(weight_at + HALF * K + rows + at[None, :], mask=inside[None, :], other=0.0)
        low = tl.dot(x, tl.trans(low_weight), low, input_precision=PRECISION)
        high = tl.dot(x, tl.trans(high_weight), high, input_precision=PRECISION)
    d = slice_of_head * WIDTH + tl.arange(0, WIDTH)
    if NORM:
        rms = inverse_rms(squares_ptr, m, real, num_parts, eps, K, PARTS)[:, None]
        low, high = low * rms, high * rms
    if BIAS:
        low += tl.load(bias_ptr + unit * D + d).to(tl.float32)[None, :]
        high += tl.load(bias_ptr + unit * D + HALF + d).to(tl.float32)[None, :]
    low, high = rounded(low, q_ptr), rounded(high, q_ptr)
    slot = tl.load(slot_ptr + m, mask=real, other=0)
    if head < H + G:
        if HEAD_NORM:
            rms_head = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + head_eps)[:, None]
            norm_at = head_norm_ptr + (layer * (H + G) + head) * D + d
            low = rounded(low * rms_head, q_ptr) * tl.load(norm_at).to(tl.float32)[None, :]
            high = rounded(high * rms_head, q_ptr) * tl.load(norm_at + HALF).to(tl.float32)[None, :]
            low, high = rounded(low, q_ptr), rounded(high, q_ptr)
        angle = m[:, None] * angle_stride + d[None, :]
        cos_low = tl.load(cos_ptr + angle, mask=real[:, None], other=0.0).to(tl.float32)
        cos_high = tl.load(cos_ptr + angle + HALF, mask=real[:, None], other=0.0).to(tl.float32)
        sin_low = tl.load(sin_ptr + angle, mask=real[:, None], other=0.0).to(tl.float32)
        sin_high = tl.load(sin_ptr + angle + HALF, mask=real[:, None], other=0.0).to(tl.float32)
        turned_low = rounded(low * cos_low, q_ptr) + high * sin_low
        high = rounded(high * cos_high, q_ptr) + low * sin_high
        low = turned_low
    place = q_ptr + m.to(tl.int64) * q_stride + head * D
    # 64 bits: the layers of a large cache lie more than 2^31 elements apart
    kv_place = layer.to(tl.int64) * 2 * layer_stride + slot * (G * D)
    if head >= H + G:
        place = v_ptr + kv_place + (head - H - G) * D
    elif head >= H:
        place = k_ptr + kv_place + (head - H) * D
    out = place[:, None] + d[None, :]
    tl.store(out, low.to(q_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(out + HALF, high.to(q_ptr.dtype.element_ty), mask=real[:, None])


def head_gemm(
    x_MK: Tensor | Scaled,
    weight: Tensor,
    angles: tuple[Tensor, Tensor],
    slots_M: Tensor,
    kv: tuple[Tensor, Tensor],
    q_MhD: Tensor,
    *,
    num_heads: int,
    num_layers: int = 1,
    bias: Tensor | None,
    head_norm: tuple[Tensor, float] | None,
    cut: HeadCut,
    pdl: bool = False,
) -> None:
    """Writes rotated q into q [M, h, D] and rotated k and v into the caches' slots.

    weight [L * (h + 2g) * D, K]: q, k, v heads of a layer after another. kv: the first layer's K and V caches
    [.., g, D]; layer l's lie 2 * l times their size further. angles: cos and sin [M, 1, D], the first half of sin
    negated. Of a Scaled x, its norm is projected. head_norm: (weight [L, h + g, D], eps). Rows of one call may share a
    slot only in the null block, whose contents nobody reads.
    """
    (k_cache, v_cache), (cos, sin) = kv, angles
    scaled = x_MK if isinstance(x_MK, Scaled) else None
    x = x_MK.x_MK if isinstance(x_MK, Scaled) else x_MK
    g, D = k_cache.shape[-2:]
    M, K = x.shape
    assert weight.shape == (num_layers * (num_heads + 2 * g) * D, K)
    assert weight.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert x.stride(1) == cos.stride(-1) == 1
    assert cos.stride() == sin.stride()
    assert slots_M.is_contiguous()
    assert D >= 32 and D & (D - 1) == 0
    BM = min(64, max(16, triton.next_power_of_2(M)))
    line_elements = _LINE_BYTES // weight.element_size()
    # Slices of 16 pairs where the head needs no norm over all of them.
    width = D // 2 if head_norm is not None else 16
    parts = 1 if scaled is None else scaled.squares_MP.shape[1]
    nothing = x  # a pointer nobody follows
    _head_gemm_kernel[(num_layers * (num_heads + 2 * g), triton.cdiv(M, BM), D // 2 // width)](
        x,
        weight,
        nothing if bias is None else bias,
        nothing if scaled is None else scaled.squares_MP,
        nothing if head_norm is None else head_norm[0],
        cos,
        sin,
        slots_M,
        q_MhD,
        k_cache,
        v_cache,
        M,
        parts,
        x.stride(0),
        cos.stride(0),
        q_MhD.stride(0),
        k_cache.numel(),
        0.0 if scaled is None else scaled.eps,
        0.0 if head_norm is None else head_norm[1],
        H=num_heads,
        G=g,
        D=D,
        K=K,
        BM=BM,
        BK=cut.inputs,
        WIDTH=width,
        PARTS=max(64, triton.next_power_of_2(parts)),
        NORM=scaled is not None,
        BIAS=bias is not None,
        HEAD_NORM=head_norm is not None,
        PRECISION=precision(x.dtype),
        STAGES=cut.num_stages,
        LINES=min(1024, triton.next_power_of_2(triton.cdiv(width * K, line_elements))) if pdl else 0,
        LINE_ELEMENTS=line_elements,
        PDL=pdl,
        num_warps=cut.num_warps,
        launch_pdl=pdl,
    )
