"""The TRTLLM backend tells FlashInfer's kernel what it documents: a stand-in that follows the documentation gives the
reference's attention."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.context import AttentionContext, AttentionGroup
from engine.attention.reference import paged_attention
from engine.attention.trtllm import TrtllmAttention

BLOCK, KV_HEADS, D = 16, 2, 8


def documented_kernel(
    *,
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    block_tables: Tensor,
    seq_lens: Tensor,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    window_left: int,
    out: Tensor,
    kv_layout: str,
    causal: bool,
    **rest: Any,
) -> None:
    """`trtllm_batch_context_with_kv_cache` of flashinfer-python 0.7.2 by its documentation, one query at a time."""
    assert kv_layout == "NHD" and query.is_contiguous()
    assert {t.dtype for t in (block_tables, seq_lens, cum_seq_lens_q, cum_seq_lens_kv)} == {torch.int32}
    assert rest["max_q_len"] >= int(cum_seq_lens_q.diff().max()) and rest["max_kv_len"] >= int(seq_lens.max())
    assert torch.equal(cum_seq_lens_kv.diff(), seq_lens) and len(seq_lens) == batch_size
    for r in range(batch_size):
        first, end, keys = int(cum_seq_lens_q[r]), int(cum_seq_lens_q[r + 1]), int(seq_lens[r])
        pages = block_tables[r, : -(-keys // BLOCK)].long()
        k, v = (
            cache[pages].flatten(0, 1)[:keys].repeat_interleave(query.shape[1] // KV_HEADS, dim=1) for cache in kv_cache
        )
        for i in range(first, end):
            last = keys - (end - i) if causal else keys - 1
            begin = max(0, last - window_left) if window_left >= 0 else 0
            score = torch.einsum("hd,shd->hs", query[i], k[begin : last + 1]) * bmm1_scale
            out[i] = torch.einsum("hs,shd->hd", score.softmax(-1), v[begin : last + 1]) * bmm2_scale


@pytest.mark.parametrize(
    ("q_lens", "short", "causal", "window"),
    [
        ((4, 4), (0, 0), False, None),
        ((4, 4), (2, 0), True, None),
        ((5, 1), (0, 0), True, None),
        ((4, 4), (0, 0), True, 7),
        ((6,), (2,), True, None),
    ],
)
def test_equals_the_reference(
    q_lens: tuple[int, ...], short: tuple[int, ...], causal: bool, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(9, BLOCK, KV_HEADS, D, generator=generator) for _ in "kv")
    starts = torch.tensor([29, 3])[: len(q_lens)]
    group = AttentionGroup(
        first_row=1,
        q_lens=q_lens,
        q_start_R=starts,
        kv_len_R=starts + torch.tensor(q_lens) - torch.tensor(short),
        block_table_RB=torch.tensor([[5, 2, 7], [3, 1, 0]])[: len(q_lens)],
        max_kv_len=3 * BLOCK,
        causal=causal,
        window=window,
    )
    rows = 1 + sum(q_lens)
    ctx = AttentionContext(slot_mapping_N=torch.zeros(rows, dtype=torch.int64), groups=(group,))
    q = torch.randn(rows, KV_HEADS * 3 + 1, D, generator=generator)[:, : KV_HEADS * 3]
    attention = TrtllmAttention("cpu", function=documented_kernel)
    real = torch.ones(rows, dtype=torch.bool)  # a filler query's result is read by nobody
    real[1 + q_lens[0] - short[0] : 1 + q_lens[0]] = False
    for _ in range(2):
        got = attention(q, k, v, ctx)
        torch.testing.assert_close(got[real], paged_attention(q, k, v, ctx)[real], rtol=1e-5, atol=1e-5)
    assert math.isfinite(float(got.sum()))
    assert len(q_lens) > 1 or not got[~real].any()  # nothing is read for them
