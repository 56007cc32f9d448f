"""Largest logit of each row and its lowest id in Triton, in two stages so that few rows fill the GPU.

Shapes: N rows, V columns of the rank's vocabulary shard, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.device_ops import begin

CHUNK = 4096  # columns of a program


@triton.jit
def largest(x, at, none):
    """(maximum, NaN if any is; the lowest `at` of the maximum of the others; `none` where there is no other)."""
    broken = x != x
    known = tl.where(broken, float("-inf"), x)
    best = tl.max(known, 0)
    first = tl.min(tl.where((known == best) & (broken == 0), at, none), 0)
    return tl.where(tl.max(broken.to(tl.int32), 0) > 0, float("nan"), best), first


@triton.jit(do_not_specialize=["num_chunks"])
def _chunk_kernel(x_ptr, value_ptr, id_ptr, V, x_stride, num_chunks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < V, other=float("-inf")).to(tl.float32)
    value, first = largest(x, column, V - 1)
    tl.store(value_ptr + row * num_chunks + chunk, value)
    tl.store(id_ptr + row * num_chunks + chunk, tl.minimum(first, V - 1))


@triton.jit(do_not_specialize=["num_chunks", "first_id"])
def _row_kernel(
    part_value_ptr, part_id_ptr, value_ptr, id_ptr, first_id, num_chunks, CHUNKS: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    row = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    values = tl.load(part_value_ptr + row * num_chunks + c, mask=c < num_chunks, other=float("-inf"))
    ids = tl.load(part_id_ptr + row * num_chunks + c, mask=c < num_chunks, other=2147483647)
    value, first = largest(values, ids, 2147483647)
    # Every chunk holds a NaN: any valid id.
    first = tl.where(first == 2147483647, 0, first)
    tl.store(value_ptr + row, value)
    tl.store(id_ptr + row, first.to(tl.int64) + first_id)


def shard_argmax(score_NV: Tensor, vocab_start: int, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """(largest value [N] float32, its lowest global id [N] int64); NaN and any valid id where a row holds a NaN.

    score_NV: of any floating type.
    """
    N, V = score_NV.shape
    assert score_NV.stride(1) == 1
    chunks = triton.cdiv(V, CHUNK)
    part_value = torch.empty(N, chunks, dtype=torch.float32, device=score_NV.device)
    part_id = torch.empty(N, chunks, dtype=torch.int32, device=score_NV.device)
    if N:
        _chunk_kernel[(N, chunks)](
            score_NV,
            part_value,
            part_id,
            V,
            score_NV.stride(0),
            chunks,
            BLOCK=CHUNK,
            PDL=pdl,
            num_warps=4,
            launch_pdl=pdl,
        )
    return argmax_of_chunks(part_value, part_id, vocab_start, pdl=pdl)


def argmax_of_chunks(
    part_value_NC: Tensor, part_id_NC: Tensor, vocab_start: int, *, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`shard_argmax` from the largest value of each chunk and its lowest column, int32."""
    N, chunks = part_value_NC.shape
    value_N = part_value_NC.new_empty(N)
    id_N = torch.empty(N, dtype=torch.int64, device=part_value_NC.device)
    if N:
        _row_kernel[(N,)](
            part_value_NC,
            part_id_NC,
            value_N,
            id_N,
            vocab_start,
            chunks,
            CHUNKS=triton.next_power_of_2(chunks),
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
        )
    return value_N, id_N
