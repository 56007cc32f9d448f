"""Attention of one new token per sequence over a contiguous cache, for generating training responses.

On CUDA a Triton kernel that reads each sequence's own length from the device, so a captured graph serves all lengths;
elsewhere SDPA under a mask. Shapes: B sequences, h query heads, g KV heads, T cache length, D head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

_MIN_DOT_ROWS = 16
_KEYS_PER_STEP = 64


def decode_attention(q_BhD: Tensor, k_BgTD: Tensor, v_BgTD: Tensor, length_B: Tensor) -> Tensor:
    """Each query sees the first `length` cached keys of its sequence (at least one); [B, h, D]."""
    if q_BhD.is_cuda:
        return kernel_attention(q_BhD, k_BgTD, v_BgTD, length_B)
    seen_BT = torch.arange(k_BgTD.shape[2], device=q_BhD.device) < length_B[:, None]
    mask = seen_BT[:, None, None]
    return F.scaled_dot_product_attention(q_BhD.unsqueeze(2), k_BgTD, v_BgTD, attn_mask=mask, enable_gqa=True).squeeze(
        2
    )


def kernel_attention(q_BhD: Tensor, k_BgTD: Tensor, v_BgTD: Tensor, length_B: Tensor) -> Tensor:
    """The Triton form. q, k, v contiguous; D a power of two.

    Raises:
        ValueError: Triton is not installed, or a head size it cannot take.
    """
    if triton is None:
        raise ValueError("generating on CUDA needs triton; install the CUDA build of torch.")
    B, h, D = q_BhD.shape
    g, T = k_BgTD.shape[1], k_BgTD.shape[2]
    if D & (D - 1):
        raise ValueError(f"head_dim={D}: generating on CUDA needs a power of two.")
    assert all(t.is_contiguous() for t in (q_BhD, k_BgTD, v_BgTD))
    out = torch.empty_like(q_BhD)
    group = h // g
    _decode_kernel[(B, g)](
        q_BhD,
        k_BgTD,
        v_BgTD,
        length_B,
        out,
        D**-0.5,
        T,
        HEADS=g,
        GROUP=group,
        ROWS=max(_MIN_DOT_ROWS, 1 << (group - 1).bit_length()),
        D=D,
        KEYS=_KEYS_PER_STEP,
    )
    return out


if triton is not None:

    @triton.jit
    def _decode_kernel(
        q,
        k,
        v,
        length,
        out,
        scale,
        T,
        HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        ROWS: tl.constexpr,
        D: tl.constexpr,
        KEYS: tl.constexpr,
    ):
        """One program per sequence and KV head; its GROUP query heads are the rows of the products."""
        b = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        n = tl.load(length + b).to(tl.int32)
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, D)
        q_at = (b * HEADS * GROUP + head * GROUP + rows[:, None]) * D + columns[None, :]
        query = tl.load(q + q_at, mask=rows[:, None] < GROUP, other=0.0)
        base = (b * HEADS + head) * T * D
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, D], tl.float32)
        for first in range(0, n, KEYS):
            at = first + tl.arange(0, KEYS)
            kv_at = base + at[:, None] * D + columns[None, :]
            inside = at[:, None] < n
            keys = tl.load(k + kv_at, mask=inside, other=0.0)
            values = tl.load(v + kv_at, mask=inside, other=0.0)
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
            scores = tl.where(at[None, :] < n, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shrink = tl.exp(top - new_top)
            weights = tl.exp(scores - new_top[:, None])
            total = total * shrink + tl.sum(weights, 1)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            top = new_top
        mixed = mixed / total[:, None]
        tl.store(out + q_at, mixed.to(out.dtype.element_ty), mask=rows[:, None] < GROUP)
