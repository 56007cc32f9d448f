"""q, k and v of few rows in one kernel: RMS norm, projection, bias, q/k norm, rotation, and the writes to the cache.

A program makes one head of one layer: its columns are whole, so the norm over them and the pairs (d, d + D/2) of the
rotation are at hand. The drafter's context takes the same kernel with the K and V heads of all its layers side by side.
Roundings are those of the torch form.

Shapes: M rows, K inputs, L layers, h query heads (0 for context), g KV heads, D head size.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.attention_scan import precision
from engine.kernels.device_ops import begin, inverse_rms, normed, prefetch, rounded
from engine.kernels.gemm_choice import HeadCut
from engine.kernels.row_gemm import norm_columns

_LINE_BYTES = 128


@triton.jit(do_not_specialize=["M"])
def _head_gemm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    head_norm_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    M,
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
    NORM_BK: tl.constexpr,
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
    unit, m_tile = tl.program_id(0), tl.program_id(1)
    layer, head = unit // (H + 2 * G), unit % (H + 2 * G)
    weight_at = weight_ptr + unit.to(tl.int64) * D * K
    prefetch(weight_at, D * K, LINES, LINE_ELEMENTS)
    begin(PDL)
    m = m_tile * BM + tl.arange(0, BM)
    real = m < M
    if NORM:
        rms = inverse_rms(x_ptr, m, real, x_stride, eps, K, NORM_BK)
    k = tl.arange(0, BK)
    d = tl.arange(0, HALF)
    rows = d[:, None] * K
    low = tl.zeros([BM, HALF], tl.float32)
    high = tl.zeros([BM, HALF], tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        at = first + k
        inside = at < K
        x = tl.load(x_ptr + m[:, None] * x_stride + at[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        if NORM:
            x = normed(x, rms, tl.load(norm_ptr + at, mask=inside, other=0.0), x_ptr)
        low_weight = tl.load(weight_at + rows + at[None, :], mask=inside[None, :], other=0.0)
        high_weight = tl.load(weight_at + HALF * K + rows + at[None, :], mask=inside[None, :], other=0.0)
        low = tl.dot(x, tl.trans(low_weight), low, input_precision=PRECISION)
        high = tl.dot(x, tl.trans(high_weight), high, input_precision=PRECISION)
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
    kv_place = layer * 2 * layer_stride + slot * (G * D)
    if head >= H + G:
        place = v_ptr + kv_place + (head - H - G) * D
    elif head >= H:
        place = k_ptr + kv_place + (head - H) * D
    out = place[:, None] + d[None, :]
    tl.store(out, low.to(q_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(out + HALF, high.to(q_ptr.dtype.element_ty), mask=real[:, None])


def head_gemm(
    x_MK: Tensor,
    weight: Tensor,
    angles: tuple[Tensor, Tensor],
    slots_M: Tensor,
    kv: tuple[Tensor, Tensor],
    q_MhD: Tensor,
    *,
    num_heads: int,
    num_layers: int = 1,
    bias: Tensor | None,
    norm: tuple[Tensor, float] | None,
    head_norm: tuple[Tensor, float] | None,
    cut: HeadCut,
    pdl: bool = False,
) -> None:
    """Writes rotated q into q [M, h, D] and rotated k and v into the caches' slots.

    weight [L * (h + 2g) * D, K]: q, k, v heads of a layer after another. kv: the first layer's K and V caches
    [.., g, D]; layer l's lie 2 * l times their size further. angles: cos and sin [M, 1, D], the first half of sin
    negated. norm: (weight [K], eps) of x; head_norm: (weight [L, h + g, D], eps). Rows of one call may share a slot
    only in the null block, whose contents nobody reads.
    """
    (k_cache, v_cache), (cos, sin) = kv, angles
    g, D = k_cache.shape[-2:]
    M, K = x_MK.shape
    assert weight.shape == (num_layers * (num_heads + 2 * g) * D, K)
    assert weight.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert x_MK.stride(1) == cos.stride(-1) == 1
    assert cos.stride() == sin.stride()
    assert slots_M.is_contiguous()
    assert D >= 32 and D & (D - 1) == 0
    BM = min(64, max(16, triton.next_power_of_2(M)))
    line_elements = _LINE_BYTES // weight.element_size()
    nothing = x_MK  # a pointer nobody follows
    _head_gemm_kernel[(num_layers * (num_heads + 2 * g), triton.cdiv(M, BM))](
        x_MK,
        weight,
        nothing if bias is None else bias,
        nothing if norm is None else norm[0],
        nothing if head_norm is None else head_norm[0],
        cos,
        sin,
        slots_M,
        q_MhD,
        k_cache,
        v_cache,
        M,
        x_MK.stride(0),
        cos.stride(0),
        q_MhD.stride(0),
        k_cache.numel(),
        0.0 if norm is None else norm[1],
        0.0 if head_norm is None else head_norm[1],
        H=num_heads,
        G=g,
        D=D,
        K=K,
        BM=BM,
        BK=cut.inputs,
        NORM_BK=norm_columns(K, BM),
        NORM=norm is not None,
        BIAS=bias is not None,
        HEAD_NORM=head_norm is not None,
        PRECISION=precision(x_MK.dtype),
        STAGES=cut.num_stages,
        LINES=min(1024, triton.next_power_of_2(triton.cdiv(D * K, line_elements))) if pdl else 0,
        LINE_ELEMENTS=line_elements,
        PDL=pdl,
        num_warps=cut.num_warps,
        launch_pdl=pdl,
    )
