"""What the machine offers: cores, memory and the accelerator, read once when a config is resolved."""

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


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
    """cores: physical ones this process may use, at least 1; accelerator: None without a usable GPU."""

    cores: int
    memory_bytes: int
    accelerator: Accelerator | None


def probe_machine(*, with_accelerator: bool = True) -> Machine:
    """Facts of this process's machine, container limits included. Looking for an accelerator imports torch."""
    accelerator = _first_gpu() if with_accelerator else None
    return Machine(cores=_physical_cores(), memory_bytes=_memory_bytes(), accelerator=accelerator)


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
