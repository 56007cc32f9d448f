"""Reference attention: torch SDPA over a paged gather, one padded call per group. Every other backend's oracle.

Grouped queries fold into the query length, so K/V are never repeated: a KV head sees Q * G queries.
Shapes: N rows, R sequences, Q queries per sequence (padded), h heads, D head size, G heads per KV head, S padded K/V
length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.context import AttentionContext, AttentionGroup
from engine.layers.upload import upload


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Per-step facts of a group.

    mask:       additive, [R, 1, Q * G, S]; a padding query sees at least position 0, so no row is fully masked.
    stale_RS11: positions of the gathered K/V that no query may see; None when all are visible to someone.
    columns_C:  block ids to gather, [R * C]; None when `first_slot` says where the K/V lie in one piece.
    row_RQ:     rows of a ragged group, padded with its first row; None for a uniform one.
    valid:      places of the real queries in [R * Q]; None for a uniform group.
    """

    num_queries: int
    mask: Tensor
    stale_RS11: Tensor | None
    columns_C: Tensor | None
    first_slot: int
    row_RQ: Tensor | None
    valid: Tensor | None


def paged_attention(q_NhD: Tensor, k_cache: Tensor, v_cache: Tensor, ctx: AttentionContext) -> Tensor:
    """Softmax attention scaled by 1 / sqrt(D); see `engine.attention.context.Attention` for the shapes."""
    N, h, D = q_NhD.shape
    if len(ctx.groups) == 1 and ctx.groups[0].num_rows == N:
        return _group_attention(q_NhD, k_cache, v_cache, ctx.groups[0])
    out_NE = q_NhD.new_zeros(N, h * D)
    for group in ctx.groups:
        rows = slice(group.first_row, group.first_row + group.num_rows)
        out_NE[rows] = _group_attention(q_NhD[rows], k_cache, v_cache, group)
    return out_NE


def _group_attention(q_nhD: Tensor, k_cache: Tensor, v_cache: Tensor, group: AttentionGroup) -> Tensor:
    _, h, D = q_nhD.shape
    _, block_size, kv_heads, _ = k_cache.shape
    G, R, S = h // kv_heads, len(group.q_lens), group.max_kv_len
    key = (G, q_nhD.dtype, block_size)
    layout = group.cache.get(key)
    if layout is None:
        layout = group.cache[key] = _layout(group, G, q_nhD, block_size)
    assert isinstance(layout, _Layout)
    Q = layout.num_queries

    padded = q_nhD if layout.row_RQ is None else q_nhD.index_select(0, layout.row_RQ)
    folded = padded.view(R, Q, kv_heads, G, D).transpose(1, 2).reshape(R, kv_heads, Q * G, D)
    k, v = (_visible(cache, layout, R, S).transpose(1, 2) for cache in (k_cache, v_cache))
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=layout.mask)
    out = out.view(R, kv_heads, Q, G, D).transpose(1, 2).reshape(R * Q, h * D)
    return out if layout.valid is None else out.index_select(0, layout.valid)


def _visible(cache: Tensor, layout: _Layout, R: int, S: int) -> Tensor:
    """[R, S, kv_heads, D] of each sequence's first S positions: a view if they lie in one piece, else a gather.

    Rows past kv_len are zero in a gather. They belong to the null block or to a former owner, and a weight of 0 times
    a NaN that one of those left there would still be NaN.
    """
    kv_heads, D = cache.shape[2:]
    if layout.columns_C is None:
        return cache.view(-1, kv_heads, D)[layout.first_slot : layout.first_slot + S].unsqueeze(0)
    blocks = cache.index_select(0, layout.columns_C)
    visible = blocks.view(R, -1, kv_heads, D)[:, :S]
    return visible if layout.stale_RS11 is None else visible.masked_fill_(layout.stale_RS11, 0.0)


def _layout(group: AttentionGroup, G: int, q: Tensor, block_size: int) -> _Layout:
    device, R, S, Q = q.device, len(group.q_lens), group.max_kv_len, max(group.q_lens)
    num_columns = -(-S // block_size)
    assert group.block_table_RB.shape[0] == R and group.block_table_RB.shape[1] >= num_columns
    mask_RQS = visibility_mask(group, device=device)
    mask = torch.zeros(mask_RQS.shape, dtype=q.dtype, device=device).masked_fill_(~mask_RQS, float("-inf"))
    mask = mask.view(R, 1, Q, 1, S).expand(R, 1, Q, G, S).reshape(R, 1, Q * G, S)

    first_slot = _one_piece(group, block_size) if R == 1 and device.type == "cpu" else None
    stale_RS11 = None
    if first_slot is None:
        stale_RS11 = (torch.arange(S, device=device) >= group.kv_len_R.view(-1, 1))[:, :, None, None]
    columns_C = None if first_slot is not None else group.block_table_RB[:, :num_columns].reshape(-1)

    row_RQ = valid = None
    if min(group.q_lens) != Q:
        lens_R = upload(group.q_lens, device)
        start_R = lens_R.cumsum(0) - lens_R
        column_Q = torch.arange(Q, device=device)
        real_RQ = column_Q < lens_R.unsqueeze(-1)
        row_RQ = torch.where(real_RQ, start_R.unsqueeze(-1) + column_Q, start_R.unsqueeze(-1)).view(-1)
        valid = upload([r * Q + i for r, length in enumerate(group.q_lens) for i in range(length)], device)
    return _Layout(
        num_queries=Q,
        mask=mask,
        stale_RS11=stale_RS11,
        columns_C=columns_C,
        first_slot=first_slot or 0,
        row_RQ=row_RQ,
        valid=valid,
    )


def visibility_mask(group: AttentionGroup, *, device: torch.device) -> Tensor:
    """bool [R, Q, S]: which positions each (padded) query sees."""
    position_S = torch.arange(group.max_kv_len, device=device)
    seen = position_S < group.kv_len_R.view(-1, 1, 1)
    query_Q = torch.arange(max(group.q_lens), device=device)
    at_RQ1 = group.q_start_R.view(-1, 1, 1) + query_Q.view(1, -1, 1)
    seen = seen.expand(-1, query_Q.numel(), -1)
    if group.causal:
        seen = seen & (position_S <= at_RQ1)
    if group.window is not None:
        seen = seen & (position_S >= torch.minimum(at_RQ1 - group.window + 1, group.kv_len_R.view(-1, 1, 1) - 1))
    return seen


def _one_piece(group: AttentionGroup, block_size: int) -> int | None:
    """First flat slot of the only sequence if all S positions are visible and its blocks have consecutive ids."""
    kv_len = int(group.kv_len_R[0])
    used = -(-kv_len // block_size)
    ids = group.block_table_RB[0, :used].tolist()
    in_one_piece = kv_len == group.max_kv_len and ids == list(range(ids[0], ids[0] + used))
    return ids[0] * block_size if in_one_piece else None
