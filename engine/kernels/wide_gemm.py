"""Matrix products of many rows in Triton, where something is fused in that cuBLAS has no form for.

Programs take tiles of the result in turn, an SM each; x and the weight come by tensor copies. Of a SwiGLU a tile holds
the same columns of both halves of the weight: what the halves are before they are joined is never written. The head
leaves of each tile its largest logits alone.

Shapes: M rows, K inputs, N outputs (V: of the rank's vocabulary shard), C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from engine.kernels.device_ops import rounded
from engine.kernels.shard_argmax import argmax_of_chunks
from engine.kernels.wide_choice import WideCut

_GROUP = tl.constexpr(16)  # tiles of rows whose x is held in L2 while the weight passes by


@triton.jit
def _place(tile, m_tiles, n_tiles):
    """(tile of rows, tile of columns): all rows of a group for one tile of columns after the other."""
    of_group = _GROUP * n_tiles
    first = tile // of_group * _GROUP
    rows = tl.minimum(m_tiles - first, _GROUP)
    within = tile % of_group
    return first + within % rows, within // rows


@triton.jit
def _swiglu_kernel(
    x_desc,
    gate_desc,
    up_desc,
    out_ptr,
    M,
    N,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    m_tiles, n_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, tl.num_programs(0)):
        m_tile, n_tile = _place(tile, m_tiles, n_tiles)
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for step in tl.range(0, K // BK, num_stages=STAGES):
            x = x_desc.load([m_tile * BM, step * BK])
            gate = tl.dot(x, gate_desc.load([n_tile * BN, step * BK]).T, gate)
            up = tl.dot(x, up_desc.load([n_tile * BN, step * BK]).T, up)
        gate, up = rounded(gate, out_ptr), rounded(up, out_ptr)
        y = rounded(gate / (1.0 + tl.exp(-gate)), out_ptr) * up
        m, n = m_tile * BM + tl.arange(0, BM), n_tile * BN + tl.arange(0, BN)
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _head_kernel(
    x_desc,
    weight_desc,
    value_ptr,
    id_ptr,
    logits_ptr,
    M,
    V,
    num_chunks,
    logits_stride,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    LOGITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes the logits or their peaks; either way the sums are the same bits."""
    m_tiles = tl.cdiv(M, BM)
    for tile in tl.range(tl.program_id(0), m_tiles * num_chunks, tl.num_programs(0)):
        m_tile, chunk = _place(tile, m_tiles, num_chunks)
        sums = tl.zeros([BM, BN], tl.float32)
        for step in tl.range(0, K // BK, num_stages=STAGES):
            x = x_desc.load([m_tile * BM, step * BK])
            sums = tl.dot(x, weight_desc.load([chunk * BN, step * BK]).T, sums)
        m, column = m_tile * BM + tl.arange(0, BM), chunk * BN + tl.arange(0, BN)
        inside = (column < V)[None, :]
        if LOGITS:
            at = m.to(tl.int64)[:, None] * logits_stride + column[None, :]
            tl.store(logits_ptr + at, sums, mask=(m < M)[:, None] & inside)
        else:
            broken = sums != sums
            known = tl.where(broken | ~inside, float("-inf"), sums)
            best = tl.max(known, 1)
            is_best = (known == best[:, None]) & ~broken & inside
            first = tl.min(tl.where(is_best, column[None, :], V - 1), 1)
            value = tl.where(tl.max(broken.to(tl.int32), 1) > 0, float("nan"), best)
            at = m * num_chunks + chunk
            tl.store(value_ptr + at, value, mask=m < M)
            tl.store(id_ptr + at, first, mask=m < M)


def wide_swiglu(x_MK: Tensor, weight: Tensor, *, cut: WideCut) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), [M, N], rounded where `silu_mul` of the product is. weight [2 N, K]: gate, up."""
    (M, K), N = x_MK.shape, weight.shape[0] // 2
    assert K % cut.inputs == 0
    assert x_MK.is_contiguous()
    assert weight.is_contiguous()
    out = x_MK.new_empty(M, N)
    tiles = triton.cdiv(M, cut.rows) * triton.cdiv(N, cut.outputs)
    _swiglu_kernel[(min(cut.num_programs, tiles),)](
        TensorDescriptor.from_tensor(x_MK, [cut.rows, cut.inputs]),
        TensorDescriptor.from_tensor(weight[:N], [cut.outputs, cut.inputs]),
        TensorDescriptor.from_tensor(weight[N:], [cut.outputs, cut.inputs]),
        out,
        M,
        N,
        K=K,
        BM=cut.rows,
        BN=cut.outputs,
        BK=cut.inputs,
        STAGES=cut.num_stages,
        num_warps=cut.num_warps,
    )
    return out


def wide_argmax(
    x_MK: Tensor, weight_VK: Tensor, vocab_start: int, *, cut: WideCut, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    """`shard_argmax` of `wide_logits`, which are not written."""
    M, chunks = x_MK.shape[0], triton.cdiv(weight_VK.shape[0], cut.outputs)
    value_MC = torch.empty(M, chunks, dtype=torch.float32, device=x_MK.device)
    id_MC = torch.empty(M, chunks, dtype=torch.int32, device=x_MK.device)
    _head(x_MK, weight_VK, cut, value_MC, id_MC, None)
    return argmax_of_chunks(value_MC, id_MC, vocab_start, pdl=pdl)


def wide_logits(x_MK: Tensor, weight_VK: Tensor, *, cut: WideCut) -> Tensor:
    """x @ weight.T, float32 [M, V]: the very numbers that `wide_argmax` of the same cut compares."""
    logits_MV = torch.empty(x_MK.shape[0], weight_VK.shape[0], dtype=torch.float32, device=x_MK.device)
    _head(x_MK, weight_VK, cut, logits_MV, logits_MV, logits_MV)
    return logits_MV


def _head(
    x_MK: Tensor, weight_VK: Tensor, cut: WideCut, value_MC: Tensor, id_MC: Tensor, logits_MV: Tensor | None
) -> None:
    (M, K), V = x_MK.shape, weight_VK.shape[0]
    assert K % cut.inputs == 0
    assert x_MK.is_contiguous()
    assert weight_VK.is_contiguous()
    chunks = triton.cdiv(V, cut.outputs)
    _head_kernel[(min(cut.num_programs, triton.cdiv(M, cut.rows) * chunks),)](
        TensorDescriptor.from_tensor(x_MK, [cut.rows, cut.inputs]),
        TensorDescriptor.from_tensor(weight_VK, [cut.outputs, cut.inputs]),
        value_MC,
        id_MC,
        value_MC if logits_MV is None else logits_MV,
        M,
        V,
        chunks,
        0 if logits_MV is None else logits_MV.stride(0),
        K=K,
        BM=cut.rows,
        BN=cut.outputs,
        BK=cut.inputs,
        LOGITS=logits_MV is not None,
        STAGES=cut.num_stages,
        num_warps=cut.num_warps,
    )
