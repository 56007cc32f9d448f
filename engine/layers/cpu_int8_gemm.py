"""Matrices with 8-bit weights on the CPU kernel of `cpu_gemm`, for a drafter: drafts may be off, output stays exact.

Weights: one scale per output, symmetric. Activations: one scale per row, 16 bits, so that nearly all of the error is
the weights'. Sums are exact integers: a row's result depends, bit for bit, on that row alone, as in the other kernels.
"""

import ctypes

import torch
from torch import Tensor

from engine.layers.cpu_gemm import ALIGN, MAX_SELF_WIDENED, GemmLayer, load_kernels
from engine.layers.cpu_quantise_ir import activation_max
from engine.layers.cpu_tile_ir import PANEL
from engine.layers.int8_weight import round_weight

K_MULTIPLE = 8  # the quantiser takes eight activations at a time
_MIN_ACTIVATION_MAX = 1023  # 11 bits; with fewer, activations would cost more precision than the weights do


def suits_int8(k: int) -> bool:
    """Whether a matrix of k inputs can be held in 8 bits: even vectors, and sums that stay inside int32."""
    return k % K_MULTIPLE == 0 and activation_max(k) >= _MIN_ACTIVATION_MAX


def pack_int8(weight_OK: Tensor) -> tuple[Tensor, Tensor]:
    """[o, k] -> (int8 [panels, k / 2, 16, 2], float32 scale [panels * 16]): a `round_weight`, its outputs filled
    up with zeros."""
    o, k = weight_OK.shape
    panels = -(-o // PANEL)
    exact = round_weight(weight_OK)
    rounded = torch.zeros(panels * PANEL, k, dtype=torch.int8)
    scale = torch.zeros(panels * PANEL)
    rounded[:o], scale[:o] = exact.rounded, exact.scale
    pairs = rounded.view(torch.int16).view(panels, PANEL, k // 2)  # moved together
    return pairs.transpose(1, 2).contiguous().view(torch.int8).view(panels, k // 2, PANEL, 2), scale


class Int8Matrix:
    """A weight in 8 bits and how to multiply by it; the counterpart of `PackedMatrix`."""

    def __init__(self, weight_OK: Tensor, bias_O: Tensor | None, *, out_dtype: torch.dtype, threads: int) -> None:
        assert weight_OK.dtype == torch.bfloat16
        assert threads >= 1
        self.o, self.k = weight_OK.shape
        assert suits_int8(self.k)
        self.threads, self.out_dtype = threads, out_dtype
        self.packed, self.scale = pack_int8(weight_OK)
        self._bias = torch.zeros(self.packed.shape[0] * PANEL, dtype=torch.float32)
        if bias_O is not None:
            self._bias[: self.o] = bias_O.detach()
        for tensor in (self.packed, self.scale, self._bias):
            assert tensor.data_ptr() % ALIGN == 0
        self._layer = GemmLayer(
            self.packed.data_ptr(),
            self._bias.data_ptr(),
            self.k // 2,
            self.o,
            self.packed.shape[0],
            threads,
            out_dtype == torch.float32,
            self.scale.data_ptr(),
        )
        self.address = ctypes.addressof(self._layer)  # of the GemmLayer
        self.kernels = load_kernels("int8")
        self._kernel = self.kernels.from_bfloat16
        self._max_rows = max(1, MAX_SELF_WIDENED // self.k)

    def unpacked(self) -> Tensor:
        """The weight as it is multiplied, float32 [o, k]."""
        rounded = self.packed.permute(0, 2, 1, 3).reshape(-1, self.k)
        return (rounded * self.scale[:, None])[: self.o]

    def matmul(self, x: Tensor) -> Tensor:
        """x bfloat16 [..., k] -> [..., o] of out_dtype."""
        if x.dtype != torch.bfloat16 or x.shape[-1] != self.k:
            raise ValueError(f"x is {x.dtype} [..., {x.shape[-1]}], the weight takes torch.bfloat16 [..., {self.k}]")
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.o), dtype=self.out_dtype)
        rows = x.numel() // self.k
        x_bytes, out_bytes = self.k * x.element_size(), self.o * out.element_size()
        for first in range(0, rows, self._max_rows):
            self._kernel(
                self.address,
                x.data_ptr() + first * x_bytes,
                out.data_ptr() + first * out_bytes,
                min(self._max_rows, rows - first),
            )
        return out
