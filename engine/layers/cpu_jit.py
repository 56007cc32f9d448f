"""Compiles the CPU kernels with llvmlite, inside the process, and says where they can be used.

`unavailable_reason` is the one question callers ask; where it has an answer, they use torch.
"""

import ctypes
import functools
import importlib.util
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch

from engine.config.machine import CPU_KERNELS_VARIABLE, has_bfloat16_instructions
from engine.layers.cpu_tile_ir import WeightType

logger = logging.getLogger(__name__)

KERNEL_DTYPES: dict[torch.dtype, WeightType] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
# One request's. On such a processor the kernels were faster up to 16 rows (for 8 bits by a fifth), torch from 24 on (at
# 128 rows three times as fast as the kernel for 8 bits).
_MAX_ROWS_BESIDE_BF16 = 16


@functools.cache
def unavailable_reason() -> str | None:
    """None if the kernels can be used here, else why not. Decided and logged once a process.

    The environment variable DFLASH_CPU_KERNELS overrides the choice: `torch`, or `llvm` (ValueError if it cannot be),
    which also lifts the limit of `max_kernel_rows`.
    """
    choice = os.environ.get(CPU_KERNELS_VARIABLE, "auto")
    if choice not in ("auto", "llvm", "torch"):
        raise ValueError(f"{CPU_KERNELS_VARIABLE} is {choice!r}: use auto, llvm or torch")
    reason = f"{CPU_KERNELS_VARIABLE}=torch" if choice == "torch" else obstacle()
    if choice == "llvm" and reason is not None:
        raise ValueError(f"{CPU_KERNELS_VARIABLE}=llvm: {reason}")
    max_rows = max_kernel_rows(torch.bfloat16)
    compiled = "compiled with LLVM" + ("" if max_rows is None else f", bfloat16 matrices up to {max_rows} rows")
    logger.info("CPU kernels: %s", compiled if reason is None else f"torch's ({reason})")
    return reason


def max_kernel_rows(dtype: torch.dtype) -> int | None:
    """Rows up to which the kernels are to multiply by matrices of a type, torch above; None: any number.

    There is a limit where the processor has bfloat16 instructions: torch uses them, but has a large cost per call.
    """
    if dtype != torch.bfloat16 or os.environ.get(CPU_KERNELS_VARIABLE) == "llvm" or not has_bfloat16_instructions():
        return None
    return _MAX_ROWS_BESIDE_BF16


def obstacle() -> str | None:
    """What keeps the kernels from running here. None: nothing."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"written for Linux on x86_64, this is {platform.system()} on {platform.machine()}"
    if importlib.util.find_spec("llvmlite") is None:
        return "the package llvmlite is not installed"
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in ("AVX2", "AVX512"):
        return f"needs AVX2, torch reports {capability}"
    if _openmp() is None:
        return "torch does not run on GNU OpenMP here"
    try:
        compile_ir("define void @probe() {\n  ret void\n}\n")
    except (ImportError, OSError, RuntimeError) as error:
        return f"llvmlite does not compile: {error}"
    return None


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, if it is GNU's: the kernels run on its threads."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    return None


def compile_ir(text: str, *, optimise: bool = False) -> Any:
    """Machine code of an LLVM module for this processor: an llvmlite execution engine, which owns the code.

    optimise: runs LLVM's light optimisations first, for text that is not written as it should be executed.
    Raises RuntimeError if the processor lacks what the kernels need or LLVM refuses the text.
    """
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if not (features.get("avx2") and features.get("fma")):
        raise RuntimeError("the processor lacks AVX2 or FMA")
    openmp = _openmp()
    if openmp is None:
        raise RuntimeError("torch does not run on GNU OpenMP here")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, library in (("GOMP_parallel", openmp), ("usleep", ctypes.CDLL(None))):
        llvm.add_symbol(name, ctypes.cast(library[name], ctypes.c_void_p).value)
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=2
    )
    if optimise:
        builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
        builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


class JobKernel:
    """A compiled `void f(i64* job)` of `engine.layers.cpu_ir`, run by one thread or by a team.

    address: of the function, for as long as this object lives.
    """

    def __init__(self, engine: Any, name: str) -> None:
        self._engine = engine  # owns the code
        self.address: int = engine.get_function_address(name)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        openmp = _openmp()
        assert openmp is not None
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._team = kind(("GOMP_parallel", openmp))

    def run(self, job: Any, threads: int) -> None:
        """job: a ctypes array of 64-bit words. The kernel shares its work out through counters in the job."""
        if threads == 1:
            self._alone(ctypes.addressof(job))
        else:
            self._team(self.address, ctypes.addressof(job), threads, 0)
