"""The Triton kernels of `engine.kernels` as decoder layers use them on CUDA. See there for what each computes.

`cuda_rows(x)` gives them, or None where they cannot run; callers then use the torch expressions. Two ways through a
layer: few rows take five launches, everything around the matrices fused into them; more rows take cuBLAS and the
row-wise kernels of the same interface as the CPU's (`engine.layers.cpu_rows`).
Shapes: N rows, H hidden, h query heads, g KV heads, D head size.
"""

from __future__ import annotations  # Linear, which imports this module, is named in a signature

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels.available import KERNEL_DTYPES, dependent_launch, interpreted, unavailable_reason
from engine.kernels.gemm_choice import MAX_ROWS, GemmCut, gemm_cut, head_cut

if TYPE_CHECKING:
    from engine.layers.linear import Linear


def cuda_rows(x: Tensor) -> CudaRows | None:
    """The kernels for tensors like x; None on other devices and types, and where `unavailable_reason` has one."""
    if not x.is_cuda or x.dtype not in KERNEL_DTYPES or unavailable_reason() is not None:
        return None
    return _of(x.device)


@functools.cache
def _of(device: torch.device) -> CudaRows:
    return CudaRows(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """A decoder layer's tensors; see `engine.models.decoder.DecoderLayer`. qk_norm: [h + g, D] or None."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int


class CudaRows:
    """One per device. Every tensor is on it and of one dtype; rows may be any stride apart where 2-dimensional."""

    def __init__(self, device: torch.device) -> None:
        from engine.kernels.row_gemm import GemmWorkspace  # imports Triton, which not every machine has

        on_gpu = device.type == "cuda"
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        self.pdl = dependent_launch() and not interpreted()
        self._workspace = GemmWorkspace(device)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from engine.kernels.row_ops import rms_norm

        return rms_norm(x, weight, eps, pdl=self.pdl)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + delta, its rms_norm)."""
        from engine.kernels.row_ops import add_rms_norm

        return add_rms_norm(x, delta, weight, eps, pdl=self.pdl)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[N, 2 * size] -> silu(first half) * second half."""
        from engine.kernels.row_ops import silu_mul

        return silu_mul(gate_up, pdl=self.pdl)

    def rotate_and_write(
        self,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        slots_N: Tensor,
        kv: tuple[Tensor, Tensor],
        *,
        num_heads: int,
        norm_weight: Tensor | None,
        eps: float,
        num_layers: int = 1,
    ) -> Tensor:
        """qkv [N, L * (h + 2g) * D] -> rotated q [N, h, D]; rotated k and v of every layer go to the caches' slots."""
        from engine.kernels.row_ops import rotate_and_write

        return rotate_and_write(
            qkv,
            angles,
            slots_N,
            kv,
            num_heads=num_heads,
            num_layers=num_layers,
            head_norm=None if norm_weight is None else (norm_weight, eps),
            pdl=self.pdl,
        )

    def shard_argmax(self, score_NV: Tensor, vocab_start: int) -> tuple[Tensor, Tensor]:
        """(largest value, its lowest global id) of each row; see `engine.sampling.sampler.argmax_pair`."""
        from engine.kernels.shard_argmax import shard_argmax

        return shard_argmax(score_NV, vocab_start, pdl=self.pdl)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor | None:
        """x @ weight.T + bias for few rows, or None where cuBLAS is the better choice."""
        rows = x.numel() // x.shape[-1]
        N, K = weight.shape
        cut = gemm_cut(rows=rows, K=K, N=N, num_sms=self.num_sms) if 0 < rows <= MAX_ROWS else None
        if cut is None:
            return None
        out = torch.empty(rows, N, dtype=out_dtype or x.dtype, device=x.device)
        self._product(x.reshape(rows, K), weight, out, cut, bias=bias)
        return out.view(*x.shape[:-1], N)

    def write_context(
        self,
        c_NH: Tensor,
        projection: Linear,
        angles: tuple[Tensor, Tensor],
        slots_N: Tensor,
        stack: Tensor,
        norm_weight: Tensor,
        eps: float,
    ) -> None:
        """K and V of every drafter layer from the context's features: one launch for few rows, else two.

        projection: a Linear of [k0 | v0 | k1 | ..] rows; stack [2 * L, slots, g, D]; norm_weight [L, g, D].
        """
        from engine.kernels.head_gemm import head_gemm

        L, _, D = norm_weight.shape
        caches = (stack[0], stack[1])
        cut = head_cut(K=c_NH.shape[1], head_dim=D)
        if cut is None or not 0 < c_NH.shape[0] <= MAX_ROWS:
            self.rotate_and_write(
                projection.forward(c_NH),
                angles,
                slots_N,
                caches,
                num_heads=0,
                norm_weight=norm_weight,
                eps=eps,
                num_layers=L,
            )
            return
        head_gemm(
            c_NH,
            projection.weight,
            angles,
            slots_N,
            caches,
            c_NH.new_empty(1, 1, D),
            num_heads=0,
            num_layers=L,
            bias=projection.bias,
            norm=None,
            head_norm=(norm_weight, eps),
            cut=cut,
            pdl=self.pdl,
        )

    def takes_layer(self, rows: int, layer: LayerWeights) -> bool:
        """Whether a layer of that many rows runs in the fused launches."""
        H = layer.input_norm.shape[0]
        cuts = (
            gemm_cut(rows=rows, K=layer.o.shape[1], N=H, num_sms=self.num_sms),
            gemm_cut(rows=rows, K=H, N=layer.down.shape[1], swiglu=True, num_sms=self.num_sms),
            gemm_cut(rows=rows, K=layer.down.shape[1], N=H, num_sms=self.num_sms),
        )
        return 0 < rows <= MAX_ROWS and all(cut is not None for cut in cuts)

    def project_heads(
        self,
        x_NH: Tensor,
        layer: LayerWeights,
        angles: tuple[Tensor, Tensor],
        slots_N: Tensor,
        kv: tuple[Tensor, Tensor],
    ) -> Tensor:
        """rms_norm(x) -> rotated q [N, h, D]; k and v go to the caches' slots. One launch where heads are small."""
        from engine.kernels.head_gemm import head_gemm

        N, H = x_NH.shape
        cut = head_cut(K=H, head_dim=layer.head_dim)
        if cut is not None:
            q_NhD = x_NH.new_empty(N, layer.num_heads, layer.head_dim)
            head_gemm(
                x_NH,
                layer.qkv,
                angles,
                slots_N,
                kv,
                q_NhD,
                num_heads=layer.num_heads,
                bias=layer.qkv_bias,
                norm=(layer.input_norm, layer.eps),
                head_norm=None if layer.qk_norm is None else (layer.qk_norm, layer.eps),
                cut=cut,
                pdl=self.pdl,
            )
            return q_NhD
        norm = (layer.input_norm, layer.eps)
        product = gemm_cut(rows=N, K=H, N=layer.qkv.shape[0], num_sms=self.num_sms)
        if product is not None:
            qkv = x_NH.new_empty(N, layer.qkv.shape[0])
            self._product(x_NH, layer.qkv, qkv, product, bias=layer.qkv_bias, norm=norm)
        else:
            qkv = torch.nn.functional.linear(self.rms_norm(x_NH, *norm), layer.qkv, layer.qkv_bias)
        return self.rotate_and_write(
            qkv, angles, slots_N, kv, num_heads=layer.num_heads, norm_weight=layer.qk_norm, eps=layer.eps
        )

    def finish_layer(self, x_NH: Tensor, attended_NE: Tensor, layer: LayerWeights, out_NH: Tensor) -> None:
        """out = y + mlp(post_norm(y)) with y = x + attended @ o.T: three launches. Only where `takes_layer`."""
        N, H = x_NH.shape
        y_NH = x_NH.new_empty(N, H)
        cut = gemm_cut(rows=N, K=layer.o.shape[1], N=H, num_sms=self.num_sms)
        assert cut is not None
        self._product(attended_NE, layer.o, y_NH, cut, bias=layer.o_bias, residual_MN=x_NH)
        mlp_size = layer.down.shape[1]
        mixed = x_NH.new_empty(N, mlp_size)
        cut = gemm_cut(rows=N, K=H, N=mlp_size, swiglu=True, num_sms=self.num_sms)
        assert cut is not None
        self._product(y_NH, layer.gate_up, mixed, cut, norm=(layer.post_norm, layer.eps), swiglu=True)
        cut = gemm_cut(rows=N, K=mlp_size, N=H, num_sms=self.num_sms)
        assert cut is not None
        self._product(mixed, layer.down, out_NH, cut, residual_MN=y_NH)

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        cut: GemmCut,
        *,
        bias: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
        swiglu: bool = False,
        residual_MN: Tensor | None = None,
    ) -> None:
        from engine.kernels.row_gemm import row_gemm

        row_gemm(
            x,
            weight,
            out,
            cut=cut,
            workspace=self._workspace if cut.num_splits > 1 else None,
            bias=bias,
            norm=norm,
            swiglu=swiglu,
            residual_MN=residual_MN,
            pdl=self.pdl,
        )
