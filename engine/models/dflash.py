"""The DFlash drafter (arXiv 2602.06036): a block of masks filled in one pass over K/V made from the target's states.

Context rows: c = hidden_norm(fc(taps)) once; every layer's K and V of them come straight from c (no input norm) and
live in the paged cache at the tokens' own positions. Block rows: [last token, MASK ..], by default embedded by the
target and non-causal over context and block (`DrafterConfig` tells the exceptions); the row at a position predicts the
token at that position.
Shapes: N rows, H drafter hidden, T taps, L layers, g KV heads on this rank, D head size, Hs: H / ranks rounded up.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from engine.attention.context import Attention, AttentionContext
from engine.attention.cpu_paged import cpu_paged_attention
from engine.attention.kv_cache_tensors import KvCache
from engine.config.model import DraftAttention, DrafterConfig
from engine.layers.cpu_rows import RowKernels, row_kernels
from engine.layers.cuda_rows import cuda_rows
from engine.layers.linear import Linear
from engine.layers.rms_norm import RMSNorm, rms_scale
from engine.layers.rotary import RotaryTable, rotate
from engine.models.cpu_context import CpuContext
from engine.models.cpu_stack import CpuStacks
from engine.models.decoder import DecoderLayer, EnteredRows, LayerSpec, enter, run_layers
from engine.models.draft_head import DraftHead
from engine.parallel.sharding import shard, shard_heads
from engine.parallel.tp_group import TpGroup


class DFlashDrafter(nn.Module):
    """One rank's share of the drafter.

    tp: the engine's group, over which the hidden-state gather runs. layer_tp: the group that cuts the layers, the same
    one or a group of one when the drafter is replicated.
    hidden_state_gather: "taps": each rank keeps its hidden slice of every tap, gathers all, applies the whole fc;
        "fused": fc cut by output columns, its features gathered (T times fewer bytes). Both: one gather per call.
    """

    def __init__(
        self,
        config: DrafterConfig,
        *,
        tp: TpGroup,
        layer_tp: TpGroup,
        hidden_state_gather: Literal["taps", "fused"],
        dtype: torch.dtype,
        device: str = "cpu",
        num_positions: int,
        attention: Attention = cpu_paged_attention,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.hidden_state_gather = config, tp, hidden_state_gather
        H, D = config.hidden_size, config.head_dim
        heads = shard_heads(config.num_heads, config.num_kv_heads, rank=layer_tp.rank, ranks=layer_tp.size)
        self.tap_hidden_size = config.target_hidden_size or H
        self.tap_shard = shard(self.tap_hidden_size, rank=tp.rank, ranks=tp.size)
        self.fc_shard = shard(H, rank=tp.rank, ranks=tp.size)
        self.spec = LayerSpec(
            hidden_size=H,
            head_dim=D,
            heads=heads,
            mlp=shard(config.intermediate_size, rank=layer_tp.rank, ranks=layer_tp.size),
            eps=config.rms_norm_eps,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            qk_norm=True,
            dtype=dtype,
            device=device,
        )
        num_taps = len(config.target_layer_ids)
        fc_rows = self.fc_shard.size if hidden_state_gather == "fused" else H
        self.fc = Linear(num_taps * self.tap_hidden_size, fc_rows, dtype=dtype, device=device)
        self.hidden_norm = RMSNorm(H, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary = RotaryTable(config.rope, head_dim=D, num_positions=num_positions, dtype=dtype, device=device)
        self.stacked_layers = [
            DecoderLayer(self.spec, tp=layer_tp, attention=attention) for _ in range(config.num_layers)
        ]
        self.layers = nn.ModuleList(self.stacked_layers)
        self.norm = RMSNorm(H, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self._stacks = CpuStacks(self.stacked_layers, self.norm)
        self._context: CpuContext | None = None
        # Copies of the layers' K and V rows, [k0 | v0 | k1 | v1 ..], so that the context takes one GEMM.
        self.context_kv = Linear(
            H,
            config.num_layers * 2 * heads.num_kv_heads * D,
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
        )
        self.context_k_norm = nn.Parameter(
            torch.ones(config.num_layers, heads.num_kv_heads, D, dtype=dtype, device=device), False
        )
        self.suits_kernels = RowKernels.suit(hidden_size=H, mlp_size=self.spec.mlp.size, head_dim=D)
        self.embedding = (
            nn.Parameter(torch.zeros(config.vocab_size, H, dtype=dtype, device=device), False)
            if config.own_embedding
            else None
        )
        self.head = DraftHead(config, tp=tp, dtype=dtype, device=device) if config.draft_vocab_size else None

    def finish_loading(self) -> None:
        """Fills what follows from the weights; called once, after they are loaded.

        Raises:
            ValueError: a vocabulary map that is none.
        """
        if self.head is not None:
            self.head.finish_loading()
        h, g, D = self.spec.heads.num_heads, self.spec.heads.num_kv_heads, self.spec.head_dim
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer) and layer.qk_norm_weight is not None
            rows = slice(index * 2 * g * D, (index + 1) * 2 * g * D)
            self.context_kv.weight.data[rows] = layer.qkv.weight.data[h * D :]
            if self.context_kv.bias is not None and layer.qkv.bias is not None:
                self.context_kv.bias.data[rows] = layer.qkv.bias.data[h * D :]
            self.context_k_norm.data[index] = layer.qk_norm_weight.data[h]

    def enter(self, target_embedding: Tensor, ids_N: Tensor, positions_N: Tensor) -> EnteredRows:
        """Block rows of these ids, embedded by the target unless the drafter has an embedding of its own."""
        embedding = target_embedding if self.embedding is None else self.embedding
        return enter(self.stacked_layers, embedding, ids_N, self.rotary, positions_N)

    def context_features(self, taps_NTH: Tensor) -> Tensor:
        """hidden_norm(fc(taps)), [N, H], equal on every rank. Exactly one `tp.hidden_state_gather`."""
        N, T, _ = taps_NTH.shape
        if self.hidden_state_gather == "fused":
            features_NH = self.tp.hidden_state_gather(self.fc.forward(taps_NTH.reshape(N, -1)))
            return self.hidden_norm.forward(features_NH[:, : self.config.hidden_size])
        part = self.tap_shard
        mine_NTh = taps_NTH[:, :, part.start : part.start + part.real]
        if part.real < part.size:
            mine_NTh = nn.functional.pad(mine_NTh, (0, part.size - part.real))
        gathered = self.tp.hidden_state_gather(mine_NTh.reshape(N, T * part.size))
        whole_NTH = gathered.view(N, self.tp.size, T, part.size).transpose(1, 2).reshape(N, T, -1)
        return self.hidden_norm.forward(self.fc.forward(whole_NTH[:, :, : self.tap_hidden_size].reshape(N, -1)))

    def feed_context(self, taps_NTH: Tensor, positions_N: Tensor, slot_mapping_N: Tensor, kv: KvCache) -> None:
        """`write_context` of `context_features`."""
        if taps_NTH.device.type == "cpu" and CpuContext.takes(self, taps_NTH.shape[0]):
            if self._context is None or self._context.kv is not kv:
                self._context = CpuContext(self, kv) if CpuContext.suits(self) else None
            if self._context is not None:
                self._context.write(taps_NTH, self.rotary.rows(positions_N), slot_mapping_N)
                return
        self.write_context(self.context_features(taps_NTH), positions_N, slot_mapping_N, kv)

    def write_context(self, c_NH: Tensor, positions_N: Tensor, slot_mapping_N: Tensor, kv: KvCache) -> None:
        """Writes K (normed, rotated) and V of every layer at the rows' slots; rows to be dropped point into block 0."""
        assert kv.drafter_stack is not None
        N, L, g, D = c_NH.shape[0], self.config.num_layers, self.spec.heads.num_kv_heads, self.spec.head_dim
        cos_N1D, sin_N1D = self.rotary.rows(positions_N)
        on_gpu = cuda_rows(c_NH)
        if on_gpu is not None:
            on_gpu.write_context(
                c_NH,
                self.context_kv,
                (cos_N1D, sin_N1D),
                slot_mapping_N,
                kv.drafter_stack,
                self.context_k_norm,
                self.config.rms_norm_eps,
            )
            return
        kv_NLE = self.context_kv.forward(c_NH).view(N, L, 2 * g * D)
        kernels = row_kernels(c_NH.dtype) if c_NH.device.type == "cpu" and self.suits_kernels else None
        if kernels is not None:
            for index, rows_NE in enumerate(kv_NLE.transpose(0, 1).contiguous()):
                kernels.rotate_and_write(
                    rows_NE,
                    (cos_N1D, sin_N1D),
                    slot_mapping_N,
                    (kv.drafter_stack[2 * index], kv.drafter_stack[2 * index + 1]),
                    num_heads=0,
                    norm_weight=self.context_k_norm[index],
                    eps=self.config.rms_norm_eps,
                )
            return
        kv_NL2gD = kv_NLE.view(N, L, 2, g, D)
        k_NLgD = rms_scale(kv_NL2gD[:, :, 0], self.config.rms_norm_eps) * self.context_k_norm
        k_NLgD = rotate(k_NLgD, cos_N1D.unsqueeze(1), sin_N1D.unsqueeze(1))
        stack = torch.stack((k_NLgD, kv_NL2gD[:, :, 1]), dim=2).view(N, 2 * L, g, D)
        kv.drafter_stack.index_copy_(1, slot_mapping_N, stack.transpose(0, 1))

    def draft_hidden(
        self,
        block: EnteredRows,
        ctx: AttentionContext,
        kv: KvCache,
        *,
        block_width: int,
        num_drafts: int,
    ) -> Tensor:
        """`forward` of blocks of block_width rows each -> their rows 1 .. num_drafts, [blocks * num_drafts, H]."""
        x_NH = block.x_NH
        num_blocks = x_NH.shape[0] // block_width
        stack = self._stacks.find(x_NH, ctx, kv.drafter_kv) if num_blocks == 1 and not self.config.attention else None
        if stack is not None and not ctx.groups[0].causal:
            return stack.run(x_NH, block.angles, ctx, range(1, num_drafts + 1))[0]
        hidden_NH = self.forward(block, ctx, kv)
        return hidden_NH.view(num_blocks, block_width, -1)[:, 1 : num_drafts + 1].reshape(num_blocks * num_drafts, -1)

    def forward(self, block: EnteredRows, ctx: AttentionContext, kv: KvCache) -> Tensor:
        """Block rows [last token, MASK ..] -> hidden states after the final norm, [N, H].

        ctx: of a layer that sees everything; the others' are made of it. The block's own K/V go to
        ctx.slot_mapping_N, past the context; the next step overwrites them.
        """
        x_NH, angles = block.x_NH, block.angles
        if not self.config.attention:
            stack = self._stacks.find(x_NH, ctx, kv.drafter_kv)
            if stack is not None:
                return stack.run(x_NH, angles, ctx)[0]
            x_NH = run_layers(self.stacked_layers, block, ctx, kv.drafter_kv, [None] * len(self.stacked_layers))
            return self.norm.forward(x_NH)
        contexts = {kind: _context_of(kind, ctx) for kind in self.config.attention}
        for layer, kind, layer_kv in zip(self.stacked_layers, self.config.attention, kv.drafter_kv, strict=True):
            x_NH = layer.forward(x_NH, *angles, contexts[kind], layer_kv)
        return self.norm.forward(x_NH)


def _context_of(kind: DraftAttention, ctx: AttentionContext) -> AttentionContext:
    if kind == DraftAttention():
        return ctx
    return replace(ctx, groups=tuple(replace(group, causal=kind.causal, window=kind.window) for group in ctx.groups))
