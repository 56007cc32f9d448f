"""What a group of warps of `engine.kernels.bulk_attention` computes: attention over tiles that lie in shared memory."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from engine.kernels.bulk_copies import HALF, UNIT_ROWS
from engine.kernels.device_ops import KEPT
from engine.kernels.turn_heads import put_new, turn_heads

_NEVER = gl.constexpr(-1e30)  # below every score, and minus infinity less this is no NaN


@gluon.jit
def attend(
    shared,
    turn,
    G: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    CAUSAL: gl.constexpr,
    DIRECT: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    SHARED: gl.constexpr,
    TURN: gl.constexpr,
    HEAD_NORM: gl.constexpr,
    PDL: gl.constexpr,
):
    """Attention of every GROUPS-th tile of a split's `left` units. longest: the positions of all rows.

    The first group leaves what all found: the mean, or a split's maximum, sum and weighted values.
    """
    (
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
    ) = shared
    UNITS: gl.constexpr = BN // UNIT_ROWS
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    VALUE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHT: gl.constexpr = gl.DotOperandLayout(0, VALUE, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    HALVED: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HALF // 8), HALF // 8], [4, 1], [1, 0])

    m = gl.arange(0, BM, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, D, gl.SliceLayout(0, WIDE))
    real = m < Q * G
    q_row = sequence * Q + m // G
    column = (kv_head * G + m % G) * D
    # The only one with positions past the length, or of the block if that is turned here: see `bulk_attention`.
    last_unit = split + (left - 1) * num_splits
    last_tile = (left - 1) // UNITS
    in_last_tile = (left - 1) % UNITS
    if TURN:
        made = turn_heads(
            q_tile._reinterpret(gl.bfloat16, [D // HALF, BM, HALF], SHARED),
            q_ptr,
            q_row_stride,
            turn,
            sequence,
            kv_head,
            kv_heads,
            start,
            longest,
            last_unit,
            Q,
            G,
            D,
            BM,
            HEAD_NORM,
            PDL,
        )
        mixed = (last_unit + 1) * UNIT_ROWS > gl.minimum(start, longest)
    elif GROUP == 0:
        at = q_row * q_row_stride + column
        q_tile.store(gl.load(q_ptr + at[:, None] + d[None, :], mask=real[:, None], other=0.0))
        fence_async_shared()
        tl.debug_barrier()
        if GROUPS > 1:
            mbarrier.arrive(q_ready, count=1)
    else:
        mbarrier.wait(q_ready, 0)

    row = gl.arange(0, BM, ROW)
    seen = gl.zeros([BM], gl.int32, ROW) + kv_len
    seen_by_all = kv_len
    if CAUSAL:
        seen = gl.minimum(start + row // G + 1, kv_len)
        seen_by_all = gl.minimum(start + 1, kv_len)
    factor = scale * 1.4426950408889634
    nothing = gl.zeros([BM, BN], gl.float32, SCORE)
    best = gl.full([BM], _NEVER, gl.float32, ROW)
    total = gl.zeros([BM], gl.float32, ROW)
    values = gl.zeros([BM, D], gl.float32, VALUE)
    for tile in range(GROUP, last_tile + 1, GROUPS):
        stage = tile % STAGES
        phase = (tile // STAGES) & 1
        end = (split + (tile * UNITS + UNITS - 1) * num_splits + 1) * UNIT_ROWS
        mbarrier.wait(k_full.index(stage), phase)
        if TURN and mixed & (tile == last_tile):
            mbarrier.wait(v_full.index(stage), phase)
            k_units = k_tiles._reinterpret(gl.bfloat16, [STAGES * UNITS * D // HALF, UNIT_ROWS, HALF], SHARED)
            v_units = v_tiles._reinterpret(gl.bfloat16, [STAGES * UNITS * D // HALF, UNIT_ROWS, HALF], SHARED)
            low_unit = stage * UNITS * (D // HALF) + in_last_tile
            put_new(k_units, v_units, made, low_unit, low_unit + UNITS, D)
        if TURN:
            fence_async_shared()
            tl.debug_barrier()
        score = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=(score,))
        if end > seen_by_all:
            n = gl.arange(0, BN, gl.SliceLayout(0, SCORE))
            place = (split + (tile * UNITS + n // UNIT_ROWS) * num_splits) * UNIT_ROWS + n % UNIT_ROWS
            score = gl.where(place[None, :] < seen[:, None], score, float("-inf"))
        new_best = gl.maximum(best, gl.max(score, 1) * factor)
        weight = gl.exp2(score * factor - new_best[:, None])
        fade = gl.exp2(best - new_best)
        total = total * fade + gl.sum(weight, 1)
        best = new_best
        values = values * gl.convert_layout(fade, gl.SliceLayout(1, VALUE))[:, None]
        weight = gl.convert_layout(weight.to(gl.bfloat16), WEIGHT)
        mbarrier.wait(v_full.index(stage), phase)
        if not TURN and (tile == last_tile) & ((last_unit + 1) * UNIT_ROWS > longest):
            # What lies past the length may be no number: zero times that would be none. Units that the last tile
            # lacks were brought as zeros.
            v_units = v_tiles._reinterpret(gl.bfloat16, [STAGES * UNITS * D // HALF, UNIT_ROWS, HALF], SHARED)
            n = gl.arange(0, UNIT_ROWS, gl.SliceLayout(1, HALVED))
            real_n = (last_unit * UNIT_ROWS + n < longest)[:, None]
            for half in gl.static_range(D // HALF):
                unit = v_units.index(stage * UNITS * (D // HALF) + half * UNITS + in_last_tile)
                unit.store(gl.where(real_n, unit.load(HALVED), 0.0))
            fence_async_shared()
            tl.debug_barrier()
        values = warpgroup_mma(weight, v_tiles.index(stage), values, is_async=True)
        values = warpgroup_mma_wait(0, deps=(values,))
        tl.debug_barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    if GROUP > 0:
        other_values.store(values)
        other_stat.index(0).store(best)
        other_stat.index(1).store(total)
        tl.debug_barrier()
        mbarrier.arrive(other_ready, count=1)
    else:
        if GROUPS > 1:
            mbarrier.wait(other_ready, 0)
            other_best = other_stat.index(0).load(ROW)
            top = gl.maximum(best, other_best)
            gain = gl.exp2(best - top)
            other_gain = gl.exp2(other_best - top)
            total = total * gain + other_stat.index(1).load(ROW) * other_gain
            best = top
            gain = gl.convert_layout(gain, gl.SliceLayout(1, VALUE))
            other_gain = gl.convert_layout(other_gain, gl.SliceLayout(1, VALUE))
            values = values * gain[:, None] + other_values.load(VALUE) * other_gain[:, None]
        if DIRECT:
            whole = gl.convert_layout(gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, VALUE))
            q_tile.store((values / whole[:, None]).to(gl.bfloat16))
            tl.debug_barrier()
            at = q_row * out_row_stride + column
            gl.store(out_ptr + at[:, None] + d[None, :], q_tile.load(WIDE), mask=real[:, None])
        else:
            part_at = (head_of_all.to(gl.int64) * num_splits + split) * BM
            gl.store(stat_ptr + 2 * part_at + row, best, eviction_policy=KEPT)
            gl.store(stat_ptr + 2 * part_at + BM + row, total, eviction_policy=KEPT)
            m = gl.arange(0, BM, gl.SliceLayout(1, VALUE))
            d = gl.arange(0, D, gl.SliceLayout(0, VALUE))
            cells = part_ptr + part_at * D + m[:, None] * D + d[None, :]
            gl.store(cells, values, mask=(m < Q * G)[:, None], eviction_policy=KEPT)
