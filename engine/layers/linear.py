"""`Linear`: the one matrix layer every model uses: torch; once prepared, the CPU kernel of `cpu_gemm`; for few rows on
CUDA, the kernels of `engine.kernels.row_gemm` and `stream_gemm`, for a drafter by weights of 8 bits."""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.kernels.available import copy_engine
from engine.kernels.int8_choice import keeps_int8, streams_int8
from engine.layers.cpu_gemm import PackedMatrix
from engine.layers.cpu_int8_gemm import Int8Matrix, suits_int8
from engine.layers.cpu_jit import KERNEL_DTYPES, max_kernel_rows, unavailable_reason
from engine.layers.cuda_rows import cuda_rows
from engine.layers.int8_weight import Int8Weight, round_weight

_UPCAST_ROWS = 8192  # weight rows widened at a time where torch must return float32 from bfloat16 weights on the CPU


def split_counters(num_outputs: int, device: torch.device) -> Tensor:
    """Counters of split sums for a matrix of so many outputs: int32 zeros, which every product leaves as zeros.

    The matrix owns them, so products that run at the same time (another engine's, or on another stream) share none.
    """
    return torch.zeros(num_outputs, dtype=torch.int32, device=device)


class Linear(nn.Module):
    """y = x @ weight.T + bias, weight [out, in], bias [out] or None. Both start at zero and are filled by the loader.

    Inputs of `dtype`, products and sums in float32, one rounding to the output type.
    out_dtype: None keeps `dtype`; float32 returns the sums unrounded (the head needs it: bfloat16 logits tie).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert out_dtype in (None, torch.float32)
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=dtype, device=device), False)
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device), False) if bias else None
        self.out_dtype = out_dtype
        self._matrix: PackedMatrix | Int8Matrix | None = None
        self._max_kernel_rows: int | None = None
        self.int8_weight: Int8Weight | None = None  # beside `weight`, for few rows on CUDA

    def prepare(self, threads: int | None = None, *, int8: bool = False) -> bool:
        """Called once, when the weights are in place. Returns True if the CPU kernel took over.

        The kernel then runs on `threads` threads (torch's current number by default) and keeps its own packed copy:
        `weight` and `bias` are gone (a tensor that something else holds, such as a tied embedding, stays) and
        `plain_weight` rebuilds the matrix. A row's result then depends, bit for bit, on that row alone: not on the
        other rows, their number, or the threads. Elsewhere (other devices, types, processors) nothing changes.
        On processors with bfloat16 instructions torch multiplies more rows than `max_kernel_rows` by a bfloat16 matrix:
        `weight` and `bias` then stay beside the packed copy (twice the memory), and the law holds for calls of so few
        rows, not between those and larger ones. Not so with float32 results, which torch has only from widened
        weights: there the kernel takes all rows.
        int8: rounds the weights of a bfloat16 matrix to 8 bits where the kernel runs and the shape suits it. What torch
        multiplies is not rounded. On CUDA a rounded copy, `int8_weight`, is kept beside the matrix where few rows
        gain by it (`engine.kernels.int8_choice`).
        Raises ValueError if threads < 1.
        """
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}: use 1 or more")
        assert self._matrix is None and self.int8_weight is None, "a layer is prepared once"
        if int8 and self.weight.dtype == torch.bfloat16 and cuda_rows(self.weight) and keeps_int8(*self.weight.shape):
            rounded = round_weight(self.weight)
            self.int8_weight = rounded.streamed() if copy_engine() and streams_int8(*self.weight.shape) else rounded
        if self.weight.device.type != "cpu" or self.weight.dtype not in KERNEL_DTYPES:
            return False
        if unavailable_reason() is not None:
            return False
        int8 = int8 and self.weight.dtype == torch.bfloat16 and suits_int8(self.weight.shape[1])
        kind = Int8Matrix if int8 else PackedMatrix
        self._matrix = kind(
            self.weight,
            self.bias,
            out_dtype=self.out_dtype or self.weight.dtype,
            threads=threads or torch.get_num_threads(),
        )
        if self.out_dtype is None:
            self._max_kernel_rows = max_kernel_rows(self.weight.dtype)
        if self._max_kernel_rows is None:
            del self.weight
            self.bias = None
        return True

    def kernel_takes(self, num_rows: int) -> bool:
        """Whether the CPU kernel multiplies when called with so many rows."""
        return self._matrix is not None and (self._max_kernel_rows is None or num_rows <= self._max_kernel_rows)

    @property
    def is_prepared(self) -> bool:
        """Whether the CPU kernel has taken over."""
        return self._matrix is not None

    @property
    def matrix(self) -> PackedMatrix | Int8Matrix:
        """What the CPU kernel multiplies by, once it has taken over."""
        assert self._matrix is not None, "not prepared"
        return self._matrix

    def plain_weight(self) -> Tensor:
        """weight [out, in]; a copy once the kernel has taken over for all rows."""
        if self._matrix is None or self._max_kernel_rows is not None:
            return self.weight
        return self._matrix.unpacked()

    @functools.cached_property
    def split_count(self) -> Tensor:
        """Counters of the CUDA kernel, made at the first call; see `split_counters`."""
        return split_counters(self.weight.shape[0], self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out]."""
        if self._matrix is not None and self.kernel_takes(x.numel() // x.shape[-1]):
            return self._matrix.matmul(x)
        on_gpu = cuda_rows(x)
        if on_gpu is not None:
            y = on_gpu.linear(x, self.weight, self.bias, self.out_dtype, self.split_count, self.int8_weight)
            if y is not None:
                return y
        if self.out_dtype is None or self.out_dtype == x.dtype:
            return F.linear(x, self.weight, self.bias)
        if x.is_cuda:
            rows = torch.mm(x.reshape(-1, x.shape[-1]), self.weight.t(), out_dtype=self.out_dtype)
        else:
            wide = x.reshape(-1, x.shape[-1]).to(self.out_dtype)
            rows = torch.cat(
                [wide @ part.to(self.out_dtype).t() for part in torch.split(self.weight, _UPCAST_ROWS)], dim=-1
            )
        if self.bias is not None:
            rows = rows + self.bias
        return rows.view(*x.shape[:-1], -1)
