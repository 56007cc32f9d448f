"""The CPU matrix kernel: compiled once per process and weight type by llvmlite, called by ctypes.

Owns: packing a weight and multiplying by it. What the kernel computes and why it is shaped so is told in `cpu_gemm_ir`;
where it can be used, in `cpu_jit`.
"""

import ctypes
import functools
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import torch
from torch import Tensor

from engine.layers.cpu_gemm_ir import module_ir
from engine.layers.cpu_jit import KERNEL_DTYPES, compile_ir
from engine.layers.cpu_tile_ir import PANEL, GemmWeight

# Rows x k up to which the kernel widens x itself, on the calling thread and its stack (256 KiB); above, torch does it
# on all threads. A call to torch costs several us when the weights have just swept the caches.
MAX_SELF_WIDENED = 64 * 1024
ALIGN = 32  # bytes, of weights, bias and scales


class GemmWord(IntEnum):
    """The 64-bit words of a product's job, as `cpu_program` runs it."""

    LAYER = 0  # a GemmLayer
    X = auto()  # float32 [ROWS, k]; int8 weights: the quantiser's pairs
    OUT = auto()  # [ROWS, o]
    ROWS = auto()
    TICKET = auto()  # 0 at the start; numbers the threads
    COUNTERS = auto()  # `panel_counters`
    ROW_SCALE = auto()  # int8 weights: float32 [ROWS]


class QuantiseWord(IntEnum):
    """The 64-bit words of the quantiser's job."""

    X = 0  # bfloat16 [ROWS, SIZE]
    PAIRS = auto()  # out, int16 [ROWS, SIZE]
    ROW_SCALE = auto()  # out, float32 [ROWS]
    ROWS = auto()
    SIZE = auto()  # a multiple of 8
    COUNTER = auto()  # 0 at the start


class GemmLayer(ctypes.Structure):
    """The kernel's view of a matrix. k: in steps of `cpu_tile_ir.panel_bytes_per_step`."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("k", ctypes.c_int64),
        ("o", ctypes.c_int64),
        ("panels", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("out_f32", ctypes.c_int64),
        ("scale", ctypes.c_void_p),
    ]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Compiled entry points of one weight type, by the type of x (int8 weights take bfloat16 alone). `engine` owns
    their machine code and must outlive them.

    worker, quantise: addresses of kernels for `cpu_program`; only int8 weights have the second.
    """

    from_float32: Any
    from_bfloat16: Any
    worker: int
    quantise: int
    engine: Any


@functools.cache
def load_kernels(weight: GemmWeight) -> Kernels:
    """Compiles the kernel of a weight type: a fraction of a second, once per process."""
    engine = compile_ir(module_ir(weight))
    pointer, length = ctypes.c_void_p, ctypes.c_int64
    # CFUNCTYPE, not PYFUNCTYPE: the GIL is free while the kernel runs.
    kind = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, length)
    return Kernels(
        from_float32=None if weight == "int8" else kind(engine.get_function_address("gemm_float32")),
        from_bfloat16=kind(engine.get_function_address("gemm_bfloat16")),
        worker=engine.get_function_address("worker"),
        quantise=engine.get_function_address("quantise_rows") if weight == "int8" else 0,
        engine=engine,
    )


def panel_counters(panels: int, threads: int) -> list[int]:
    """Where each thread's share of the panels begins, a cache line each: the start of a product's counters."""
    words = [0] * (8 * threads)
    words[::8] = [thread * panels // threads for thread in range(threads)]
    return words


def pack_weight(weight_OK: Tensor) -> Tensor:
    """[o, k] -> panels of 16 outputs, padded with zero rows: float32 [panels, k, 16]; bfloat16 [panels, k, 8, 2], pair
    j being outputs j and j + 8."""
    o, k = weight_OK.shape
    panels = -(-o // PANEL)
    padded = weight_OK.detach()
    if panels * PANEL != o:
        padded = torch.cat([padded, padded.new_zeros(panels * PANEL - o, k)])
    if weight_OK.dtype == torch.bfloat16:
        return padded.view(panels, 2, PANEL // 2, k).permute(0, 3, 2, 1).contiguous()
    return padded.view(panels, PANEL, k).permute(0, 2, 1).contiguous()


def unpack_weight(packed: Tensor, o: int) -> Tensor:
    """The exact inverse of `pack_weight`."""
    panels, k = packed.shape[:2]
    if packed.dtype == torch.bfloat16:
        return packed.permute(0, 3, 2, 1).reshape(panels * PANEL, k)[:o].contiguous()
    return packed.permute(0, 2, 1).reshape(panels * PANEL, k)[:o].contiguous()


class PackedMatrix:
    """A weight in the kernel's layout and how to multiply by it. Holds its own copy of weight and bias."""

    def __init__(self, weight_OK: Tensor, bias_O: Tensor | None, *, out_dtype: torch.dtype, threads: int) -> None:
        assert weight_OK.dtype in KERNEL_DTYPES
        assert out_dtype in KERNEL_DTYPES
        assert threads >= 1
        self.o, self.k = weight_OK.shape
        self.threads = threads
        self.in_dtype, self.out_dtype = weight_OK.dtype, out_dtype
        self.packed = pack_weight(weight_OK)
        self._bias = torch.zeros(self.packed.shape[0] * PANEL, dtype=torch.float32)
        if bias_O is not None:
            self._bias[: self.o] = bias_O.detach()
        assert self.packed.data_ptr() % ALIGN == 0
        assert self._bias.data_ptr() % ALIGN == 0
        self._layer = GemmLayer(
            self.packed.data_ptr(),
            self._bias.data_ptr(),
            self.k,
            self.o,
            self.packed.shape[0],
            threads,
            out_dtype == torch.float32,
            None,
        )
        self.address = ctypes.addressof(self._layer)  # of the GemmLayer
        self.kernels = load_kernels(KERNEL_DTYPES[weight_OK.dtype])
        self._from_float32, self._from_bfloat16 = self.kernels.from_float32, self.kernels.from_bfloat16

    def unpacked(self) -> Tensor:
        """The weight as [o, k], a copy."""
        return unpack_weight(self.packed, self.o)

    def matmul(self, x: Tensor) -> Tensor:
        """x [..., k] of the weight's dtype -> [..., o] of out_dtype. Row r's bits depend on row r alone."""
        if x.dtype != self.in_dtype or x.shape[-1] != self.k:
            raise ValueError(f"x is {x.dtype} [..., {x.shape[-1]}], the weight takes {self.in_dtype} [..., {self.k}]")
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.o), dtype=self.out_dtype)
        size = x.numel()
        if size == 0:
            return out
        rows = size // self.k
        if x.dtype == torch.bfloat16 and size <= MAX_SELF_WIDENED:
            self._from_bfloat16(self.address, x.data_ptr(), out.data_ptr(), rows)
        else:
            wide = x.float()
            self._from_float32(self.address, wide.data_ptr(), out.data_ptr(), rows)
        return out
