"""Row-wise operations of a decoder layer in Triton: norms, SwiGLU, rotation with the cache writes. Any number of rows.

Each stands for a chain of torch expressions and rounds where they do.
Shapes: N rows, H hidden, L layers, h query heads, g KV heads, D head size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.device_ops import begin, rounded
from engine.kernels.row_gemm import Scaled

_SILU_COLUMNS = 1024
MOST_HEADS = 16  # of a program that rotates


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    delta_ptr,
    total_ptr,
    out_ptr,
    weight_ptr,
    x_stride,
    delta_stride,
    total_stride,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    inside = c < SIZE
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x = rounded(x + tl.load(delta_ptr + row * delta_stride + c, mask=inside, other=0.0).to(tl.float32), out_ptr)
        tl.store(total_ptr + row * total_stride + c, x.to(total_ptr.dtype.element_ty), mask=inside)
    rms = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    y = rounded(x * rms, out_ptr) * weight
    tl.store(out_ptr + row * SIZE + c, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_rows_kernel(
    x_ptr, scaled_ptr, squares_ptr, weight_ptr, x_stride, SIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, PADDED)
    inside = c < SIZE
    x = tl.load(x_ptr + row * x_stride + c, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + row * SIZE + c, (x * weight).to(scaled_ptr.dtype.element_ty), mask=inside)
    tl.store(squares_ptr + row, tl.sum(x * x, 0))


@triton.jit
def _enter_kernel(
    id_ptr,
    embedding_ptr,
    position_ptr,
    angle_ptr,
    weight_ptr,
    x_ptr,
    scaled_ptr,
    squares_ptr,
    angle_out_ptr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ANGLES: tl.constexpr,
    ANGLES_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        c = tl.arange(0, PADDED)
        inside = c < SIZE
        embedded = tl.load(embedding_ptr + tl.load(id_ptr + row) * SIZE + c, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(x_ptr + row * SIZE + c, embedded, mask=inside)
        x = embedded.to(tl.float32)
        tl.store(scaled_ptr + row * SIZE + c, (x * weight).to(scaled_ptr.dtype.element_ty), mask=inside)
        tl.store(squares_ptr + row, tl.sum(x * x, 0))
    else:
        a = tl.arange(0, ANGLES_PADDED)
        angles = tl.load(angle_ptr + tl.load(position_ptr + row) * ANGLES + a, mask=a < ANGLES)
        tl.store(angle_out_ptr + row * ANGLES + a, angles, mask=a < ANGLES)


@triton.jit
def _gather_rows_kernel(table_ptr, index_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < SIZE
    values = tl.load(table_ptr + tl.load(index_ptr + row) * SIZE + c, mask=inside)
    tl.store(out_ptr + row * SIZE + c, values, mask=inside)


@triton.jit
def _clear_rows_kernel(
    x_ptr, first_ptr, num_rows, x_stride, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    first = tl.load(first_ptr)
    begins = tl.program_id(0) * ROWS
    if begins + ROWS > first:
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        for i in range(ROWS):
            row = (begins + i).to(tl.int64)
            nothing = tl.zeros([BLOCK], x_ptr.dtype.element_ty)
            tl.store(x_ptr + row * x_stride + c, nothing, mask=(c < SIZE) & (row >= first) & (row < num_rows))


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < SIZE
    gate = tl.load(x_ptr + row * 2 * SIZE + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * SIZE + SIZE + c, mask=inside, other=0.0).to(tl.float32)
    y = rounded(gate / (1.0 + tl.exp(-gate)), out_ptr) * up
    tl.store(out_ptr + row * SIZE + c, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_write_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    head_norm_ptr,
    qkv_stride,
    angle_stride,
    layer_stride,
    eps,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program takes HEADS heads of one row and layer."""
    begin(PDL)
    HALF: tl.constexpr = D // 2
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF_PADDED)
    inside = (head < H + 2 * G)[:, None] & (d < HALF)[None, :]
    at = qkv_ptr + row * qkv_stride + layer * (H + 2 * G) * D + head[:, None] * D + d[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    turns = (head < H + G)[:, None]
    new_low, new_high = low, high
    if HEAD_NORM:
        rms = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
        weight_at = head_norm_ptr + (layer * (H + G) + head[:, None]) * D + d[None, :]
        new_low = rounded(low * rms, q_ptr) * tl.load(weight_at, mask=inside & turns, other=0.0).to(tl.float32)
        new_high = rounded(high * rms, q_ptr) * tl.load(weight_at + HALF, mask=inside & turns, other=0.0).to(tl.float32)
        new_low, new_high = rounded(new_low, q_ptr), rounded(new_high, q_ptr)
    angle = row * angle_stride + d
    cos_low = tl.load(cos_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos_ptr + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin_ptr + angle, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin_ptr + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    turned_low = rounded(new_low * cos_low, q_ptr) + new_high * sin_low
    turned_high = rounded(new_high * cos_high, q_ptr) + new_low * sin_high
    low = tl.where(turns, turned_low, low).to(q_ptr.dtype.element_ty)
    high = tl.where(turns, turned_high, high).to(q_ptr.dtype.element_ty)
    # 64 bits: the layers of a large cache lie more than 2^31 elements apart
    kv_at = layer.to(tl.int64) * 2 * layer_stride + tl.load(slot_ptr + row) * (G * D)
    is_q, is_v = (head < H)[:, None], (head >= H + G)[:, None]
    q_at = q_ptr + row * (H * D) + head[:, None] * D + d[None, :]
    tl.store(q_at, low, mask=inside & is_q)
    tl.store(q_at + HALF, high, mask=inside & is_q)
    k_at = k_ptr + kv_at + (head[:, None] - H) * D + d[None, :]
    is_k = turns & (head >= H)[:, None]
    tl.store(k_at, low, mask=inside & is_k)
    tl.store(k_at + HALF, high, mask=inside & is_k)
    v_at = v_ptr + kv_at + (head[:, None] - H - G) * D + d[None, :]
    tl.store(v_at, low, mask=inside & is_v)
    tl.store(v_at + HALF, high, mask=inside & is_v)


def rms_norm(x_NH: Tensor, weight_H: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps), rounded, times weight, over the last dimension of any shape."""
    size = x_NH.shape[-1]
    rows = _rows(x_NH)
    out = x_NH.new_empty(x_NH.shape)
    if rows.shape[0]:
        _norm(rows, None, None, out, weight_H, eps, pdl, size)
    return out


def add_rms_norm(
    x_NH: Tensor, delta_NH: Tensor, weight_H: Tensor, eps: float, *, total_NH: Tensor | None = None, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """(x + delta, its rms_norm), [N, H]. total_NH: where the sum goes, rows any stride apart."""
    assert x_NH.shape == delta_NH.shape
    total = x_NH.new_empty(x_NH.shape) if total_NH is None else total_NH
    out = x_NH.new_empty(x_NH.shape)
    if x_NH.shape[0]:
        _norm(x_NH, delta_NH, total, out, weight_H, eps, pdl, x_NH.shape[1])
    return total, out


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1])


def _norm(
    x: Tensor, delta: Tensor | None, total: Tensor | None, out: Tensor, weight: Tensor, eps: float, pdl: bool, size: int
) -> None:
    assert x.stride(1) == 1
    assert delta is None or delta.stride(1) == 1
    assert total is None or total.stride(1) == 1
    _rms_norm_kernel[(x.shape[0],)](
        x,
        x if delta is None else delta,
        out if total is None else total,
        out,
        weight,
        x.stride(0),
        0 if delta is None else delta.stride(0),
        0 if total is None else total.stride(0),
        eps,
        SIZE=size,
        PADDED=triton.next_power_of_2(size),
        ADD=delta is not None,
        PDL=pdl,
        num_warps=1 if size <= 256 else 4 if size <= 2048 or x.shape[0] >= 256 else 8,
        launch_pdl=pdl,
    )


def scale_rows(x_NH: Tensor, weight_H: Tensor, eps: float, *, pdl: bool = False) -> Scaled:
    """Rows that no kernel of `row_gemm` made, ready for the readers of their norm."""
    N, H = x_NH.shape
    assert x_NH.stride(1) == 1
    made = Scaled(x_MK=x_NH.new_empty(N, H), squares_MP=x_NH.new_empty(N, 1, dtype=torch.float32), eps=eps)
    _scale_rows_kernel[(N,)](
        x_NH,
        made.x_MK,
        made.squares_MP,
        weight_H,
        x_NH.stride(0),
        SIZE=H,
        PADDED=triton.next_power_of_2(H),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return made


def gather_rows(table: Tensor, index_N: Tensor, *, pdl: bool = False) -> Tensor:
    """table[index], [N, ..]: torch's kernel for few rows takes several times as long. Indices must be valid."""
    assert table.is_contiguous()
    assert index_N.dim() == 1
    index_N = index_N.contiguous()
    N, size = index_N.shape[0], table[0].numel()
    out = table.new_empty(N, *table.shape[1:])
    if N:
        block = min(1024, triton.next_power_of_2(size))
        _gather_rows_kernel[(N, triton.cdiv(size, block))](
            table, index_N, out, SIZE=size, BLOCK=block, PDL=pdl, num_warps=min(4, max(1, block // 128)), launch_pdl=pdl
        )
    return out


def enter_rows(
    embedding: Tensor,
    ids_N: Tensor,
    angles: Tensor,
    positions_N: Tensor,
    weight_H: Tensor,
    eps: float,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Scaled]:
    """(embedding[ids], angles[positions], `scale_rows` of the first) in one launch. Indices must be valid."""
    assert embedding.is_contiguous()
    assert angles.is_contiguous()
    ids_N, positions_N = ids_N.contiguous(), positions_N.contiguous()
    N, H, size = ids_N.shape[0], embedding.shape[1], angles[0].numel()
    x_NH = embedding.new_empty(N, H)
    angles_N = angles.new_empty(N, *angles.shape[1:])
    made = Scaled(x_MK=x_NH.new_empty(N, H), squares_MP=x_NH.new_empty(N, 1, dtype=torch.float32), eps=eps)
    _enter_kernel[(N, 2)](
        ids_N,
        embedding,
        positions_N,
        angles,
        weight_H,
        x_NH,
        made.x_MK,
        made.squares_MP,
        angles_N,
        SIZE=H,
        PADDED=triton.next_power_of_2(H),
        ANGLES=size,
        ANGLES_PADDED=triton.next_power_of_2(size),
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return x_NH, angles_N, made


def clear_rows(x_NH: Tensor, first_1: Tensor, *, pdl: bool = False) -> None:
    """Zeros in rows first_1 (an integer on the device) and beyond; rows ahead of it are not touched."""
    N, H = x_NH.shape
    assert x_NH.stride(1) == 1
    if N:
        block = min(1024, triton.next_power_of_2(H))
        _clear_rows_kernel[(triton.cdiv(N, 16), triton.cdiv(H, block))](
            x_NH, first_1, N, x_NH.stride(0), SIZE=H, ROWS=16, BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
        )


def silu_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """[N, 2 * size] -> silu(first half) * second half, [N, size]."""
    assert gate_up.is_contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    if rows:
        _silu_mul_kernel[(rows, triton.cdiv(size, _SILU_COLUMNS))](
            gate_up, out, SIZE=size, BLOCK=_SILU_COLUMNS, PDL=pdl, num_warps=4, launch_pdl=pdl
        )
    return out


def rotate_and_write(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    slots_N: Tensor,
    kv: tuple[Tensor, Tensor],
    *,
    num_heads: int,
    num_layers: int = 1,
    head_norm: tuple[Tensor, float] | None,
    pdl: bool = False,
) -> Tensor:
    """qkv [N, L * (h + 2g) * D] -> rotated q [N, h, D]; rotated k and v are written to the caches' slots.

    The arguments are those of `engine.kernels.head_gemm.head_gemm`, the projection done.
    """
    (k_cache, v_cache), (cos, sin) = kv, angles
    g, D = k_cache.shape[-2:]
    N = slots_N.shape[0]
    assert qkv.shape == (N, num_layers * (num_heads + 2 * g) * D)
    assert qkv.stride(1) == cos.stride(-1) == 1
    assert cos.stride() == sin.stride()
    assert slots_N.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert k_cache.dtype == v_cache.dtype == qkv.dtype
    q = qkv.new_empty(N, num_heads, D)
    heads = min(MOST_HEADS, triton.next_power_of_2(num_heads + 2 * g))
    grid = (N, num_layers, triton.cdiv(num_heads + 2 * g, heads))
    if N:
        _rotate_and_write_kernel[grid](
            qkv,
            q if num_heads else qkv,
            k_cache,
            v_cache,
            cos,
            sin,
            slots_N,
            qkv if head_norm is None else head_norm[0],
            qkv.stride(0),
            cos.stride(0),
            k_cache.numel(),
            0.0 if head_norm is None else head_norm[1],
            H=num_heads,
            G=g,
            D=D,
            HEADS=heads,
            HALF_PADDED=triton.next_power_of_2(D // 2),
            HEAD_NORM=head_norm is not None,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return q
