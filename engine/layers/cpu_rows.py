"""Row-wise operations of a decoder layer on the CPU, each one call of a compiled kernel. See `cpu_rows_ir`.

`row_kernels(dtype)` gives them, or None where they cannot run; callers then use the torch expressions.
"""

import ctypes
import functools
import struct

import torch
from torch import Tensor

from engine.layers.cpu_jit import KERNEL_DTYPES, JobKernel, compile_ir, unavailable_reason
from engine.layers.cpu_rows_job import MAX_HEAD_DIM, NormWord, PeakWord, RotateWord, SiluWord

MIN_PEAK_SIZE = 8
_MIN_TEAM_ELEMENTS = 1 << 15  # below, waking the other threads costs more than it saves


@functools.cache
def row_kernels(dtype: torch.dtype) -> "RowKernels | None":
    """The compiled kernels of a type, made once per process; None where `unavailable_reason` has one."""
    if dtype not in KERNEL_DTYPES or unavailable_reason() is not None:
        return None
    return RowKernels(dtype)


class RowKernels:
    """All tensors are of one dtype, on the CPU and, unless said otherwise, contiguous."""

    def __init__(self, dtype: torch.dtype) -> None:
        from engine.layers.cpu_rows_ir import module_ir  # imports llvmlite, which not every machine has

        engine = compile_ir(module_ir(KERNEL_DTYPES[dtype]), optimise=True)
        self.dtype = dtype
        self._engine = engine
        self._norm, self._add_norm = JobKernel(engine, "rms_norm"), JobKernel(engine, "add_rms_norm")
        self._silu, self._rotate = JobKernel(engine, "silu_mul"), JobKernel(engine, "rotate_and_write")
        self._peaks = JobKernel(engine, "row_peaks") if dtype == torch.float32 else None
        self._peak_job = ctypes.c_int64 * len(PeakWord)
        self._norm_job = ctypes.c_int64 * len(NormWord)
        self._silu_job = ctypes.c_int64 * len(SiluWord)
        self._rotate_job = ctypes.c_int64 * len(RotateWord)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, a multiple of 8."""
        x = x.contiguous()
        size, out = x.shape[-1], torch.empty_like(x)
        rows = x.numel() // size
        job = self._norm_job(x.data_ptr(), out.data_ptr(), weight.data_ptr(), rows, size, float_bits(eps))
        self._norm.run(job, _threads(x.numel()))
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, its rms_norm)."""
        assert x.shape == delta.shape
        x, delta = x.contiguous(), delta.contiguous()
        size, out, total = x.shape[-1], torch.empty_like(x), torch.empty_like(x)
        rows = x.numel() // size
        pointers = (x.data_ptr(), out.data_ptr(), weight.data_ptr())
        job = self._norm_job(*pointers, rows, size, float_bits(eps), 0, delta.data_ptr(), total.data_ptr())
        self._add_norm.run(job, _threads(x.numel()))
        return total, out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[.., 2 * size] -> silu(first half) * second half, [.., size], size a multiple of 8."""
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty((*gate_up.shape[:-1], size))
        job = self._silu_job(gate_up.data_ptr(), out.data_ptr(), gate_up.numel() // (2 * size), size)
        self._silu.run(job, _threads(gate_up.numel()))
        return out

    def rotate_and_write(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        slots_N: Tensor,
        kv: tuple[Tensor, Tensor],
        *,
        num_heads: int,
        norm_weight: Tensor | None,
        eps: float,
    ) -> Tensor:
        """qkv [N, (h + 2g) * D] -> rotated q [N, h, D]; rotated k and v are written to the caches' slots.

        angles: cos and sin [N, 1, D], rows any stride apart, the first half of sin negated. kv: caches of
        [slots.., g, D]. norm_weight: [h + g, D], applied to q and k with their RMS norm before the rotation.
        """
        (k_cache, v_cache), (cos, sin) = kv, angles
        g, D = k_cache.shape[-2:]
        N = slots_N.shape[0]
        assert qkv.is_contiguous()
        assert qkv.numel() == N * (num_heads + 2 * g) * D
        assert cos.shape[0] == N
        assert cos.stride() == sin.stride()
        assert cos.stride(-1) == 1
        assert slots_N.is_contiguous()
        assert k_cache.is_contiguous()
        assert v_cache.is_contiguous()
        assert k_cache.dtype == qkv.dtype == self.dtype
        q = qkv.new_empty((N, num_heads, D))
        job = self._rotate_job(
            qkv.data_ptr(),
            (num_heads + 2 * g) * D,
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            slots_N.data_ptr(),
            0 if norm_weight is None else norm_weight.data_ptr(),
            float_bits(eps),
            N,
            num_heads,
            g,
            D,
        )
        # Rows of one step may share a slot only in the null block, whose contents nobody reads.
        self._rotate.run(job, _threads(qkv.numel()))
        return q

    def row_peaks(self, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """(largest value [N], first + its lowest column, int64 [N]) of float32 [N, 8 or more]; NaN in a row is its
        largest value, and its column then any."""
        assert self._peaks is not None, "of float32 alone"
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        rows, size = x.shape
        assert size >= MIN_PEAK_SIZE
        value, index = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        job = self._peak_job(x.data_ptr(), value.data_ptr(), index.data_ptr(), first, rows, size)
        # Alone: a row takes 10 us, waiting for a thread that another program keeps from its core milliseconds.
        self._peaks.run(job, 1)
        return value, index

    def address(self, name: str) -> int:
        """Of a compiled kernel, valid while this object lives."""
        found: int = self._engine.get_function_address(name)
        return found

    @staticmethod
    def suit(*, hidden_size: int, mlp_size: int, head_dim: int) -> bool:
        """Whether the kernels can do a decoder layer of these sizes."""
        return hidden_size % 8 == 0 and mlp_size % 8 == 0 and head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM


@functools.cache
def float_bits(value: float) -> int:
    """The bits of a float32, as the kernels take numbers."""
    bits: int = struct.unpack("I", struct.pack("f", value))[0]
    return bits


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements >= _MIN_TEAM_ELEMENTS else 1
