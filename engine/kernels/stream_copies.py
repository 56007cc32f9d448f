"""The warp of `engine.kernels.stream_gemm` that asks the copy engine for weights and rows of x, and does nothing else.

It runs as many steps ahead as shared memory has room for, and on from one unit of its program to the next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from engine.kernels.gemm_choice import STREAM_TILE

BOX = gl.constexpr(64)  # columns of a copy of x: 128 bytes, the width of the swizzle
TILE = gl.constexpr(STREAM_TILE)


@gluon.jit
def bring(
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
    STEPS: gl.constexpr,
    BM: gl.constexpr,
    BK: gl.constexpr,
    HALVES: gl.constexpr,
    ITEM_BYTES: gl.constexpr,
    STAGGERED: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Brings the STEPS steps of each of a program's own_units units, at least one. ITEM_BYTES: of a weight."""
    weights = (w_desc, w_units, w_full, first_unit, num_tiles, N)
    ahead = min(STAGES, STEPS * own_units)
    for number in range(ahead):
        _bring_weights(weights, number, STEPS, BK, HALVES, ITEM_BYTES, STAGGERED, STAGES)
    if PDL:
        gdc_wait()
    for number in range(STEPS * own_units):
        stage = number % STAGES
        mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
        if number >= ahead:
            _bring_weights(weights, number, STEPS, BK, HALVES, ITEM_BYTES, STAGGERED, STAGES)
        unit = first_unit + number // STEPS
        tile, split = unit % num_tiles, unit // num_tiles
        column = (split * STEPS + _turned(number % STEPS, tile, STEPS, STAGGERED)) * BK
        mbarrier.expect(x_full.index(stage), BM * BK * 2)
        for box in gl.static_range(BK // BOX):
            tma.async_copy_global_to_shared(
                x_desc, [0, column + box * BOX], x_full.index(stage), x_units.index(stage * (BK // BOX) + box)
            )


@gluon.jit
def _turned(step, tile, STEPS: gl.constexpr, STAGGERED: gl.constexpr):
    if STAGGERED:
        step = (step + tile * 5) % STEPS
    return step


@gluon.jit
def _bring_weights(
    weights,
    number,
    STEPS: gl.constexpr,
    BK: gl.constexpr,
    HALVES: gl.constexpr,
    ITEM_BYTES: gl.constexpr,
    STAGGERED: gl.constexpr,
    STAGES: gl.constexpr,
):
    w_desc, w_units, w_full, first_unit, num_tiles, N = weights
    COLUMNS: gl.constexpr = 128 // ITEM_BYTES
    BOXES: gl.constexpr = BK // COLUMNS
    HEIGHT: gl.constexpr = TILE // HALVES
    stage = number % STAGES
    unit = first_unit + number // STEPS
    tile, split = unit % num_tiles, unit // num_tiles
    place = split * STEPS + _turned(number % STEPS, tile, STEPS, STAGGERED)
    mbarrier.expect(w_full.index(stage), TILE * BK * ITEM_BYTES)
    for box in gl.static_range(BOXES):
        for half in gl.static_range(HALVES):
            at = [tile * HEIGHT + half * N, place * BK + box * COLUMNS]
            tma.async_copy_global_to_shared(
                w_desc, at, w_full.index(stage), w_units.index((stage * BOXES + box) * HALVES + half)
            )
