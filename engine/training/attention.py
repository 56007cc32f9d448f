"""Attention over packed rows: the frozen target's, and the drafter's blocks over their contexts.

A row of S tokens holds several documents one after another. Shapes: R rows, S tokens of a row, A anchors of a row,
W block width, Q = A * W block rows, h query heads, g KV heads, D head size.

Two forms of every mask: "dense", a boolean tensor for SDPA (any device, small sizes), and "flex", a BlockMask for
flex_attention, whose tiles are counted directly from the document starts and the sorted anchors: evaluating the mask
function over all Q x (S + Q) pairs would cost more than the attention itself.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

Backend = Literal["dense", "flex"]
Mask = BlockMask | Tensor
TILE = 128


def attend(q_RhQD: Tensor, k_RgKD: Tensor, v_RgKD: Tensor, mask: Mask) -> Tensor:
    """softmax(q k / sqrt(D), where the mask allows) v, grouped-query; [R, h, Q, D]."""
    if isinstance(mask, BlockMask):
        out = flex_attention(q_RhQD, k_RgKD, v_RgKD, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out
    return F.scaled_dot_product_attention(q_RhQD, k_RgKD, v_RgKD, attn_mask=mask, enable_gqa=True)


def document_mask(doc_start_RS: Tensor, backend: Backend) -> Mask:
    """Causal within a document: token t sees doc_start[t] .. t.

    Raises:
        ValueError: flex with a row length that is no multiple of the tile.
    """
    R, S = doc_start_RS.shape
    if backend == "dense":
        at = torch.arange(S, device=doc_start_RS.device)
        return ((at <= at[:, None]) & (at >= doc_start_RS[:, :, None])).unsqueeze(1)
    _check_tiles(S, "row length")
    tiles = S // TILE
    last_Rt = torch.arange(tiles, device=doc_start_RS.device).expand(R, tiles)
    first_Rt = doc_start_RS[:, ::TILE] // TILE  # documents are contiguous: a tile's first token reaches furthest back
    count_Rt = last_Rt - first_Rt + 1
    at_K = torch.arange(tiles, device=doc_start_RS.device)
    index_RtK = torch.where(at_K < count_Rt[..., None], first_Rt[..., None] + at_K, 0)
    return _tiles(count_Rt, index_RtK, _document_rule(doc_start_RS))


def block_mask(anchor_RA: Tensor, doc_start_RA: Tensor, *, context_len: int, block_size: int, backend: Backend) -> Mask:
    """Rows of a block see the context doc_start .. anchor-1 and their own block, without causality.

    Keys are [context (context_len) | block rows (A * W)]. Anchors ascend within a row, unused ones come last with
    anchor = doc_start = 0: they see their own block only.

    Raises:
        ValueError: flex with lengths that are no multiple of the tile.
    """
    R, A = anchor_RA.shape
    S, W, device = context_len, block_size, anchor_RA.device
    if backend == "dense":
        at_S = torch.arange(S, device=device)
        seen_RAS = (at_S >= doc_start_RA[..., None]) & (at_S < anchor_RA[..., None])
        own_AA = torch.eye(A, dtype=torch.bool, device=device)
        context = seen_RAS.repeat_interleave(W, dim=1)
        own = own_AA.repeat_interleave(W, 0).repeat_interleave(W, 1).expand(R, -1, -1)
        return torch.cat((context, own), dim=-1).unsqueeze(1)
    _check_tiles(S, "row length")
    _check_tiles(A * W, "anchors per row times block size")
    if TILE % W:
        raise ValueError(f"block_size={W} must divide {TILE} for flex attention; use the dense backend.")
    tiles, keys, per_tile = A * W // TILE, (S + A * W) // TILE, TILE // W
    used = anchor_RA > doc_start_RA
    first_Rt = torch.where(used, doc_start_RA, S).view(R, tiles, per_tile).amin(-1) // TILE
    end_Rt = (anchor_RA.view(R, tiles, per_tile).amax(-1) + TILE - 1) // TILE
    count_Rt = (end_Rt - first_Rt).clamp(min=0)
    own_t = S // TILE + torch.arange(tiles, device=device)
    at_K = torch.arange(keys, device=device)
    index_RtK = torch.where(at_K < count_Rt[..., None], first_Rt[..., None] + at_K, 0)
    index_RtK = torch.where(at_K == count_Rt[..., None], own_t[:, None], index_RtK)
    return _tiles(count_Rt + 1, index_RtK, _block_rule(anchor_RA, doc_start_RA, S, W))


def _document_rule(doc_start_RS: Tensor):  # type: ignore[no-untyped-def]
    def rule(r: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= doc_start_RS[r, q])

    return rule


def _block_rule(anchor_RA: Tensor, doc_start_RA: Tensor, S: int, W: int):  # type: ignore[no-untyped-def]
    def rule(r: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = q // W
        context = (k >= doc_start_RA[r, block]) & (k < anchor_RA[r, block])
        own = (k >= S) & ((k - S) // W == block)
        return context | own

    return rule


def _tiles(count_Rt: Tensor, index_RtK: Tensor, rule) -> BlockMask:  # type: ignore[no-untyped-def]
    return BlockMask.from_kv_blocks(
        count_Rt.to(torch.int32).unsqueeze(1).contiguous(),
        index_RtK.to(torch.int32).unsqueeze(1).contiguous(),
        BLOCK_SIZE=TILE,
        mask_mod=rule,
    )


def _check_tiles(length: int, what: str) -> None:
    if length % TILE:
        raise ValueError(f"{what} {length} must be a multiple of {TILE} for flex attention; use the dense backend.")
