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
    _, h, D = q_nhD.shape
    g = k_cache.shape[2]
    key = (_decode, h, g, D)
    plan = group.cache.get(key)
    if plan is None:
        plan = group.cache[key] = _decode_plan(q_nhD, k_cache, group)
    assert isinstance(plan, _DecodePlan)
    shared: dict[str, Any] = {
        "q_len": group.q_lens[0],
        "q_start_R": group.q_start_R,
        "kv_len_R": group.kv_len_R,
        "block_table_RB": group.block_table_RB,
        "causal": group.causal,
        "workspace": plan.workspace,
        "pdl": dependent_launch(),
    }
    if isinstance(plan.cut, BulkCut):
        from engine.kernels.bulk_attention import bulk_attention

        bulk_attention(q_nhD, k_cache, v_cache, out_nE, cut=plan.cut, **shared)
        return
    from engine.kernels.attention_scan import AttentionOptions
    from engine.kernels.decode_attention import decode_attention

    options = AttentionOptions(window=group.window)
    decode_attention(q_nhD, k_cache, v_cache, out_nE, cut=plan.cut, options=options, **shared)


def _decode_plan(q_nhD: Tensor, k_cache: Tensor, group: AttentionGroup) -> _DecodePlan:
    from engine.kernels.merge_splits import Workspace, row_tiles

    _, h, D = q_nhD.shape
    block_size, g = k_cache.shape[1:3]
    shape: dict[str, int] = {
        "sequences": len(group.q_lens),
        "queries": group.q_lens[0],
        "group": h // g,
        "kv_heads": g,
        "head_dim": D,
        "num_sms": num_multiprocessors(q_nhD.device),
    }
    cut: DecodeCut | BulkCut | None = None
    if q_nhD.dtype == torch.bfloat16 and group.window is None and q_nhD.is_cuda and copy_engine():
        cut = bulk_cut(**shape, block_size=block_size)
    if cut is None:
        cut = decode_cut(**shape, max_kv_len=group.max_kv_len)
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
