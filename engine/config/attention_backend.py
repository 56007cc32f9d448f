"""`speculative_config.attention_backend`: which kernels the drafter's attention may use, and why not."""

import importlib.util
from typing import Literal

from engine.config.decoding import DFlashDecodingConfig
from engine.config.machine import Machine
from engine.config.model import DrafterConfig

AttentionBackend = Literal["VANILLA", "TRTLLM"]
_FIELD = "speculative_config.attention_backend"
_TRTLLM_CAPABILITIES = ((10, 0), (10, 3))


def check_attention_backend(backend: AttentionBackend, device: str, machine: Machine) -> None:
    """Refuses a backend that this machine cannot run.

    Raises:
        ValueError: TRTLLM elsewhere than on SM100 or SM103, or without FlashInfer.
    """
    if backend != "TRTLLM":
        return
    required = "DFlash TRTLLM attention backend is unavailable: requires SM100 or SM103"
    if device != "cuda" or machine.accelerator is None:
        raise ValueError(f"{_FIELD}: {required}, got device {device!r}. Use VANILLA, the reference attention there.")
    if machine.accelerator.compute_capability not in _TRTLLM_CAPABILITIES:
        raise ValueError(f"{_FIELD}: {required}, got {machine.accelerator.sm}.")
    if importlib.util.find_spec("flashinfer") is None:
        raise ValueError(f"{_FIELD}: TRTLLM needs the package flashinfer-python; install it, or use VANILLA")


def resolve_drafter_attention(
    config: DFlashDecodingConfig | None, dtype: str, drafter: DrafterConfig | None
) -> AttentionBackend:
    """The drafter's backend; VANILLA without a drafter.

    Raises:
        ValueError: TRTLLM in a dtype or for a drafter that its kernels do not take.
    """
    if config is None or config.attention_backend == "VANILLA":
        return "VANILLA"
    if dtype != "bfloat16":
        raise ValueError(f"{_FIELD}: TRTLLM needs dtype bfloat16, got {dtype}; use VANILLA")
    if drafter is not None and any(layer.window is not None and not layer.causal for layer in drafter.attention):
        raise ValueError(f"{_FIELD}: TRTLLM has no kernel for a sliding window that is not causal; use VANILLA")
    return "TRTLLM"
