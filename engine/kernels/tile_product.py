"""What the few-row products share: a tile's product with the weights on their way, and sums that programs share.

A program makes few columns: with few rows the weights are all there is to read, and every SM should read some. It holds
pointers to its rows of x and of the weight, which need not lie together.
"""

import triton
import triton.language as tl


@triton.jit
def tile_product(
    x_at,
    real,
    weight_at,
    first_step,
    end_step,
    turn,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    TURNED: tl.constexpr,
    STAGGERED: tl.constexpr,
):
    """x [BM rows, the real ones] @ weight [BN rows].T over steps of BK columns, float32 [BM, BN].

    TURNED: computed as weight @ x.T, the form of SM90's matrix units for 64 weight rows or more. STAGGERED: the steps
    begin with number `turn` of them, so that programs do not all read the same columns at once. Weights of another
    type become x's on their way from shared memory.
    """
    k = tl.arange(0, BK)
    sums = tl.zeros([BN, BM], tl.float32) if TURNED else tl.zeros([BM, BN], tl.float32)
    for step in tl.range(first_step, end_step, num_stages=STAGES):
        place = step
        if STAGGERED:
            place = step + turn
            place = tl.where(place >= end_step, place - (end_step - first_step), place)
        at = place * BK + k
        if K % BK == 0:
            x = tl.load(x_at[:, None] + at[None, :], mask=real[:, None], other=0.0)
            weight = tl.load(weight_at[:, None] + at[None, :])
        else:
            inside = (at < K)[None, :]
            x = tl.load(x_at[:, None] + at[None, :], mask=real[:, None] & inside, other=0.0)
            weight = tl.load(weight_at[:, None] + at[None, :], mask=inside, other=0)
        weight = weight.to(x.dtype)
        if TURNED:
            sums = tl.dot(weight, tl.trans(x), sums, input_precision=PRECISION)
        else:
            sums = tl.dot(x, tl.trans(weight), sums, input_precision=PRECISION)
    if TURNED:
        sums = tl.trans(sums)
    return sums


@triton.jit
def shared_sum(sums, part_ptr, count_ptr, unit, split, BM: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr):
    """(whether this program is the last of a unit's SPLITS to come here; the sum of all their sums, where it is).

    Each leaves its part, and the last one adds them in order, so a result does not depend on timing. The unit's counter
    is zero before and after.
    """
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
    return last, sums
