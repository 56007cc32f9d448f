"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn

from engine.layers.cpu_rows import row_kernels


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32, returned in x's dtype.

    Four small kernels instead of the ten of `F.rms_norm` on the CPU, which cost 20 us a call at one row.
    """
    square_sum = torch.linalg.vecdot(x, x) if x.dtype == torch.float32 else None
    if square_sum is None:
        wide = x.float()
        inverse = torch.linalg.vecdot(wide, wide).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
        return wide.mul_(inverse.unsqueeze(-1)).to(x.dtype)
    return x * square_sum.mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)


class RMSNorm(nn.Module):
    """rms_scale(x) * weight, weight [size]."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: str = "cpu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device), False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[.., size] -> [.., size]."""
        kernels = row_kernels(x.dtype) if x.device.type == "cpu" and x.shape[-1] % 8 == 0 else None
        if kernels is not None:
            return kernels.rms_norm(x, self.weight, self.eps)
        return rms_scale(x, self.eps) * self.weight
