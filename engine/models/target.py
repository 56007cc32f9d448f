"""The target model: a dense decoder (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM) over a paged KV cache.

Shapes: N rows, H hidden, V vocabulary (Vl: the rank's padded part), T taps, M rows of the head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.attention.context import Attention, AttentionContext
from engine.attention.cpu_paged import cpu_paged_attention
from engine.attention.kv_cache_tensors import KvCache
from engine.config.model import TargetConfig
from engine.layers.cuda_cuts import int8_of
from engine.layers.cuda_rows import cuda_rows
from engine.layers.linear import Linear
from engine.layers.rms_norm import RMSNorm
from engine.layers.rotary import RotaryTable
from engine.models.cpu_stack import CpuStacks
from engine.models.decoder import DecoderLayer, LayerSpec, enter, run_layers
from engine.parallel.sharding import shard, shard_heads
from engine.parallel.tp_group import TpGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOutput:
    """hidden_NH: after the final norm. taps_NTH: residual stream after each tapped layer, full H on every rank."""

    hidden_NH: Tensor
    taps_NTH: Tensor | None


class TargetModel(nn.Module):
    """One rank's shard. The embedding is replicated (no collective to embed); the head is cut by vocabulary rows.

    With tied embeddings the head's weight is a view of the rank's rows of the embedding, which is therefore padded to
    a multiple of the group's size.
    """

    def __init__(
        self,
        config: TargetConfig,
        *,
        tp: TpGroup,
        dtype: torch.dtype,
        device: str = "cpu",
        num_positions: int,
        attention: Attention = cpu_paged_attention,
    ) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        self.vocab = shard(config.vocab_size, rank=tp.rank, ranks=tp.size)
        H = config.hidden_size
        spec = LayerSpec(
            hidden_size=H,
            head_dim=config.head_dim,
            heads=shard_heads(config.num_heads, config.num_kv_heads, rank=tp.rank, ranks=tp.size),
            mlp=shard(config.intermediate_size, rank=tp.rank, ranks=tp.size),
            eps=config.rms_norm_eps,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm=config.qk_norm,
            dtype=dtype,
            device=device,
        )
        self.spec = spec
        rows = self.vocab.size * tp.size
        self.embedding = nn.Parameter(torch.zeros(rows, H, dtype=dtype, device=device), False)
        self.rotary = RotaryTable(
            config.rope, head_dim=config.head_dim, num_positions=num_positions, dtype=dtype, device=device
        )
        self._layers = [DecoderLayer(spec, tp=tp, attention=attention) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(self._layers)
        self.norm = RMSNorm(H, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self._stacks = CpuStacks(self._layers, self.norm)
        head_rows = 0 if config.tie_word_embeddings else self.vocab.size
        self.head = Linear(H, head_rows, dtype=dtype, device=device, out_dtype=torch.float32)
        if config.tie_word_embeddings:
            mine = self.embedding.data[self.vocab.start : self.vocab.start + self.vocab.size]
            self.head.weight = nn.Parameter(mine, False)
        self.draft_head: Linear | None = None

    @property
    def vocab_start(self) -> int:
        """Vocabulary id of the first column of this rank's logits."""
        return self.vocab.start

    def forward(
        self, ids_N: Tensor, positions_N: Tensor, ctx: AttentionContext, kv: KvCache, tap_layers: tuple[int, ...]
    ) -> TargetOutput:
        """Runs the step's rows and writes their K/V.

        tap_layers: ascending 0-based layer ids; tap j is the residual stream after layer tap_layers[j], which
            `transformers` calls hidden_states[tap_layers[j] + 1] (for all but the last layer).
        """
        entered = enter(self._layers, self.embedding, ids_N, self.rotary, positions_N)
        x_NH = entered.x_NH
        stack = self._stacks.find(x_NH, ctx, kv.target_kv, tap_layers)
        if stack is not None:
            hidden_NH, taps_NTH = stack.run(x_NH, entered.angles, ctx)
            return TargetOutput(hidden_NH=hidden_NH, taps_NTH=taps_NTH)
        taps_NTH = x_NH.new_empty(x_NH.shape[0], len(tap_layers), x_NH.shape[1]) if tap_layers else None
        outs: list[Tensor | None] = [None] * len(self._layers)
        if taps_NTH is not None:
            for tap, index in enumerate(tap_layers):
                outs[index] = taps_NTH[:, tap]
        x_NH = run_layers(self._layers, entered, ctx, kv.target_kv, outs)
        return TargetOutput(hidden_NH=self.norm.forward(x_NH), taps_NTH=taps_NTH)

    def add_draft_head(self) -> None:
        """A second head for drafts, its weights rounded to 8 bits, where device and shape have that form. Called once,
        after loading and before `head` is prepared."""
        head = self.head
        rounded = Linear(head.weight.shape[1], 0, dtype=head.weight.dtype, out_dtype=torch.float32)
        rounded.weight = nn.Parameter(head.weight.data, False)
        if rounded.prepare(int8=True) or rounded.int8_weight is not None:
            self.draft_head = rounded

    def draft_logits(self, hidden_MH: Tensor) -> Tensor:
        """`logits` for drafting: by the rounded head where there is one."""
        return self._logits(self.draft_head or self.head, hidden_MH)

    def logits(self, hidden_MH: Tensor) -> Tensor:
        """float32 [M, Vl]: ids vocab_start .. vocab_start + Vl - 1; columns past the vocabulary are -inf."""
        return self._logits(self.head, hidden_MH)

    def finds_peaks(self, num_rows: int) -> bool:
        """Whether `peaks` of so many rows is for less than `logits` and a search in them."""
        on_gpu = None if self.head.is_prepared else cuda_rows(self.head.weight)
        return on_gpu is not None and on_gpu.takes_head(num_rows, self.head.weight)

    def finds_draft_peaks(self, num_rows: int) -> bool:
        """`finds_peaks` for drafting: False where the rounded head takes the rows, of which `peaks` knows nothing."""
        return not _takes_int8(self.draft_head or self.head, num_rows) and self.finds_peaks(num_rows)

    def peaks(self, hidden_MH: Tensor) -> tuple[Tensor, Tensor]:
        """`engine.sampling.sampler.argmax_pair` of `logits`, which are not made. Only where `finds_peaks`."""
        on_gpu = cuda_rows(hidden_MH)
        assert on_gpu is not None
        return on_gpu.head_argmax(hidden_MH, self.head.weight, self.vocab.start, self.vocab.real)

    def _logits(self, head: Linear, hidden_MH: Tensor) -> Tensor:
        on_gpu, num_rows = cuda_rows(hidden_MH), hidden_MH.shape[0]
        if on_gpu is not None and not _takes_int8(head, num_rows) and on_gpu.takes_head(num_rows, head.weight):
            logits_MV = on_gpu.head_logits(hidden_MH, head.weight)
        else:
            logits_MV = head.forward(hidden_MH)
        if self.vocab.real < self.vocab.size:
            logits_MV[:, self.vocab.real :] = float("-inf")
        return logits_MV


def _takes_int8(head: Linear, num_rows: int) -> bool:
    """Whether so many rows are multiplied by a weight of 8 bits on CUDA."""
    return int8_of(head.int8_weight, num_rows) is not None
