"""Heads as a product leaves them, turned within the attention that reads them (`engine.kernels.bulk_attention`).

Norm, rotation and cache writes of `engine.kernels.row_ops.rotate_and_write`, rounded where that rounds, without a
launch of their own: queries go to shared memory, and the block's keys and values there in place of what the cache held.

Shapes: Q queries of a sequence, G query heads per KV head, D head size.
"""

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.attention.cuda_choice import UNIT
from engine.kernels.device_ops import KEPT

_UNIT = gl.constexpr(UNIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unturned:
    """What turns heads: the rows' angles (cos, sin) [N, 1, D] and slots, weights [h + g, D] of the heads' norm."""

    angles: tuple[Tensor, Tensor]
    slots_N: Tensor
    norm: Tensor | None
    eps: float


@gluon.jit
def _rounded(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _factors(norm_at, cos_ptr, sin_ptr, angle_at, read, HALF: gl.constexpr, HEAD_NORM: gl.constexpr):
    """What turns rows of heads: their norm's weights at norm_at, cosines, and sines of the second half."""
    cos = gl.load(cos_ptr + angle_at, mask=read, other=0.0, eviction_policy=KEPT)
    sin = gl.load(sin_ptr + angle_at + HALF, mask=read, other=0.0, eviction_policy=KEPT)
    norm_low, norm_high = cos, cos
    if HEAD_NORM:
        norm_low = gl.load(norm_at, eviction_policy=KEPT)
        norm_high = gl.load(norm_at + HALF, eviction_policy=KEPT)
    return norm_low, norm_high, cos, sin


@gluon.jit
def _turned(low, high, factors, eps, D: gl.constexpr, HEAD_NORM: gl.constexpr):
    """Halves of heads, turned."""
    low, high = low.to(gl.float32), high.to(gl.float32)
    cos, sin = factors[2].to(gl.float32), factors[3].to(gl.float32)
    if HEAD_NORM:
        rms = gl.rsqrt((gl.sum(low * low, 1) + gl.sum(high * high, 1)) / D + eps)[:, None]
        low = _rounded(_rounded(low * rms) * factors[0].to(gl.float32))
        high = _rounded(_rounded(high * rms) * factors[1].to(gl.float32))
    new_low = _rounded(low * cos) - high * sin
    new_high = _rounded(high * cos) + low * sin
    return new_low.to(gl.bfloat16), new_high.to(gl.bfloat16)


@gluon.jit
def turn_heads(
    q_halves,
    x_ptr,
    x_stride,
    turn,
    sequence,
    kv_head,
    kv_heads,
    start,
    longest,
    unit,
    Q,
    G: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    HEAD_NORM: gl.constexpr,
    PDL: gl.constexpr,
):
    """One KV head's queries into a tile of BM rows, given as its halves of the columns.

    Of the block's keys and values those in one unit of 16 positions go to the cache; their halves are returned, with
    the unit's positions that they are at and those within the length. Waits for the product that makes the heads, not
    for weights and angles.

    turn: the pointers to weights, angles, slots and caches, the stride of the angles' rows, the norm's epsilon.
    """
    HALF: gl.constexpr = D // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HALF // 8), HALF // 8], [4, 1], [1, 0])
    norm_ptr, cos_ptr, sin_ptr, slot_ptr, k_ptr, v_ptr, angle_stride, eps = turn
    d = gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))
    m = gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
    real = (m < Q * G)[:, None]
    q_row, q_column = sequence * Q + m // G, (kv_head * G + m % G) * D
    q_factors = _factors(
        norm_ptr + q_column[:, None] + d[None, :],
        cos_ptr,
        sin_ptr,
        (q_row * angle_stride)[:, None] + d[None, :],
        real,
        HALF,
        HEAD_NORM,
    )
    place = unit * _UNIT + gl.arange(0, _UNIT, gl.SliceLayout(1, LAYOUT))
    new = (place >= start) & (place < gl.minimum(longest, start + Q))
    row = gl.where(new, sequence * Q + place - start, 0)
    k_column = row * 0 + (kv_heads * G + kv_head) * D
    k_factors = _factors(
        norm_ptr + k_column[:, None] + d[None, :],
        cos_ptr,
        sin_ptr,
        (row * angle_stride)[:, None] + d[None, :],
        new[:, None],
        HALF,
        HEAD_NORM,
    )
    slot = gl.load(slot_ptr + row, mask=new, other=0, eviction_policy=KEPT)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q_at = x_ptr + (q_row * x_stride + q_column)[:, None] + d[None, :]
    q_low, q_high = gl.load(q_at, mask=real, other=0.0), gl.load(q_at + HALF, mask=real, other=0.0)
    k_at = x_ptr + (row * x_stride + k_column)[:, None] + d[None, :]
    k_low, k_high = gl.load(k_at, mask=new[:, None], other=0.0), gl.load(k_at + HALF, mask=new[:, None], other=0.0)
    v_at = k_at + kv_heads * D
    v_low, v_high = gl.load(v_at, mask=new[:, None], other=0.0), gl.load(v_at + HALF, mask=new[:, None], other=0.0)
    tl.debug_barrier()  # keeps the loads together: else some are asked for when others have come
    q_low, q_high = _turned(q_low, q_high, q_factors, eps, D, HEAD_NORM)
    q_halves.index(0).store(q_low)
    q_halves.index(1).store(q_high)
    k_low, k_high = _turned(k_low, k_high, k_factors, eps, D, HEAD_NORM)
    cell = (slot * (kv_heads * D) + kv_head * D)[:, None] + d[None, :]
    gl.store(k_ptr + cell, k_low, mask=new[:, None])
    gl.store(k_ptr + cell + HALF, k_high, mask=new[:, None])
    gl.store(v_ptr + cell, v_low, mask=new[:, None])
    gl.store(v_ptr + cell + HALF, v_high, mask=new[:, None])
    return new, place < longest, k_low, k_high, v_low, v_high


@gluon.jit
def put_new(k_units, v_units, made, low_unit, high_unit, D: gl.constexpr):
    """What `turn_heads` returned in place of what lies in two units, the halves of the columns.

    Values past the length, which may be no number, become zeros.
    """
    HALF: gl.constexpr = D // 2
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HALF // 8), HALF // 8], [4, 1], [1, 0])
    new, held = made[0][:, None], made[1][:, None]
    k_low = gl.where(new, made[2], k_units.index(low_unit).load(LAYOUT))
    k_high = gl.where(new, made[3], k_units.index(high_unit).load(LAYOUT))
    v_low = gl.where(new, made[4], gl.where(held, v_units.index(low_unit).load(LAYOUT), 0.0))
    v_high = gl.where(new, made[5], gl.where(held, v_units.index(high_unit).load(LAYOUT), 0.0))
    k_units.index(low_unit).store(k_low)
    v_units.index(low_unit).store(v_low)
    k_units.index(high_unit).store(k_high)
    v_units.index(high_unit).store(v_high)
