"""The Triton kernels of `engine.kernels` as decoder layers use them on CUDA. See there for what each computes.

`cuda_rows(x)` gives them, or None where they cannot run; callers then use the torch expressions. Two ways through a
layer: few rows take five launches and a merge, everything around the matrices fused into them (a sixth where neither a
product nor attention turns the heads); all else takes cuBLAS and the row-wise kernels, whose interface is that of the
CPU's (`engine.layers.cpu_rows`).
Shapes: N rows, H hidden, h query heads, g KV heads, D head size.
"""

from __future__ import annotations  # Linear imports this module, Scaled's imports Triton: both only annotate

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.kernels.available import KERNEL_DTYPES, copy_engine, dependent_launch, interpreted, unavailable_reason
from engine.kernels.gemm_choice import GemmCut, PeakCut, StreamCut, head_cut, peak_cut
from engine.kernels.wide_choice import WideCut, argmax_cut, swiglu_cut
from engine.layers.cuda_cuts import copyable, cut_of, int8_of, stream_of
from engine.layers.int8_weight import Int8Weight
from engine.layers.layer_weights import LayerWeights

if TYPE_CHECKING:
    from engine.kernels.row_gemm import Scaled
    from engine.layers.linear import Linear


def cuda_rows(x: Tensor) -> CudaRows | None:
    """The kernels for tensors like x; None on other devices and types, and where `unavailable_reason` has one."""
    if not x.is_cuda or x.dtype not in KERNEL_DTYPES or unavailable_reason() is not None:
        return None
    return _kernels()


@functools.cache
def _kernels() -> CudaRows:
    return CudaRows(pdl=dependent_launch() and not interpreted())


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaRows:
    """Without state. All tensors of a call are on one device and of one dtype; rows may be any stride apart where
    2-dimensional. pdl: whether launches overlap."""

    pdl: bool

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from engine.kernels.row_ops import rms_norm

        return rms_norm(x, weight, eps, pdl=self.pdl)

    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + delta, its rms_norm). total: where the sum goes, rows any stride apart."""
        from engine.kernels.row_ops import add_rms_norm

        return add_rms_norm(x, delta, weight, eps, total_NH=total, pdl=self.pdl)

    def gather_rows(self, table: Tensor, index_N: Tensor) -> Tensor:
        """table[index], [N, ..]; indices must be valid."""
        from engine.kernels.row_ops import gather_rows

        return gather_rows(table, index_N, pdl=self.pdl)

    def clear_rows(self, x_NH: Tensor, first_1: Tensor) -> None:
        """Zeros in rows first_1 (on the device) and beyond."""
        from engine.kernels.row_ops import clear_rows

        clear_rows(x_NH, first_1, pdl=self.pdl)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[N, 2 * size] -> silu(first half) * second half."""
        from engine.kernels.row_ops import silu_mul

        return silu_mul(gate_up, pdl=self.pdl)

    def wide_swiglu(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """`silu_mul` of x @ weight.T in one launch, or None where two are the better choice."""
        cut = swiglu_cut(rows=x.shape[0], K=x.shape[1], N=weight.shape[0] // 2, item_bytes=weight.element_size())
        if cut is None or not copy_engine():
            return None
        from engine.kernels.wide_gemm import wide_swiglu

        return wide_swiglu(x, weight, cut=cut)

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

    def takes_head(self, rows: int, weight: Tensor) -> bool:
        """Whether so many rows go through `head_argmax` and `head_logits`, whose numbers are the same."""
        return self._head_cut(rows, weight) is not None

    def head_argmax(self, x: Tensor, weight: Tensor, vocab_start: int, num_real: int) -> tuple[Tensor, Tensor]:
        """`shard_argmax` of x @ weight[:num_real].T without its logits. Only where `takes_head`, whose answer follows
        from the whole weight: padded, it has the same shape on all ranks, which so take the same way."""
        cut, real = self._head_cut(x.shape[0], weight), weight[:num_real]
        if isinstance(cut, PeakCut):
            from engine.kernels.stream_head import stream_argmax

            return stream_argmax(x, real, vocab_start, cut=cut, pdl=self.pdl)
        from engine.kernels.wide_gemm import wide_argmax

        assert cut is not None
        return wide_argmax(x, real, vocab_start, cut=cut, pdl=self.pdl)

    def head_logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T, float32. Only where `takes_head`."""
        cut = self._head_cut(x.shape[0], weight)
        if isinstance(cut, PeakCut):
            from engine.kernels.stream_head import stream_logits

            return stream_logits(x, weight, cut=cut, pdl=self.pdl)
        from engine.kernels.wide_gemm import wide_logits

        assert cut is not None
        return wide_logits(x, weight, cut=cut)

    def _head_cut(self, rows: int, weight: Tensor) -> PeakCut | WideCut | None:
        if not copy_engine():
            return None
        N, K = weight.shape
        few = peak_cut(rows=rows, K=K, N=N) if weight.dtype == torch.bfloat16 else None
        return few or argmax_cut(rows=rows, K=K, N=N, item_bytes=weight.element_size())

    def filter_thresholds(
        self,
        logits_NV: Tensor,
        *,
        temperature_N: Tensor,
        top_k_N: Tensor | None,
        top_p_N: Tensor | None,
        min_p_N: Tensor,
    ) -> Tensor:
        """What a row's logit / temperature must reach to be kept; see `engine.sampling.filters`."""
        from engine.kernels.draw_rows import filter_thresholds

        return filter_thresholds(
            logits_NV,
            temperature_N=temperature_N,
            top_k_N=top_k_N,
            top_p_N=top_p_N,
            min_p_N=min_p_N,
            pdl=self.pdl,
        )

    def draw_rows(
        self,
        logits_NV: Tensor,
        *,
        temperature_N: Tensor,
        threshold_N: Tensor | None,
        seed_N: Tensor,
        position_N: Tensor,
        vocab_start: int,
    ) -> tuple[Tensor, Tensor]:
        """(value, global id) of each row's draw among the tokens that reach its threshold."""
        from engine.kernels.draw_rows import draw_rows

        return draw_rows(
            logits_NV,
            temperature_N=temperature_N,
            threshold_N=threshold_N,
            seed_N=seed_N,
            position_N=position_N,
            vocab_start=vocab_start,
            pdl=self.pdl,
        )

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype | None,
        count: Tensor,
        int8: Int8Weight | None = None,
    ) -> Tensor | None:
        """x @ weight.T + bias for few rows, or None where cuBLAS is the better choice. count: Linear.split_count. int8:
        the weight in 8 bits, which still fewer rows are multiplied by. x: begins at a multiple of 16 bytes; where its
        rows do not lie such apart, they are copied for the copy engine."""
        rows = x.numel() // x.shape[-1]
        N, K = weight.shape
        if int8_of(int8, rows) is None and cut_of(weight.dtype, rows=rows, K=K, N=N) is None:
            return None
        out = torch.empty(rows, N, dtype=out_dtype or x.dtype, device=x.device)
        self._product(x.reshape(rows, K), weight, out, int8=int8, bias=bias, count=count)
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
        cut = head_cut(rows=c_NH.shape[0], K=c_NH.shape[1], head_dim=D)
        if cut is None:
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
            head_norm=(norm_weight, eps),
            cut=cut,
            pdl=self.pdl,
        )

    def takes_layer(self, rows: int, layer: LayerWeights) -> bool:
        """Whether a layer of that many rows runs in the fused launches."""
        H, mlp_size, dtype = layer.input_norm.shape[0], layer.down.shape[1], layer.down.dtype
        by_heads = head_cut(rows=rows, K=H, head_dim=layer.head_dim) is not None
        return (
            (by_heads or cut_of(dtype, rows=rows, K=H, N=layer.qkv.shape[0]) is not None)
            and cut_of(dtype, rows=rows, K=layer.o.shape[1], N=H) is not None
            and cut_of(dtype, rows=rows, K=H, N=mlp_size, swiglu=True) is not None
            and cut_of(dtype, rows=rows, K=mlp_size, N=H) is not None
        )

    def enter_rows(
        self, embedding: Tensor, ids_N: Tensor, angles: Tensor, positions_N: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Scaled]:
        """(embedding[ids], angles[positions], `scale_rows` of the first); indices must be valid."""
        from engine.kernels.row_ops import enter_rows

        return enter_rows(embedding, ids_N, angles, positions_N, weight, eps, pdl=self.pdl)

    def scale_rows(self, x_NH: Tensor, weight: Tensor, eps: float) -> Scaled:
        """Rows for the first of the fused layers."""
        from engine.kernels.row_ops import scale_rows

        return scale_rows(x_NH, weight, eps, pdl=self.pdl)

    def turns_in_attention(self, rows: int, layer: LayerWeights) -> bool:
        """Whether no kernel makes whole heads of such rows, so that attention may as well turn them."""
        return head_cut(rows=rows, K=layer.input_norm.shape[0], head_dim=layer.head_dim) is None

    def project_unturned(self, scaled: Scaled, layer: LayerWeights) -> Tensor:
        """The rows' heads [N, (h + 2g) * D] as the product leaves them. Only where `takes_layer`."""
        qkv = scaled.x_MK.new_empty(scaled.x_MK.shape[0], layer.qkv.shape[0])
        self._product(scaled, layer.qkv, qkv, bias=layer.qkv_bias, count=layer.qkv_count, int8=layer.qkv_int8)
        return qkv

    def project_heads(
        self,
        scaled: Scaled,
        layer: LayerWeights,
        angles: tuple[Tensor, Tensor],
        slots_N: Tensor,
        kv: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Rotated q [N, h, D] of the rows' norm; k and v go to the caches' slots. Only where `takes_layer`."""
        from engine.kernels.head_gemm import head_gemm

        N, H = scaled.x_MK.shape
        cut = head_cut(rows=N, K=H, head_dim=layer.head_dim)
        if cut is None:
            qkv = self.project_unturned(scaled, layer)
            return self.rotate_and_write(
                qkv, angles, slots_N, kv, num_heads=layer.num_heads, norm_weight=layer.qk_norm, eps=layer.eps
            )
        q_NhD = scaled.x_MK.new_empty(N, layer.num_heads, layer.head_dim)
        head_gemm(
            scaled,
            layer.qkv,
            angles,
            slots_N,
            kv,
            q_NhD,
            num_heads=layer.num_heads,
            bias=layer.qkv_bias,
            head_norm=None if layer.qk_norm is None else (layer.qk_norm, layer.eps),
            cut=cut,
            pdl=self.pdl,
        )
        return q_NhD

    def finish_layer(
        self,
        x_NH: Tensor,
        attended_NE: Tensor,
        layer: LayerWeights,
        out_NH: Tensor,
        next_norm: tuple[Tensor, float] | None,
    ) -> Scaled | None:
        """out = y + mlp(post_norm(y)) with y = x + attended @ o.T, and its Scaled rows for the next norm."""
        N, H = x_NH.shape
        y_NH = x_NH.new_empty(N, H)
        post_norm = (layer.post_norm, layer.eps)
        scaled = self._product(
            attended_NE,
            layer.o,
            y_NH,
            bias=layer.o_bias,
            residual_MN=x_NH,
            next_norm=post_norm,
            count=layer.o_count,
            int8=layer.o_int8,
        )
        assert scaled is not None
        mixed = x_NH.new_empty(N, layer.down.shape[1])
        self._product(scaled, layer.gate_up, mixed, swiglu=True, count=layer.gate_up_count, int8=layer.gate_up_int8)
        return self._product(
            mixed,
            layer.down,
            out_NH,
            residual_MN=y_NH,
            next_norm=next_norm,
            count=layer.down_count,
            int8=layer.down_int8,
        )

    def _product(
        self, x: Tensor | Scaled, weight: Tensor, out: Tensor, int8: Int8Weight | None, **fused: Any
    ) -> Scaled | None:
        """A layer's product with what is fused into it: the arguments of `row_gemm` but for cut, scale and pdl. int8:
        the weight in 8 bits, which is taken where so few rows gain by it."""
        rows, swiglu = out.shape[0], fused.get("swiglu", False)
        cut = int8_of(int8, rows, swiglu=swiglu)
        if int8 is not None and cut is not None:
            weight, fused = int8.rounded, {**fused, "scale": int8.scale}
        else:
            cut = stream_of(weight.dtype, rows=rows, K=weight.shape[1], N=out.shape[1], swiglu=swiglu)
        if isinstance(cut, StreamCut):
            from engine.kernels.stream_gemm import stream_gemm

            x = copyable(x) if isinstance(x, Tensor) else x
            return stream_gemm(x, weight, out, cut=cut, pdl=self.pdl, **fused)
        return self._triton_product(x, weight, out, cut=cut, **fused)

    def _triton_product(
        self, x: Tensor | Scaled, weight: Tensor, out: Tensor, *, cut: GemmCut | None = None, **fused: Any
    ) -> Scaled | None:
        """`_product` of the weight that is given, by the kernel that knows all types. cut: by default `cut_of`'s."""
        from engine.kernels.row_gemm import row_gemm

        swiglu = fused.get("swiglu", False)
        cut = cut or cut_of(weight.dtype, rows=out.shape[0], K=weight.shape[1], N=out.shape[1], swiglu=swiglu)
        assert cut is not None
        return row_gemm(x, weight, out, cut=cut, pdl=self.pdl, **fused)
