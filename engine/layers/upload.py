"""From Python numbers to a tensor on the device without making the host wait for the device."""

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]],
    device: torch.device,
    *,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """`values` as a tensor. On CUDA the copy runs on the current stream from pinned memory, which the allocator keeps
    until the copy is done; a copy from pageable memory would wait for everything launched before it."""
    host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
