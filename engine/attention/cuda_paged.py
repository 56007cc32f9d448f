"""`VANILLA` attention on CUDA: two split-KV kernels for decode, flash-attn or the Triton ragged kernel for prompts.

Without Triton the torch reference runs, so the engine needs neither package. Everything derived from a group (tables,
cuts, workspaces) is made at the step's first layer and kept in `group.cache`: a captured step makes it once. Nothing is
read back from the device.
Shapes: N rows, n rows of a group, R sequences, Q queries of each, h heads, g KV heads, D head size.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention import flash
from engine.attention.context import AttentionContext, AttentionGroup
from engine.attention.cuda_choice import (
    MAX_DECODE_QUERIES,
    UNIT,
    BulkCut,
    DecodeCut,
    bulk_cut,
    decode_cut,
    ragged_cut,
)
from engine.attention.reference import paged_attention
from engine.kernels.available import KERNEL_DTYPES, copy_engine, dependent_launch, interpreted, unavailable_reason
from engine.layers.upload import upload

_MIN_BLOCK = 16


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """SMs of a CUDA device; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def cuda_paged_attention(q_NhD: Tensor, k_cache: Tensor, v_cache: Tensor, ctx: AttentionContext) -> Tensor:
    """Softmax attention scaled by 1 / sqrt(D); see `engine.attention.context.Attention` for the shapes."""
    N, h, D = q_NhD.shape
    if not _kernels_take(q_NhD, k_cache):
        return paged_attention(q_NhD, k_cache, v_cache, ctx)
    if q_NhD.stride(2) != 1 or q_NhD.stride(1) != D:
        q_NhD = q_NhD.contiguous()
    every_row = sum(group.num_rows for group in ctx.groups) == N
    if every_row and len(ctx.groups) == 1 and _takes_flash(q_NhD, k_cache, ctx.groups[0]):
        return flash.flash_attention(q_NhD, k_cache, v_cache, ctx.groups[0])
    out_NE = (torch.empty if every_row else torch.zeros)(N, h * D, dtype=q_NhD.dtype, device=q_NhD.device)
    for group in ctx.groups:
        rows = slice(group.first_row, group.first_row + group.num_rows)
        _group_attention(q_NhD[rows], k_cache, v_cache, group, out_NE[rows])
    return out_NE


def takes_unturned(rows: int, num_heads: int, k_cache: Tensor, ctx: AttentionContext) -> bool:
    """Whether `unturned_attention` takes so many rows and query heads: one group of decode, by the copy engine.

    Its programs write their own sequence's K/V while others read: no sequence may need another's of this forward.
    """
    if len(ctx.groups) != 1 or ctx.groups[0].num_rows != rows or not _is_short(ctx.groups[0]):
        return False
    if ctx.groups[0].shares_keys:
        return False
    cut = _bulk_cut(num_heads, k_cache, ctx.groups[0])
    return cut is not None and ctx.groups[0].q_lens[0] <= UNIT * (cut.num_splits - 1)


def unturned_attention(
    heads_NhD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    ctx: AttentionContext,
    *,
    angles: tuple[Tensor, Tensor],
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    """`cuda_paged_attention` of heads [N, h + 2g, D] that are not yet normed and rotated; writes K and V to the cache.

    Launched right behind the product that makes the heads. Only where `takes_unturned`.
    """
    from engine.kernels.bulk_attention import bulk_attention
    from engine.kernels.turn_heads import Unturned

    N, heads, D = heads_NhD.shape
    h, (group,) = heads - 2 * k_cache.shape[2], ctx.groups
    out_NE = heads_NhD.new_empty(N, h * D)
    plan = _plan_of(heads_NhD[:, :h], k_cache, group)
    assert isinstance(plan.cut, BulkCut)
    bulk_attention(
        heads_NhD,
        k_cache,
        v_cache,
        out_NE,
        cut=plan.cut,
        unturned=Unturned(angles=angles, slots_N=ctx.slot_mapping_N, norm=norm, eps=eps),
        **_arguments(group, plan),
    )
    return out_NE


def _kernels_take(q_NhD: Tensor, k_cache: Tensor) -> bool:
    if q_NhD.dtype not in KERNEL_DTYPES or k_cache.shape[1] < _MIN_BLOCK or q_NhD.shape[2] > 256:
        return False
    return interpreted() if q_NhD.device.type == "cpu" else unavailable_reason() is None


def _group_attention(q_nhD: Tensor, k_cache: Tensor, v_cache: Tensor, group: AttentionGroup, out_nE: Tensor) -> None:
    if _is_short(group):
        _decode(q_nhD, k_cache, v_cache, group, out_nE)
    elif _takes_flash(q_nhD, k_cache, group):
        out_nE.copy_(flash.flash_attention(q_nhD, k_cache, v_cache, group))
    else:
        _ragged(q_nhD, k_cache, v_cache, group, out_nE)


def _is_short(group: AttentionGroup) -> bool:
    return max(group.q_lens) == min(group.q_lens) <= MAX_DECODE_QUERIES


def _takes_flash(q_nhD: Tensor, k_cache: Tensor, group: AttentionGroup) -> bool:
    if _is_short(group) or not q_nhD.is_cuda:
        return False
    return flash.suits(q_nhD, group, k_cache.shape[1]) and flash.unavailable_reason() is None


@dataclass(frozen=True, kw_only=True, slots=True)
class _DecodePlan:
    """workspace: of `engine.kernels.merge_splits`; None at one split."""

    cut: DecodeCut | BulkCut
    workspace: Any


def _decode(q_nhD: Tensor, k_cache: Tensor, v_cache: Tensor, group: AttentionGroup, out_nE: Tensor) -> None:
    plan = _plan_of(q_nhD, k_cache, group)
    shared = _arguments(group, plan)
    if isinstance(plan.cut, BulkCut):
        from engine.kernels.bulk_attention import bulk_attention

        bulk_attention(q_nhD, k_cache, v_cache, out_nE, cut=plan.cut, **shared)
        return
    from engine.kernels.attention_scan import AttentionOptions
    from engine.kernels.decode_attention import decode_attention

    options = AttentionOptions(window=group.window)
    decode_attention(q_nhD, k_cache, v_cache, out_nE, cut=plan.cut, options=options, **shared)


def _arguments(group: AttentionGroup, plan: _DecodePlan) -> dict[str, Any]:
    return {
        "q_len": group.q_lens[0],
        "q_start_R": group.q_start_R,
        "kv_len_R": group.kv_len_R,
        "block_table_RB": group.block_table_RB,
        "causal": group.causal,
        "workspace": plan.workspace,
        "pdl": dependent_launch(),
    }


def _plan_of(q_nhD: Tensor, k_cache: Tensor, group: AttentionGroup) -> _DecodePlan:
    _, h, D = q_nhD.shape
    key = (_decode, h, k_cache.shape[2], D)
    plan = group.cache.get(key)
    if plan is None:
        plan = group.cache[key] = _decode_plan(q_nhD, k_cache, group)
    assert isinstance(plan, _DecodePlan)
    return plan


def _bulk_cut(num_heads: int, k_cache: Tensor, group: AttentionGroup) -> BulkCut | None:
    if k_cache.dtype != torch.bfloat16 or group.window is not None or not k_cache.is_cuda or not copy_engine():
        return None
    return bulk_cut(**_shape(num_heads, k_cache, group), block_size=k_cache.shape[1])


def _shape(num_heads: int, k_cache: Tensor, group: AttentionGroup) -> dict[str, int]:
    return {
        "sequences": len(group.q_lens),
        "queries": group.q_lens[0],
        "group": num_heads // k_cache.shape[2],
        "kv_heads": k_cache.shape[2],
        "head_dim": k_cache.shape[3],
        "num_sms": num_multiprocessors(k_cache.device),
    }


def _decode_plan(q_nhD: Tensor, k_cache: Tensor, group: AttentionGroup) -> _DecodePlan:
    from engine.kernels.merge_splits import Workspace, row_tiles

    _, h, D = q_nhD.shape
    g = k_cache.shape[2]
    cut: DecodeCut | BulkCut | None = _bulk_cut(h, k_cache, group)
    if cut is None:
        cut = decode_cut(**_shape(h, k_cache, group), max_kv_len=group.max_kv_len)
    units = len(group.q_lens) * g * row_tiles(group.q_lens[0], h // g, cut.rows)
    split = cut.num_splits > 1
    return _DecodePlan(cut=cut, workspace=Workspace.create(units, cut, D, q_nhD.device) if split else None)


def _ragged(q_nhD: Tensor, k_cache: Tensor, v_cache: Tensor, group: AttentionGroup, out_nE: Tensor) -> None:
    from engine.kernels.attention_scan import AttentionOptions
    from engine.kernels.ragged_attention import ragged_attention, ragged_tiles, uniform_tiles

    n, h, _ = q_nhD.shape
    g = k_cache.shape[2]
    cut = ragged_cut(rows=n, group=h // g, kv_heads=g, num_sms=num_multiprocessors(q_nhD.device))
    key = (_ragged, h // g, cut.rows)
    tiles_T4 = group.cache.get(key)
    if tiles_T4 is None:
        if min(group.q_lens) == max(group.q_lens):
            tiles_T4 = uniform_tiles(group.q_lens, group=h // g, rows=cut.rows, device=q_nhD.device)
        else:
            tiles_T4 = upload(ragged_tiles(group.q_lens, group=h // g, rows=cut.rows), q_nhD.device)
        group.cache[key] = tiles_T4
    assert isinstance(tiles_T4, Tensor)
    ragged_attention(
        q_nhD,
        k_cache,
        v_cache,
        out_nE,
        tiles_T4=tiles_T4,
        q_start_R=group.q_start_R,
        kv_len_R=group.kv_len_R,
        block_table_RB=group.block_table_RB,
        causal=group.causal,
        cut=cut,
        options=AttentionOptions(window=group.window),
        pdl=dependent_launch(),
    )
