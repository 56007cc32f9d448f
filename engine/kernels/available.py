"""Whether the Triton kernels can be used in this process. Imports no Triton: every machine may ask.

`unavailable_reason` is the one question callers ask; where it has an answer, they use torch. The kernel modules beside
this one import Triton at their top, so they are imported only after a None from here.
"""

import functools
import importlib.util
import logging
import os
from typing import Any

import torch

from engine.kernels.gemm_choice import SM90_SHARED_BYTES

logger = logging.getLogger(__name__)

CHOICE_VARIABLE = "DFLASH_CUDA_KERNELS"
LAUNCH_VARIABLE = "DFLASH_CUDA_DEPENDENT_LAUNCH"
_KEPT_BYTES = 2048  # of shared memory, for what a program keeps beside its stages
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def unavailable_reason() -> str | None:
    """None if CUDA tensors go to the Triton kernels, else why not. Decided and logged once a process.

    The environment variable DFLASH_CUDA_KERNELS overrides the choice: `torch`, or `triton` (ValueError if it cannot
    be).
    """
    choice = os.environ.get(CHOICE_VARIABLE, "auto")
    if choice not in ("auto", "triton", "torch"):
        raise ValueError(f"{CHOICE_VARIABLE} is {choice!r}: use auto, triton or torch")
    reason = f"{CHOICE_VARIABLE}=torch" if choice == "torch" else obstacle()
    if choice == "triton" and reason is not None:
        raise ValueError(f"{CHOICE_VARIABLE}=triton: {reason}")
    logger.info("CUDA kernels: %s", "Triton" if reason is None else f"torch's ({reason})")
    return reason


@functools.cache
def dependent_launch() -> bool:
    """Whether kernels start while the one before them still runs (`engine.kernels.device_ops`). SM90 or later.

    DFLASH_CUDA_DEPENDENT_LAUNCH=0 switches it off.
    """
    choice = os.environ.get(LAUNCH_VARIABLE, "1")
    if choice not in ("0", "1"):
        raise ValueError(f"{LAUNCH_VARIABLE} is {choice!r}: use 0 or 1")
    return choice == "1" and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@functools.cache
def copy_engine() -> bool:
    """Whether kernels may be fed by the tensor copy engine: written for SM90 alone."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@functools.cache
def shared_bytes() -> int:
    """Shared memory that a program may have on this machine's GPU, without what Triton keeps; SM90's without a GPU."""
    if not torch.cuda.is_available():
        return SM90_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties()  # its stubs lack the name
    return int(properties.shared_memory_per_block_optin) - _KEPT_BYTES


def obstacle() -> str | None:
    """What keeps the kernels from running on this machine's GPU. None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    capability = torch.cuda.get_device_capability()
    return (
        None if capability >= (8, 0) else f"needs compute capability 8.0, the GPU has {capability[0]}.{capability[1]}"
    )


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors (TRITON_INTERPRET=1, for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"
