"""Of which type an engine's weights are: the target's by its checkpoint, the drafter's by what the device can run."""

import logging
from pathlib import Path
from typing import Literal, cast

from engine.config.model import DrafterConfig
from engine.weights.checkpoint import checkpoint_dtype

logger = logging.getLogger(__name__)


def resolve_dtype(dtype: str, model_dir: Path) -> Literal["float32", "bfloat16"]:
    """dtype: "auto" takes the checkpoint's.

    Raises:
        ValueError: a checkpoint of a type that no engine computes in.
    """
    if dtype != "auto":
        return cast(Literal["float32", "bfloat16"], dtype)
    stored = checkpoint_dtype(model_dir)
    if stored == "float32":
        return "float32"
    if stored == "float16":
        logger.warning(
            "dtype: the checkpoint is float16; auto takes bfloat16, which rounds it (float32 would be exact)"
        )
    elif stored not in ("bfloat16", None):
        raise ValueError(f"dtype: the checkpoint's {stored!r} is not supported; set float32 or bfloat16")
    return "bfloat16"


def resolve_drafter_weights(
    asked: str, drafter: DrafterConfig | None, device: str, dtype: str
) -> Literal["model", "int8"]:
    """asked: "auto" takes int8 where a CPU may have the kernel for it; where that does not run, the loader keeps the
    model's type. On CUDA it takes the model's. Only who insists on int8 has the kernels looked for here, since that
    imports torch.

    Raises:
        ValueError: int8 was asked for and cannot be had; the message says why.
    """
    obstacle: str | None
    if drafter is None:
        obstacle = "there is no drafter (no speculative_config)"
    elif device not in ("cpu", "cuda"):
        obstacle = f"device '{device}' has no weights"
    elif dtype != "bfloat16":
        obstacle = f"8-bit weights need dtype 'bfloat16', not '{dtype}'"
    elif asked == "int8":
        obstacle = _missing_kernel(device)
    else:
        obstacle = None
    if asked == "int8" and obstacle is not None:
        raise ValueError(f"drafter_weights: 'int8' cannot be had: {obstacle}; use 'auto' or 'model'")
    if asked == "auto" and device == "cuda":
        return "model"
    return "model" if asked == "model" or obstacle is not None else "int8"


def _missing_kernel(device: str) -> str | None:
    """Why the kernels that multiply by 8-bit weights cannot run in this process; None: they can."""
    if device == "cuda":
        from engine.kernels.available import unavailable_reason as cuda_reason

        reason = cuda_reason()
        return None if reason is None else f"8-bit weights need the Triton kernels, which cannot run ({reason})"
    from engine.layers.cpu_jit import unavailable_reason as cpu_reason

    return cpu_reason()
