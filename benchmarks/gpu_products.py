"""The few-row products of SmolLM2 and Qwen3-8B, by cuBLAS with the row kernels around it and by the fused kernel.

A call covers all that the fused kernel replaces: norm, product, SwiGLU or residual.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.available import dependent_launch
from engine.kernels.gemm_choice import GemmCut, StreamCut
from engine.kernels.row_gemm import row_gemm
from engine.kernels.row_ops import add_rms_norm, rms_norm, scale_rows, silu_mul

COUNTERS = 1 << 14  # of shared sums


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix of a model and what the engine fuses around it."""

    name: str
    K: int
    N: int
    norm: bool = False
    swiglu: bool = False
    residual: bool = False
    float32: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 * self.K * self.N * (2 if self.swiglu else 1)


PRODUCTS = (
    Product(name="smollm2 o", K=576, N=576, residual=True),
    Product(name="smollm2 gate_up", K=576, N=1536, norm=True, swiglu=True),
    Product(name="smollm2 down", K=1536, N=576, residual=True),
    Product(name="smollm2 fc", K=2880, N=576),
    Product(name="smollm2 qkv", K=576, N=960, norm=True),
    Product(name="smollm2 head", K=576, N=49152, float32=True),
    Product(name="qwen3-8b gate_up", K=4096, N=12288, norm=True, swiglu=True),
    Product(name="qwen3-8b down", K=12288, N=4096, residual=True),
    Product(name="qwen3-8b qkv", K=4096, N=6144, norm=True),
    Product(name="qwen3-8b o", K=4096, N=4096, residual=True),
    Product(name="qwen3-8b head", K=4096, N=151936, float32=True),
    Product(name="qwen3-8b fc", K=20480, N=4096),
    Product(name="qwen3-8b context", K=4096, N=10240),
)


def tensors(product: Product, rows: int, *, copies: int) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
    """(x, copies of the weight, norm weight, residual, out)."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    weights = [random(product.N * (2 if product.swiglu else 1), product.K) * product.K**-0.5 for _ in range(copies)]
    out = torch.empty(rows, product.N, device="cuda", dtype=torch.float32 if product.float32 else torch.bfloat16)
    return random(rows, product.K), weights, random(max(product.K, product.N)), random(rows, product.N), out


def cublas(product: Product, x: Tensor, weight: Tensor, norm: Tensor, residual: Tensor) -> Callable[[], object]:
    """The way of more rows: the engine's row kernels around cuBLAS."""
    pdl = dependent_launch()

    def call() -> object:
        normed = rms_norm(x, norm[: product.K], 1e-5, pdl=pdl) if product.norm else x
        if product.float32:
            return torch.mm(normed, weight.t(), out_dtype=torch.float32)
        y = F.linear(normed, weight)
        if product.swiglu:
            return silu_mul(y, pdl=pdl)
        return add_rms_norm(residual, y, norm[: product.N], 1e-5, pdl=pdl)[0] if product.residual else y

    return call


def fused(
    product: Product,
    cut: GemmCut | StreamCut,
    count: Tensor,
    x: Tensor,
    weight: Tensor,
    norm: Tensor,
    residual: Tensor,
    out: Tensor,
    *,
    scale: Tensor | None = None,
) -> Callable[[], object]:
    """By the kernel that the cut is of. scale: of a weight of 8 bits."""
    multiply: Callable[..., object] = row_gemm
    if isinstance(cut, StreamCut):
        from engine.kernels.stream_gemm import stream_gemm  # SM90 alone

        multiply = stream_gemm
    # The rows of a norm come ready from the kernel before; with a residual, the next norm's rows are made.
    ready = scale_rows(x, norm[: product.K], 1e-5) if product.norm else x
    return lambda: multiply(
        ready,
        weight,
        out,
        cut=cut,
        scale=scale,
        count=count,
        swiglu=product.swiglu,
        residual_MN=residual if product.residual else None,
        next_norm=(norm[: product.N], 1e-5) if product.residual else None,
        pdl=dependent_launch(),
    )
