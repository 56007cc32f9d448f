"""What the machine offers: cores, memory and the accelerator, read once when a config is resolved."""

import functools
import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path

CPU_KERNELS_VARIABLE = "DFLASH_CPU_KERNELS"  # auto, llvm or torch; see `engine.layers.cpu_jit`
_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """One GPU. compute_capability: (9, 0) is SM90."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]

    @property
    def sm(self) -> str:
        major, minor = self.compute_capability
        return f"SM{major}{minor}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """cores: physical ones this process may use, at least 1; accelerator: None without a usable GPU.

    packs_weights: the compiled CPU kernels may run here, which keep matrices in an order of their own.
    keeps_both_orders: bfloat16 matrices are kept in torch's order as well, for many rows (see `Linear.prepare`).
    """

    cores: int
    memory_bytes: int
    accelerator: Accelerator | None
    packs_weights: bool = False
    keeps_both_orders: bool = False


def probe_machine(*, with_accelerator: bool = True) -> Machine:
    """Facts of this process's machine, container limits included. Looking for an accelerator imports torch."""
    accelerator = _first_gpu() if with_accelerator else None
    choice = os.environ.get(CPU_KERNELS_VARIABLE, "auto")
    packs_weights = choice != "torch" and may_run_cpu_kernels()
    return Machine(
        cores=_physical_cores(),
        memory_bytes=_memory_bytes(),
        accelerator=accelerator,
        packs_weights=packs_weights,
        keeps_both_orders=packs_weights and choice != "llvm" and has_bfloat16_instructions(),
    )


def may_run_cpu_kernels() -> bool:
    """False where the compiled CPU kernels cannot run for a reason that is seen without torch."""
    is_known = platform.system() == "Linux" and platform.machine() == "x86_64"
    flags = cpu_flags()
    has_instructions = not flags or {"avx2", "fma"} <= flags
    return is_known and has_instructions and importlib.util.find_spec("llvmlite") is not None


def has_bfloat16_instructions() -> bool:
    """Whether the processor multiplies bfloat16 itself (AVX512_BF16): torch's products of many rows are fast then."""
    flags = cpu_flags()
    if flags or importlib.util.find_spec("llvmlite") is None:
        return "avx512_bf16" in flags
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get("avx512bf16"))


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What Linux says the first processor can do and may be used for; empty where it does not say."""
    for line in _read(_CPUINFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def _physical_cores() -> int:
    """Distinct cores among the usable CPUs (hyper-threads share one's arithmetic units), at most the quota."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in usable:
        topology = _CPUS / f"cpu{cpu}" / "topology"
        try:
            package = (topology / "physical_package_id").read_text().strip()
            cores.add((package, (topology / "core_id").read_text().strip()))
        except OSError:
            cores.add(("cpu", str(cpu)))  # no topology there: count the CPU itself
    return max(1, min(len(cores), _cpu_quota(len(cores))))


def _cpu_quota(default: int) -> int:
    words = _read(_CGROUP / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return default
    return max(1, int(words[0]) // int(words[1]))


def _memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(_CGROUP / "memory.max").strip()
    return min(physical, int(limit)) if limit.isdigit() else physical


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _first_gpu() -> Accelerator | None:
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return Accelerator(
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
    )
