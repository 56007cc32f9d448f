"""Matrices rounded to 8 bits, symmetric, with one scale per output: what a drafter is multiplied by instead of its own.

Drafts may be off; what is emitted is decided by the target's own weights.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.cpu_quantise_ir import WEIGHT_MAX

_WIDENED = 1 << 24  # elements that are float32 at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Weight:
    """weight [o, k] ~ rounded (int8) * scale [o, 1] (float32), off by half a scale at most.

    streams: the columns of rounded are `in_stream_order`.
    """

    rounded: Tensor
    scale: Tensor
    streams: bool = False

    def streamed(self) -> "Int8Weight":
        """The same for `engine.kernels.stream_gemm`; k is a multiple of 128."""
        assert not self.streams
        return Int8Weight(rounded=in_stream_order(self.rounded), scale=self.scale, streams=True)


def in_stream_order(rounded_OK: Tensor) -> Tensor:
    """Every 128 columns in the order in which the threads of SM90's matrix units want them: 32 of a thread together.

    Thread t of the four that hold a row has, of every 16 columns, the pairs 2t and 2t + 8.
    """
    o, k = rounded_OK.shape
    sixteens = rounded_OK.view(o, k // 128, 8, 2, 4, 2)  # of eight, pairs in two halves of four threads
    return sixteens.permute(0, 1, 4, 2, 3, 5).reshape(o, k)


def round_weight(weight_OK: Tensor) -> Int8Weight:
    """The same numbers on every device, which is the weight's."""
    o, k = weight_OK.shape
    device = weight_OK.device
    rounded = torch.empty(o, k, dtype=torch.int8, device=device)
    scale = torch.empty(o, dtype=torch.float32, device=device)
    # A tensor: CUDA multiplies by the inverse of a Python number, which rounds twice.
    most = torch.tensor(float(WEIGHT_MAX), device=device)
    rows = max(1, _WIDENED // max(k, 1))
    for first in range(0, o, rows):
        part = slice(first, first + rows)
        wide = weight_OK.detach()[part].float()
        scale[part] = wide.abs().amax(dim=1) / most
        rounded[part] = (wide / scale[part].clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round_()
    return Int8Weight(rounded=rounded, scale=scale)
