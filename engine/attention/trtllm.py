"""`TRTLLM` attention: FlashInfer's trtllm-gen kernels over the paged cache, on SM100 and SM103.

Facts relied on (flashinfer-python 0.7.2.post1, its documentation): the context kernel takes paged K/V as
[pages, page size, heads, head size] ("NHD"), int32 tables and lengths, queries in one ragged batch, causal or not;
causal masks are aligned to the end of the keys; the workspace is zero before its first use. Not run on such a GPU here.
"""

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.context import AttentionContext, AttentionGroup
from engine.layers.upload import upload

_WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lengths:
    """A group's int32 arguments; spare table columns are the null block (filler queries may point past a row's own).

    Filler queries of a group of one sequence are left out, as `engine.attention.flash` does and for its reason.
    """

    cu_queries_R1: Tensor
    cu_keys_R1: Tensor
    used_R: Tensor
    table_RB: Tensor


class TrtllmAttention:
    """One for all layers of a model: it owns the kernels' workspace. function: FlashInfer's, or one that acts alike."""

    def __init__(self, device: str | torch.device, *, function: Any = None) -> None:
        self._function = function or importlib.import_module("flashinfer.prefill").trtllm_batch_context_with_kv_cache
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def __call__(self, q_NhD: Tensor, k_cache: Tensor, v_cache: Tensor, ctx: AttentionContext) -> Tensor:
        """Softmax attention scaled by 1 / sqrt(D); see `engine.attention.context.Attention` for the shapes."""
        N, h, D = q_NhD.shape
        every_row = sum(group.num_rows for group in ctx.groups if len(group.q_lens) > 1) == N
        out_NhD = (torch.empty if every_row else torch.zeros)(N, h, D, dtype=q_NhD.dtype, device=q_NhD.device)
        for group in ctx.groups:
            lengths = group.cache.get(TrtllmAttention)
            if lengths is None:
                lengths = group.cache[TrtllmAttention] = _lengths(group, k_cache.shape[1])
            assert isinstance(lengths, _Lengths)
            rows = slice(group.first_row, group.first_row + group.num_rows)
            self._function(
                query=q_NhD[rows].contiguous(),
                kv_cache=(k_cache, v_cache),
                workspace_buffer=self._workspace,
                block_tables=lengths.table_RB,
                seq_lens=lengths.used_R,
                max_q_len=max(group.q_lens),
                max_kv_len=lengths.table_RB.shape[1] * k_cache.shape[1],
                bmm1_scale=1.0 / math.sqrt(D),
                bmm2_scale=1.0,
                batch_size=len(group.q_lens),
                cum_seq_lens_q=lengths.cu_queries_R1,
                cum_seq_lens_kv=lengths.cu_keys_R1,
                window_left=-1 if group.window is None else group.window - 1,
                out=out_NhD[rows],
                kv_layout="NHD",
                causal=group.causal,
            )
        return out_NhD.view(N, h * D)


def _lengths(group: AttentionGroup, block_size: int) -> _Lengths:
    assert group.causal or group.window is None, "the kernel has no window without causality"
    device = group.kv_len_R.device
    alone = len(group.q_lens) == 1 and group.causal
    lens_R = group.kv_len_R - group.q_start_R if alone else upload(group.q_lens, device)
    used_R = group.q_start_R + lens_R if group.causal else group.kv_len_R
    spare = -(-max(group.q_lens) // block_size)
    return _Lengths(
        cu_queries_R1=F.pad(lens_R.cumsum(0), (1, 0)).to(torch.int32),
        cu_keys_R1=F.pad(used_R.cumsum(0), (1, 0)).to(torch.int32),
        used_R=used_R.to(torch.int32),
        table_RB=F.pad(group.block_table_RB, (0, spare)).to(torch.int32),
    )
