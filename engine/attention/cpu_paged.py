"""Paged attention on the CPU by the compiled kernel of `cpu_attention_ir`; the reference where that cannot run.

A query's result does not depend on the other rows of the step, on padding or on the number of threads, bit for bit.
Shapes: N rows, n rows of a group, R sequences, h heads, D head size.
"""

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.context import AttentionContext, AttentionGroup
from engine.attention.cpu_job import Word, score_stride, scratch_floats
from engine.attention.reference import paged_attention
from engine.layers.cpu_jit import KERNEL_DTYPES, JobKernel, compile_ir, unavailable_reason
from engine.layers.cpu_rows import float_bits
from engine.layers.cpu_tile_ir import WeightType

QUERIES_PER_UNIT = 16  # K and V are widened once for so many queries; more would leave threads without work
_MIN_TEAM_WORK = 1 << 17  # multiply-adds below which waking the other threads costs more than it saves


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlan:
    """A group's work, made at the step's first layer. job: every word but the layer's tensors and the counters.

    kept: the tensors whose addresses are in the job.
    """

    job: Any
    threads: int
    kept: tuple[Tensor, ...]


@functools.cache
def attention_kernel(dtype: torch.dtype, *, wide: bool = False) -> JobKernel:
    """The compiled kernel; wide: its output is float32, rounded to the type."""
    return JobKernel(_code(KERNEL_DTYPES[dtype]), "attention_wide" if wide else "attention")


@functools.cache
def _code(kind: WeightType) -> Any:
    from engine.attention.cpu_attention_ir import module_ir  # imports llvmlite, which not every machine has

    return compile_ir(module_ir(kind), optimise=True)


def cpu_paged_attention(q_NhD: Tensor, k_cache: Tensor, v_cache: Tensor, ctx: AttentionContext) -> Tensor:
    """Softmax attention scaled by 1 / sqrt(D); see `engine.attention.context.Attention` for the shapes."""
    N, h, D = q_NhD.shape
    suited = q_NhD.device.type == "cpu" and q_NhD.dtype in KERNEL_DTYPES and D % 8 == 0
    if not suited or unavailable_reason() is not None or any(window_matters(group) for group in ctx.groups):
        return paged_attention(q_NhD, k_cache, v_cache, ctx)
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert k_cache.dtype == v_cache.dtype == q_NhD.dtype
    if q_NhD.stride(2) != 1 or q_NhD.stride(1) != D:
        q_NhD = q_NhD.contiguous()
    every_row = sum(group.num_rows for group in ctx.groups) == N
    out_NE = torch.empty(N, h * D, dtype=q_NhD.dtype) if every_row else torch.zeros(N, h * D, dtype=q_NhD.dtype)
    kernel, q_stride = attention_kernel(q_NhD.dtype), q_NhD.stride(0)
    for group in ctx.groups:
        key = (cpu_paged_attention, h, *k_cache.shape[1:])
        plan = group.cache.get(key)
        if plan is None:
            plan = group.cache[key] = group_plan(group, h, k_cache)
        assert isinstance(plan, GroupPlan)
        first = group.first_row * q_NhD.element_size()
        job = plan.job
        job[Word.Q] = q_NhD.data_ptr() + first * q_stride
        job[Word.Q_STRIDE] = q_stride
        job[Word.K] = k_cache.data_ptr()
        job[Word.V] = v_cache.data_ptr()
        job[Word.OUT] = out_NE.data_ptr() + first * h * D
        job[Word.TICKET] = job[Word.COUNTER] = 0
        kernel.run(job, plan.threads)
    return out_NE


def window_matters(group: AttentionGroup) -> bool:
    """Some query may see less than its first positions, which is all the kernel knows."""
    return group.window is not None and int(group.q_start_R.max()) + max(group.q_lens) > group.window


def group_plan(group: AttentionGroup, h: int, k_cache: Tensor, *, threads: int | None = None) -> GroupPlan:
    """threads: that may run the job at once; None: as many as its work is worth."""
    _, block_size, kv_heads, D = k_cache.shape
    G, R = h // kv_heads, len(group.q_lens)
    kv_lens = group.kv_len_R.tolist()
    most_visible = max(kv_lens)
    table_RB = group.block_table_RB.contiguous()
    assert table_RB.shape[0] == R
    assert table_RB.shape[1] * block_size >= most_visible
    assert min(kv_lens) >= 1
    units, visible = _units(group, kv_lens, max(1, QUERIES_PER_UNIT // G))
    units_U3 = torch.tensor(units, dtype=torch.int64)
    visible_n = torch.tensor(visible, dtype=torch.int64)
    max_queries = max(rows for _, _, rows in units) * G
    if threads is None:
        threads = torch.get_num_threads() if sum(visible) * h * D >= _MIN_TEAM_WORK else 1
    scratch = torch.empty(
        threads, scratch_floats(max_queries=max_queries, head_dim=D, max_visible=most_visible), dtype=torch.float32
    )
    job = (ctypes.c_int64 * len(Word))()
    job[Word.TABLE], job[Word.TABLE_STRIDE] = table_RB.data_ptr(), table_RB.shape[1]
    job[Word.BLOCK_SIZE], job[Word.KV_HEADS], job[Word.GROUP], job[Word.HEAD_DIM] = block_size, kv_heads, G, D
    job[Word.UNITS], job[Word.NUM_UNITS] = units_U3.data_ptr(), len(units)
    job[Word.VISIBLE] = visible_n.data_ptr()
    job[Word.SCRATCH], job[Word.SCRATCH_STRIDE] = scratch.data_ptr(), scratch.shape[1]
    job[Word.MAX_QUERIES], job[Word.SCORE_STRIDE] = max_queries, score_stride(most_visible)
    job[Word.SCALE] = float_bits(1.0 / math.sqrt(D))
    return GroupPlan(job=job, threads=threads, kept=(table_RB, units_U3, visible_n, scratch))


def _units(
    group: AttentionGroup, kv_lens: list[int], rows_per_unit: int
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """((sequence, first row, rows), ..) and the number of visible positions of each row, rows counted in the group."""
    units: list[tuple[int, int, int]] = []
    visible: list[int] = []
    starts = group.q_start_R.tolist()
    for sequence, num_rows in enumerate(group.q_lens):
        first, limit = len(visible), kv_lens[sequence]
        if group.causal:
            visible.extend(max(1, min(starts[sequence] + i + 1, limit)) for i in range(num_rows))
        else:
            visible.extend([limit] * num_rows)
        units.extend(
            (sequence, row, min(rows_per_unit, first + num_rows - row))
            for row in range(first, first + num_rows, rows_per_unit)
        )
    return units, visible
