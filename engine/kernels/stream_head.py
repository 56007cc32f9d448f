"""Head and largest logits of few rows on SM90, the weight brought by the tensor copy engine as in `stream_gemm`.

A program an SM takes tiles of weight rows, as many apart as there are programs: one warp asks for weights, four
multiply. Each thread keeps, for each of its places in a tile, the largest logit so far and the tile it was in; only at
its end does a program look for the largest of all. What is left to the kernel behind is one pair per row and program.
The first weights are asked for before the wait for the kernel before this one.

A row's bits depend on that row alone, and are the same whether the logits or their peaks are written.

Shapes: M rows, K inputs, V columns of the rank's vocabulary shard, C programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.gemm_choice import PeakCut
from engine.kernels.shard_argmax import argmax_of_chunks
from engine.kernels.stream_copies import BOX

_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_END = gl.constexpr(-1)  # in a tile's place: there is none left


@gluon.jit
def _compare(
    w_tiles,
    x_tiles,
    tile_of,
    w_full,
    x_full,
    empty,
    value_ptr,
    id_ptr,
    logits_ptr,
    M,
    V,
    logits_stride,
    BM: gl.constexpr,
    TILE: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    LOGITS: gl.constexpr,
    PDL: gl.constexpr,
):
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = gl.arange(0, TILE, gl.SliceLayout(1, SUMS))
    m = gl.arange(0, BM, gl.SliceLayout(0, SUMS))
    mbarrier.wait(w_full.index(0), 0)
    tile = gl.max(tile_of.index(0).load(ONE), 0)
    best = gl.full([TILE, BM], float("-inf"), gl.float32, SUMS)
    tile_of_best = gl.full([TILE, BM], 0, gl.int32, SUMS) + tile
    broken = best != best
    number = tile * 0
    while tile != _END:
        sums = gl.zeros([TILE, BM], gl.float32, SUMS)
        for _ in range(STEPS):
            stage = number % STAGES
            phase = (number // STAGES) & 1
            mbarrier.wait(w_full.index(stage), phase)
            mbarrier.wait(x_full.index(stage), phase)
            sums = warpgroup_mma(w_tiles.index(stage), x_tiles.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            tl.debug_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            number += 1
        column = tile * TILE + row
        inside = (column < V)[:, None]
        if LOGITS:
            at = m.to(gl.int64)[None, :] * logits_stride + column[:, None]
            gl.store(logits_ptr + at, sums, mask=(m < M)[None, :] & inside)
        else:
            better = (sums > best) & inside  # a program's tiles ascend: of equal logits the first is kept
            best = gl.where(better, sums, best)
            tile_of_best = gl.where(better, tile, tile_of_best)
            broken = broken | ((sums != sums) & inside)
        stage = number % STAGES
        mbarrier.wait(w_full.index(stage), (number // STAGES) & 1)
        tile = gl.max(tile_of.index(stage).load(ONE), 0)
    if not LOGITS:
        value = gl.max(best, 0)
        column = tile_of_best * TILE + row[:, None]
        first = gl.min(gl.where(best == value[None, :], column, 2147483647), 0)
        value = gl.where(gl.max(broken.to(gl.int32), 0) > 0, float("nan"), value)
        at = m * gl.num_programs(0) + gl.program_id(0)
        gl.store(value_ptr + at, value, mask=m < M)
        gl.store(id_ptr + at, first, mask=m < M)


@gluon.jit
def _bring_weights(w_desc, w_units, w_full, stage, tile, step, TILE: gl.constexpr, BK: gl.constexpr):
    BOXES: gl.constexpr = BK // BOX
    mbarrier.expect(w_full.index(stage), TILE * BK * 2)
    for box in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(
            w_desc, [tile * TILE, step * BK + box * BOX], w_full.index(stage), w_units.index(stage * BOXES + box)
        )


@gluon.jit
def _bring_rows(x_desc, x_units, x_full, stage, step, BM: gl.constexpr, BK: gl.constexpr):
    BOXES: gl.constexpr = BK // BOX
    mbarrier.expect(x_full.index(stage), BM * BK * 2)
    for box in gl.static_range(BOXES):
        tma.async_copy_global_to_shared(
            x_desc, [0, step * BK + box * BOX], x_full.index(stage), x_units.index(stage * BOXES + box)
        )


@gluon.jit
def _announce(tile_of, stage, tile):
    """Before the arrival at the stage's barrier that lets others read it."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    tile_of.index(stage).store(gl.full([1], 0, gl.int32, ONE) + tile)
    tl.debug_barrier()


@gluon.jit
def _bring(
    w_desc,
    x_desc,
    w_units,
    x_units,
    tile_of,
    w_full,
    x_full,
    empty,
    num_tiles,
    BM: gl.constexpr,
    TILE: gl.constexpr,
    BK: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    tile = gl.program_id(0)
    _announce(tile_of, 0, tile)
    for step in range(STAGES):
        _bring_weights(w_desc, w_units, w_full, step, tile, step, TILE, BK)
    if PDL:
        gdc_wait()
    number = tile * 0
    while tile < num_tiles:
        for step in range(STEPS):
            stage = number % STAGES
            if number >= STAGES:  # the first fill is on its way
                mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
                if step == 0:
                    _announce(tile_of, stage, tile)
                _bring_weights(w_desc, w_units, w_full, stage, tile, step, TILE, BK)
            _bring_rows(x_desc, x_units, x_full, stage, step, BM, BK)
            number += 1
        tile += gl.num_programs(0)
    stage = number % STAGES
    mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
    _announce(tile_of, stage, _END)
    mbarrier.arrive(w_full.index(stage), count=1)


@gluon.jit(do_not_specialize=["M", "V", "num_tiles"])
def _head_kernel(
    w_desc,
    x_desc,
    value_ptr,
    id_ptr,
    logits_ptr,
    M,
    V,
    num_tiles,
    logits_stride,
    BM: gl.constexpr,
    TILE: gl.constexpr,
    BK: gl.constexpr,
    STEPS: gl.constexpr,
    STAGES: gl.constexpr,
    LOGITS: gl.constexpr,
    SHARED: gl.constexpr,
    PDL: gl.constexpr,
):
    BOXES: gl.constexpr = BK // BOX
    w_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, BK], SHARED)
    x_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], SHARED)
    # A tile lies in pieces of 64 columns, row after row: a copy is one of them.
    w_units = w_tiles._reinterpret(gl.bfloat16, [STAGES * BOXES, TILE, BOX], SHARED)
    x_units = x_tiles._reinterpret(gl.bfloat16, [STAGES * BOXES, BM, BOX], SHARED)
    tile_of = gl.allocate_shared_memory(gl.int32, [STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    w_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(w_full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
        mbarrier.init(x_full.index(stage), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _compare,
                (
                    w_tiles,
                    x_tiles,
                    tile_of,
                    w_full,
                    x_full,
                    empty,
                    value_ptr,
                    id_ptr,
                    logits_ptr,
                    M,
                    V,
                    logits_stride,
                    BM,
                    TILE,
                    STEPS,
                    STAGES,
                    LOGITS,
                    PDL,
                ),
            ),
            (
                _bring,
                (
                    w_desc,
                    x_desc,
                    w_units,
                    x_units,
                    tile_of,
                    w_full,
                    x_full,
                    empty,
                    num_tiles,
                    BM,
                    TILE,
                    BK,
                    STEPS,
                    STAGES,
                    PDL,
                ),
            ),
        ],
        [1],
        [40],
    )


def stream_argmax(
    x_MK: Tensor, weight_VK: Tensor, vocab_start: int, *, cut: PeakCut, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`shard_argmax` of `stream_logits`, which are not written."""
    programs = _num_programs(weight_VK, cut)
    value_MC = torch.empty(x_MK.shape[0], programs, dtype=torch.float32, device=x_MK.device)
    id_MC = torch.empty(x_MK.shape[0], programs, dtype=torch.int32, device=x_MK.device)
    _head(x_MK, weight_VK, cut, value_MC, id_MC, None, pdl)
    return argmax_of_chunks(value_MC, id_MC, vocab_start, pdl=pdl)


def stream_logits(x_MK: Tensor, weight_VK: Tensor, *, cut: PeakCut, pdl: bool = False) -> Tensor:
    """x @ weight.T, float32 [M, V]: the very numbers that `stream_argmax` compares."""
    logits_MV = torch.empty(x_MK.shape[0], weight_VK.shape[0], dtype=torch.float32, device=x_MK.device)
    _head(x_MK, weight_VK, cut, logits_MV, logits_MV, logits_MV, pdl)
    return logits_MV


def _num_programs(weight_VK: Tensor, cut: PeakCut) -> int:
    return min(cut.num_programs, triton.cdiv(weight_VK.shape[0], cut.outputs))


def _head(
    x_MK: Tensor,
    weight_VK: Tensor,
    cut: PeakCut,
    value_MC: Tensor,
    id_MC: Tensor,
    logits_MV: Tensor | None,
    pdl: bool,
) -> None:
    """The copies' descriptors are arguments of the launch: a captured one keeps them."""
    (M, K), V = x_MK.shape, weight_VK.shape[0]
    steps = K // cut.inputs
    assert 0 < M <= cut.rows
    assert steps * cut.inputs == K and cut.num_stages <= steps
    assert weight_VK.shape[1] == K and weight_VK.is_contiguous()
    assert x_MK.dtype == weight_VK.dtype == torch.bfloat16
    assert x_MK.stride(1) == 1
    _head_kernel[(_num_programs(weight_VK, cut),)](
        TensorDescriptor.from_tensor(weight_VK, [cut.outputs, BOX.value], _SHARED),
        TensorDescriptor.from_tensor(x_MK, [cut.rows, BOX.value], _SHARED),
        value_MC,
        id_MC,
        value_MC if logits_MV is None else logits_MV,
        M,
        V,
        triton.cdiv(V, cut.outputs),
        0 if logits_MV is None else logits_MV.stride(0),
        BM=cut.rows,
        TILE=cut.outputs,
        BK=cut.inputs,
        STEPS=steps,
        STAGES=cut.num_stages,
        LOGITS=logits_MV is not None,
        SHARED=_SHARED,
        PDL=pdl,
        num_warps=4,
        maxnreg=64 if cut.rows * cut.outputs <= 1024 else 128,
        launch_pdl=pdl,
    )
