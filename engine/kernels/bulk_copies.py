"""The warp of `engine.kernels.bulk_attention` that asks the copy engine for K and V, and does nothing else.

It runs as many tiles ahead as shared memory has room for.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from engine.attention.cuda_choice import UNIT
from engine.kernels.device_ops import KEPT

UNIT_ROWS = gl.constexpr(UNIT)
HALF = gl.constexpr(64)  # columns of a copy: 128 bytes, the width of the swizzle


@gluon.jit
def rows_of_tile(table_ptr, first_unit, num_splits, columns, PAGE: gl.constexpr, UNITS: gl.constexpr):
    """First row in the cache of each unit of a tile; past the table's end some row that exists."""
    PER_PAGE: gl.constexpr = PAGE // UNIT_ROWS
    rows = ()
    for i in gl.static_range(UNITS):
        unit = first_unit + i * num_splits
        page = gl.minimum(unit // PER_PAGE, columns - 1)
        block = gl.load(table_ptr + page, eviction_policy=KEPT).to(gl.int32)
        rows = rows + (block * PAGE + unit % PER_PAGE * UNIT_ROWS,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _ask(desc, rows, column, units, first, full, left, UNITS: gl.constexpr, D: gl.constexpr):
    """Brings the first `left` units of a tile to units[first ..]; what lies in the others stays."""
    HALVES: gl.constexpr = D // HALF
    UNIT_BYTES: gl.constexpr = UNIT_ROWS * D * 2
    for i in gl.static_range(UNITS - 1):
        mbarrier.expect(full, (i + 1) * UNIT_BYTES, pred=left == i + 1)
    mbarrier.expect(full, UNITS * UNIT_BYTES, pred=left >= UNITS)
    for i in gl.static_range(UNITS):
        for half in gl.static_range(HALVES):
            at = [rows[i], column + half * HALF]
            tma.async_copy_global_to_shared(desc, at, full, units.index(first + half * UNITS + i), pred=left > i)


@gluon.jit
def _ask_or_zero(desc, rows, column, units, first, full, left, UNITS: gl.constexpr, D: gl.constexpr):
    """`_ask`, and zeros to the other units: rows ahead of the first, which the copy engine makes without a read."""
    HALVES: gl.constexpr = D // HALF
    mbarrier.expect(full, UNITS * UNIT_ROWS * D * 2)
    for i in gl.static_range(UNITS):
        row = gl.where(left > i, rows[i], -UNIT_ROWS)
        for half in gl.static_range(HALVES):
            at = [row, column + half * HALF]
            tma.async_copy_global_to_shared(desc, at, full, units.index(first + half * UNITS + i))


@gluon.jit
def bring(
    brought,
    PAGE: gl.constexpr,
    UNITS: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Brings a split's `left` units of one head, tile by tile, and zeros as V of the last tile's rest.

    rows: of its first tile.
    """
    (
        k_desc,
        v_desc,
        k_units,
        v_units,
        k_full,
        v_full,
        empty,
        table_ptr,
        rows,
        columns,
        column,
        split,
        num_splits,
        left,
    ) = brought
    unit = split
    for tile in range((left + UNITS - 1) // UNITS):
        stage = tile % STAGES
        mbarrier.wait(empty.index(stage), ((tile // STAGES) & 1) ^ 1)
        first = stage * UNITS * (D // HALF)
        _ask(k_desc, rows, column, k_units, first, k_full.index(stage), left, UNITS, D)
        _ask_or_zero(v_desc, rows, column, v_units, first, v_full.index(stage), left, UNITS, D)
        unit += UNITS * num_splits
        rows = rows_of_tile(table_ptr, unit, num_splits, columns, PAGE, UNITS)
        left -= UNITS
