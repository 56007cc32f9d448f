"""flash-attn's CuTe build (`flash-attn-4`) over the paged cache, for prompts.

Facts relied on (4.0.0b36): causal masks are aligned to the end of the keys, `seqused_k` - queries being the first
query's position; num_splits must be 1 on SM90, which has no split-KV there; page sizes 16, 64 and 128 are right; tables
and lengths are int32. Rows past `seqused_k` in a sequence's last block may be read, with weight 0, and so is every key
of a tile that a query's mask hides: what a sequence counts as used must be its own and finite.
"""

import functools
import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.context import AttentionGroup
from engine.layers.cuda_rows import cuda_rows
from engine.layers.upload import upload

logger = logging.getLogger(__name__)

HEAD_DIMS = (64, 96, 128)
BLOCK_SIZES = (16, 64, 128)


@functools.cache
def unavailable_reason() -> str | None:
    """None if flash-attn can run in this process, else why not. Found and logged once a process."""
    reason = _obstacle()
    logger.info("flash-attn: %s", "available" if reason is None else f"not used ({reason})")
    return reason


def _obstacle() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    if torch.cuda.get_device_capability() < (9, 0):
        return "needs SM90 or later"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn-4 is not installed"
    try:
        _function()
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"flash_attn.cute cannot be imported: {error}"
    return None


@functools.cache
def _function() -> Any:
    return importlib.import_module("flash_attn.cute").flash_attn_varlen_func


def suits(q_NhD: Tensor, group: AttentionGroup, block_size: int) -> bool:
    """Whether the library takes this problem.

    Filler queries only of one sequence: its masks end at the last key, so those of several would need keys past each
    one's own, which may be another request's, and not finite.
    """
    if group.window is not None or (group.has_filler and len(group.q_lens) > 1):
        return False
    return q_NhD.dtype in (torch.bfloat16, torch.float16) and q_NhD.shape[2] in HEAD_DIMS and block_size in BLOCK_SIZES


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lengths:
    """A group's int32 arguments.

    num_1: how many queries the library computes, where filler ones at the end are left out; None: all.
    """

    cu_queries_R1: Tensor
    used_R: Tensor
    table_RB: Tensor
    num_1: Tensor | None


def flash_attention(q_nhD: Tensor, k_cache: Tensor, v_cache: Tensor, group: AttentionGroup) -> Tensor:
    """The attention of one group's rows, scaled by 1 / sqrt(D), [n, h * D].

    No key past a sequence's kv_len is read, but in its last block: those keys may be another request's, or the null
    block's, and a weight of 0 times a NaN is a NaN. Filler queries get zeros.
    """
    lengths = group.cache.get(flash_attention)
    if lengths is None:
        lengths = group.cache[flash_attention] = _lengths(group)
    assert isinstance(lengths, _Lengths)
    result = _function()(
        q_nhD.contiguous(),
        k_cache,
        v_cache,
        cu_seqlens_q=lengths.cu_queries_R1,
        max_seqlen_q=max(group.q_lens),
        seqused_k=lengths.used_R,
        page_table=lengths.table_RB,
        causal=group.causal,
        num_splits=1,
    )
    out: Tensor = result[0] if isinstance(result, tuple) else result
    out = out.reshape(q_nhD.shape[0], -1)
    if lengths.num_1 is not None:
        _clear_rows(out, lengths.num_1)
    return out


def _clear_rows(x_nE: Tensor, first_1: Tensor) -> None:
    """Zeros in rows first_1 and beyond; the others are neither read nor written on CUDA."""
    on_gpu = cuda_rows(x_nE)
    if on_gpu is not None:
        on_gpu.clear_rows(x_nE, first_1)
    else:
        x_nE[int(first_1) :] = 0


def _lengths(group: AttentionGroup) -> _Lengths:
    device = group.kv_len_R.device
    starts = [0]
    for length in group.q_lens:
        starts.append(starts[-1] + length)
    used_R, table_RB = group.kv_len_R.to(torch.int32), group.block_table_RB.to(torch.int32)
    if len(starts) == 2 and group.causal:
        num_1 = (group.kv_len_R - group.q_start_R).to(torch.int32)
        return _Lengths(
            cu_queries_R1=F.pad(num_1, (1, 0)),
            used_R=used_R,
            table_RB=table_RB,
            num_1=num_1 if group.has_filler else None,
        )
    if min(group.q_lens) == max(group.q_lens):
        cu_queries_R1 = torch.arange(len(starts), dtype=torch.int32, device=device) * group.q_lens[0]
    else:
        cu_queries_R1 = upload(starts, device, dtype=torch.int32)
    return _Lengths(cu_queries_R1=cu_queries_R1, used_R=used_R, table_RB=table_RB, num_1=None)
