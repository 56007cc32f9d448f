"""The decoder layer that targets and drafters share (Llama, Qwen2, Qwen3 and DFlash differ only by flags).

Shapes: N rows, H hidden, h query heads, g KV heads (both local to the rank, padding included), D head size.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.attention.context import Attention, AttentionContext
from engine.attention.cuda_paged import cuda_paged_attention, takes_unturned, unturned_attention
from engine.layers.cpu_rows import RowKernels, row_kernels
from engine.layers.cuda_rows import CudaRows, cuda_rows
from engine.layers.layer_weights import LayerWeights
from engine.layers.linear import Linear
from engine.layers.rms_norm import RMSNorm, rms_scale
from engine.layers.rotary import RotaryTable, rotate
from engine.parallel.sharding import HeadShard, Shard
from engine.parallel.tp_group import TpGroup

if TYPE_CHECKING:
    from engine.kernels.row_gemm import Scaled  # imports Triton


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """Shape of one rank's decoder layer. qkv_bias, o_bias: attention biases; qk_norm: RMSNorm per head before rope."""

    hidden_size: int
    head_dim: int
    heads: HeadShard
    mlp: Shard
    eps: float
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    device: str


class DecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU MLP; q, k, v and gate, up are one GEMM each.

    qkv.weight rows: q heads, k heads, v heads. gate_up.weight rows: gate, up. The output projections are row-parallel:
    one all-reduce each. qk_norm_weight [h + g, D] holds q_norm's row for every query head and k_norm's for every KV
    head.
    """

    def __init__(self, spec: LayerSpec, *, tp: TpGroup, attention: Attention) -> None:
        super().__init__()
        heads, D, H = spec.heads, spec.head_dim, spec.hidden_size
        self.num_heads, self.num_kv_heads, self.head_dim = heads.num_heads, heads.num_kv_heads, D
        self.mlp_size, self.eps = spec.mlp.size, spec.eps
        self.tp, self.attention = tp, attention
        self.suits_kernels = RowKernels.suit(hidden_size=H, mlp_size=spec.mlp.size, head_dim=D)
        self.input_norm = RMSNorm(H, eps=spec.eps, dtype=spec.dtype, device=spec.device)
        self.qkv = Linear(
            H,
            (heads.num_heads + 2 * heads.num_kv_heads) * D,
            bias=spec.qkv_bias,
            dtype=spec.dtype,
            device=spec.device,
        )
        self.o = Linear(heads.num_heads * D, H, bias=spec.o_bias, dtype=spec.dtype, device=spec.device)
        self.post_norm = RMSNorm(H, eps=spec.eps, dtype=spec.dtype, device=spec.device)
        self.gate_up = Linear(H, 2 * spec.mlp.size, dtype=spec.dtype, device=spec.device)
        self.down = Linear(spec.mlp.size, H, dtype=spec.dtype, device=spec.device)
        self.qk_norm_weight = (
            nn.Parameter(
                torch.ones(heads.num_heads + heads.num_kv_heads, D, dtype=spec.dtype, device=spec.device), False
            )
            if spec.qk_norm
            else None
        )
        # Looked up 30 times a step: plain attributes are found faster than those of nn.Module.
        self._matrices = (self.qkv, self.o, self.gate_up, self.down)
        self._norm_weights = (self.input_norm.weight, self.post_norm.weight)

    def forward(
        self,
        x_NH: Tensor,
        cos_N1D: Tensor,
        sin_N1D: Tensor,
        ctx: AttentionContext,
        kv: tuple[Tensor, Tensor],
        out_NH: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after the layer; the rows' K/V are written at ctx.slot_mapping_N. x_NH is kept.

        out_NH: where the result goes, rows any stride apart; None makes a tensor.
        """
        kernels: RowKernels | CudaRows | None = cuda_rows(x_NH)
        if kernels is None and self.suits_kernels and x_NH.device.type == "cpu":
            kernels = row_kernels(x_NH.dtype)
        if kernels is not None:
            return self._forward_compiled(kernels, x_NH, (cos_N1D, sin_N1D), ctx, kv, out_NH)
        h, g, D = self.num_heads, self.num_kv_heads, self.head_dim
        k_cache, v_cache = kv
        qkv = self.qkv.forward(self.input_norm.forward(x_NH)).view(-1, h + 2 * g, D)
        qk = qkv[:, : h + g]
        if self.qk_norm_weight is not None:
            qk = rms_scale(qk, self.eps).mul_(self.qk_norm_weight)
        qk = rotate(qk, cos_N1D, sin_N1D)
        k_cache.view(-1, g, D).index_copy_(0, ctx.slot_mapping_N, qk[:, h:])
        v_cache.view(-1, g, D).index_copy_(0, ctx.slot_mapping_N, qkv[:, h + g :])
        attended = self.attention(qk[:, :h], k_cache, v_cache, ctx)
        x_NH = x_NH + self.tp.all_reduce(self.o.forward(attended))

        gate_up = self.gate_up.forward(self.post_norm.forward(x_NH))
        mixed = F.silu(gate_up[:, : self.mlp_size]).mul_(gate_up[:, self.mlp_size :])
        return torch.add(x_NH, self.tp.all_reduce(self.down.forward(mixed)), out=out_NH)

    @functools.cached_property
    def cuda_weights(self) -> LayerWeights:
        """The layer's tensors, found once."""
        return LayerWeights(
            input_norm=self.input_norm.weight,
            qkv=self.qkv.weight,
            qkv_bias=self.qkv.bias,
            qk_norm=self.qk_norm_weight,
            o=self.o.weight,
            o_bias=self.o.bias,
            qkv_count=self.qkv.split_count,
            o_count=self.o.split_count,
            gate_up_count=self.gate_up.split_count,
            post_norm=self.post_norm.weight,
            gate_up=self.gate_up.weight,
            down=self.down.weight,
            down_count=self.down.split_count,
            eps=self.eps,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qkv_int8=self.qkv.int8_weight,
            o_int8=self.o.int8_weight,
            gate_up_int8=self.gate_up.int8_weight,
            down_int8=self.down.int8_weight,
        )

    def _forward_compiled(
        self,
        kernels: RowKernels | CudaRows,
        x_NH: Tensor,
        angles: tuple[Tensor, Tensor],
        ctx: AttentionContext,
        kv: tuple[Tensor, Tensor],
        out_NH: Tensor | None,
    ) -> Tensor:
        """`forward` with one compiled call for each chain of row-wise operations."""
        normed_NH = kernels.rms_norm(x_NH, self._norm_weights[0], self.eps)
        x_NH, delta_NH = self.parts(kernels, x_NH, normed_NH, angles, ctx, kv)
        return torch.add(x_NH, delta_NH, out=out_NH)

    def parts(
        self,
        kernels: RowKernels | CudaRows,
        x_NH: Tensor,
        normed_NH: Tensor,
        angles: tuple[Tensor, Tensor],
        ctx: AttentionContext,
        kv: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Two tensors whose sum is the layer's result, from x and its input norm: the next norm takes them together."""
        project_qkv, project_out, project_up, project_down = self._matrices
        q_NhD = kernels.rotate_and_write(
            project_qkv.forward(normed_NH),
            angles,
            ctx.slot_mapping_N,
            kv,
            num_heads=self.num_heads,
            norm_weight=self.qk_norm_weight,
            eps=self.eps,
        )
        attended = self.tp.all_reduce(project_out.forward(self.attention(q_NhD, *kv, ctx)))
        x_NH, normed_NH = kernels.add_rms_norm(x_NH, attended, self._norm_weights[1], self.eps)
        mixed = kernels.wide_swiglu(normed_NH, project_up.weight) if isinstance(kernels, CudaRows) else None
        if mixed is None:
            mixed = kernels.silu_mul(project_up.forward(normed_NH))
        return x_NH, self.tp.all_reduce(project_down.forward(mixed))


@dataclass(frozen=True, kw_only=True, slots=True)
class EnteredRows:
    """Rows ahead of the first layer: embedded, with the (cos, sin) of their positions. scaled: for the fused launches,
    where it was made with them."""

    x_NH: Tensor
    angles: tuple[Tensor, Tensor]
    scaled: "Scaled | None" = None


def enter(
    layers: Sequence[DecoderLayer], embedding: Tensor, ids_N: Tensor, rotary: RotaryTable, positions_N: Tensor
) -> EnteredRows:
    """The rows of these ids at these positions."""
    kernels, first = cuda_rows(embedding), layers[0]
    if kernels is None:
        return EnteredRows(x_NH=F.embedding(ids_N, embedding), angles=rotary.rows(positions_N))
    if not _are_fused(kernels, first, ids_N.shape[0]):
        return EnteredRows(x_NH=kernels.gather_rows(embedding, ids_N), angles=rotary.rows(positions_N))
    x_NH, angles_N2D, scaled = kernels.enter_rows(
        embedding, ids_N, rotary.table, positions_N, first.cuda_weights.input_norm, first.eps
    )
    return EnteredRows(x_NH=x_NH, angles=(angles_N2D[:, :1], angles_N2D[:, 1:]), scaled=scaled)


def _are_fused(kernels: CudaRows, first: DecoderLayer, rows: int) -> bool:
    return first.tp.size == 1 and kernels.takes_layer(rows, first.cuda_weights)


def run_layers(
    layers: Sequence[DecoderLayer],
    entered: EnteredRows,
    ctx: AttentionContext,
    kv: Sequence[tuple[Tensor, Tensor]],
    outs: Sequence[Tensor | None],
) -> Tensor:
    """x through the layers, layer l's result in outs[l] where that is a tensor; the last result.

    On CUDA a layer ends in the next one's norm. Few rows of an unsharded model go through the fused launches
    (`CudaRows.takes_layer`).
    """
    x_NH, angles = entered.x_NH, entered.angles
    kernels, first = cuda_rows(x_NH), layers[0]
    if kernels is None:
        for layer, layer_kv, out_NH in zip(layers, kv, outs, strict=True):
            x_NH = layer.forward(x_NH, *angles, ctx, layer_kv, out_NH)
        return x_NH
    norms = [*[(layer.cuda_weights.input_norm, layer.eps) for layer in layers], None]
    if _are_fused(kernels, first, x_NH.shape[0]):
        return _run_fused(kernels, layers, entered, ctx, kv, outs, norms)
    normed_NH = kernels.rms_norm(x_NH, first.cuda_weights.input_norm, first.eps)
    for layer, layer_kv, out_NH, next_norm in zip(layers, kv, outs, norms[1:], strict=True):
        x_NH, delta_NH = layer.parts(kernels, x_NH, normed_NH, angles, ctx, layer_kv)
        if next_norm is None:
            return torch.add(x_NH, delta_NH, out=out_NH)
        x_NH, normed_NH = kernels.add_rms_norm(x_NH, delta_NH, *next_norm, out_NH)
    raise AssertionError("a model without layers")


def _run_fused(
    kernels: CudaRows,
    layers: Sequence[DecoderLayer],
    entered: EnteredRows,
    ctx: AttentionContext,
    kv: Sequence[tuple[Tensor, Tensor]],
    outs: Sequence[Tensor | None],
    norms: Sequence[tuple[Tensor, float] | None],
) -> Tensor:
    """norms: each layer's input norm and what follows the last, None for nothing."""
    first, x_NH, angles, scaled = layers[0], entered.x_NH, entered.angles, entered.scaled
    if scaled is None:
        scaled = kernels.scale_rows(x_NH, first.cuda_weights.input_norm, first.eps)
    rows = x_NH.shape[0]
    in_attention = kernels.turns_in_attention(rows, first.cuda_weights) and takes_unturned(
        rows, first.num_heads, kv[0][0], ctx
    )
    for layer, layer_kv, out_NH, next_norm in zip(layers, kv, outs, norms[1:], strict=True):
        assert scaled is not None
        weights = layer.cuda_weights
        if in_attention and layer.attention is cuda_paged_attention:
            heads_NhD = kernels.project_unturned(scaled, weights).view(rows, -1, layer.head_dim)
            attended_NE = unturned_attention(
                heads_NhD, *layer_kv, ctx, angles=angles, norm=weights.qk_norm, eps=layer.eps
            )
        else:
            q_NhD = kernels.project_heads(scaled, weights, angles, ctx.slot_mapping_N, layer_kv)
            attended_NE = layer.attention(q_NhD, *layer_kv, ctx)
        new_NH = x_NH.new_empty(x_NH.shape) if out_NH is None else out_NH
        scaled = kernels.finish_layer(x_NH, attended_NE, weights, new_NH, next_norm)
        x_NH = new_NH
    return x_NH
