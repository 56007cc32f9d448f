"""How products of few rows are cut on this machine's GPU, by the choices of `engine.kernels`; None: by none of them."""

import torch
from torch import Tensor

from engine.kernels.available import copy_engine, shared_bytes
from engine.kernels.gemm_choice import GemmCut, StreamCut, gemm_cut, stream_cut
from engine.kernels.int8_choice import int8_cut, int8_stream_cut
from engine.layers.int8_weight import Int8Weight


def cut_of(dtype: torch.dtype, *, rows: int, K: int, N: int, swiglu: bool = False) -> GemmCut | None:
    """`gemm_cut` of weights of a type, on this machine's GPU."""
    return gemm_cut(rows=rows, K=K, N=N, swiglu=swiglu, item_bytes=dtype.itemsize, shared_bytes=shared_bytes())


def stream_of(dtype: torch.dtype, *, rows: int, K: int, N: int, swiglu: bool = False) -> StreamCut | None:
    """`stream_cut` where this machine's GPU and the type have that kernel."""
    if dtype != torch.bfloat16 or not copy_engine():
        return None
    return stream_cut(rows=rows, K=K, N=N, swiglu=swiglu)


def copyable(x_MK: Tensor) -> Tensor:
    """x as the copy engine takes it: rows a multiple of 16 bytes apart, copied where they are not, as a part of rows
    that were padded for ranks may be."""
    return x_MK if x_MK.stride(0) * x_MK.element_size() % 16 == 0 else x_MK.contiguous()


def int8_of(int8: Int8Weight | None, rows: int, *, swiglu: bool = False) -> GemmCut | StreamCut | None:
    """The cut by which so many rows are multiplied by a weight of 8 bits on this machine's GPU; None: they are not."""
    if int8 is None:
        return None
    N, K = int8.rounded.shape
    if int8.streams:
        return int8_stream_cut(rows=rows, K=K, N=N)
    return int8_cut(rows=rows, K=K, N=N, swiglu=swiglu, shared_bytes=shared_bytes())
