"""The CPU matrix kernel: compiled once per process and weight type by llvmlite, called by ctypes.

Owns: packing a weight, compiling, calling. What the kernel computes and why it is shaped so is told in `cpu_gemm_ir`.
`unavailable_reason` says why a machine cannot or should not use it; callers then use torch.
"""

import ctypes
import functools
import importlib.util
import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.layers.cpu_gemm_ir import module_ir
from engine.layers.cpu_tile_ir import PANEL, WeightType

logger = logging.getLogger(__name__)

KERNEL_DTYPES: dict[torch.dtype, WeightType] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# Rows x k up to which the kernel widens x itself, on the calling thread; above, torch does it on all threads.
MAX_SELF_WIDENED = 64 * 1024
_ALIGN = 32


class _Layer(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("k", ctypes.c_int64),
        ("o", ctypes.c_int64),
        ("panels", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("out_f32", ctypes.c_int64),
    ]


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Compiled entry points of one weight type. `engine` owns their machine code and must outlive them."""

    from_float32: Any
    from_bfloat16: Any
    engine: Any


def _torch_openmp() -> Path | None:
    """The OpenMP runtime that torch has loaded, if it is GNU's: its threads are shared with the kernel."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        return path
    return None


@functools.cache
def unavailable_reason() -> str | None:
    """None if the kernel can be used and is the better choice here, else why not. Decided and logged once per process.

    The environment variable DFLASH_CPU_LINEAR overrides the choice: `torch`, or `kernel` (ValueError if it cannot be).
    """
    choice = os.environ.get("DFLASH_CPU_LINEAR", "auto")
    if choice not in ("auto", "kernel", "torch"):
        raise ValueError(f"DFLASH_CPU_LINEAR is {choice!r}: use auto, kernel or torch")
    reason = "DFLASH_CPU_LINEAR=torch" if choice == "torch" else obstacle(forced=choice == "kernel")
    if choice == "kernel" and reason is not None:
        raise ValueError(f"DFLASH_CPU_LINEAR=kernel: {reason}")
    logger.info("CPU matrices: %s", "the compiled kernel" if reason is None else f"torch ({reason})")
    return reason


def obstacle(*, forced: bool) -> str | None:
    """What keeps the kernel from running here, or, unless forced, makes torch the better choice. None: nothing."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"written for Linux on x86_64, this is {platform.system()} on {platform.machine()}"
    if importlib.util.find_spec("llvmlite") is None:
        return "the package llvmlite is not installed"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        return f"needs AVX2, torch reports {capability}"
    if not forced and torch.cpu._is_avx512_bf16_supported():
        return "the processor has bfloat16 instructions, which torch uses"
    if _torch_openmp() is None:
        return "torch does not run on GNU OpenMP here"
    try:
        for weight in KERNEL_DTYPES.values():
            load_kernels(weight)
    except (ImportError, OSError, RuntimeError) as error:
        return f"the kernel does not compile: {error}"
    return None


@functools.cache
def load_kernels(weight: WeightType) -> Kernels:
    """Compiles the kernel for this processor (a fraction of a second, once per process).

    Raises RuntimeError if the processor's features or this LLVM cannot take it.
    """
    import llvmlite.binding as llvm  # type: ignore[import-untyped]  # the package has no type stubs

    features = llvm.get_host_cpu_features()
    if not (features.get("avx2") and features.get("fma")):
        raise RuntimeError("the processor lacks AVX2 or FMA")
    openmp = _torch_openmp()
    assert openmp is not None, "load_kernels is called only where unavailable_reason() is None"
    fork = ctypes.cast(ctypes.CDLL(str(openmp)).GOMP_parallel, ctypes.c_void_p).value
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.add_symbol("GOMP_parallel", fork)
    module = llvm.parse_assembly(module_ir(weight))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=2
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    pointer, length = ctypes.c_void_p, ctypes.c_int64
    # CFUNCTYPE, not PYFUNCTYPE: the GIL is free while the kernel runs.
    from_float32 = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, length)
    from_bfloat16 = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, length, pointer)
    return Kernels(
        from_float32=from_float32(engine.get_function_address("gemm_float32")),
        from_bfloat16=from_bfloat16(engine.get_function_address("gemm_bfloat16")),
        engine=engine,
    )


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
        assert weight_OK.dtype in KERNEL_DTYPES and out_dtype in KERNEL_DTYPES and threads >= 1
        self.o, self.k = weight_OK.shape
        self.in_dtype, self.out_dtype = weight_OK.dtype, out_dtype
        self.packed = pack_weight(weight_OK)
        self._bias = torch.zeros(self.packed.shape[0] * PANEL, dtype=torch.float32)
        if bias_O is not None:
            self._bias[: self.o] = bias_O.detach()
        assert self.packed.data_ptr() % _ALIGN == 0 and self._bias.data_ptr() % _ALIGN == 0
        self._layer = _Layer(
            self.packed.data_ptr(),
            self._bias.data_ptr(),
            self.k,
            self.o,
            self.packed.shape[0],
            threads,
            out_dtype == torch.float32,
        )
        self._address = ctypes.addressof(self._layer)
        kernels = load_kernels(KERNEL_DTYPES[weight_OK.dtype])
        self._from_float32, self._from_bfloat16 = kernels.from_float32, kernels.from_bfloat16

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
            scratch = torch.empty(size, dtype=torch.float32)
            self._from_bfloat16(self._address, x.data_ptr(), out.data_ptr(), rows, scratch.data_ptr())
        else:
            wide = x.float()
            self._from_float32(self._address, wide.data_ptr(), out.data_ptr(), rows)
        return out
