"""The coin of synthetic acceptance for the rows of a step in one launch, where torch's form takes some 150.

The same integers as `engine.sampling.noise.uniform_noise` of id 0, hence the same coins.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.device_ops import begin
from engine.sampling.noise import KEY_STARTS, MAX_U, MUL_A, MUL_B, MUL_ID, STREAM_ACCEPT

_A, _B, _ID = tl.constexpr(MUL_A), tl.constexpr(MUL_B), tl.constexpr(MUL_ID)
_START_A, _START_B = tl.constexpr(KEY_STARTS[0]), tl.constexpr(KEY_STARTS[1])
_MAX_U = tl.constexpr(MAX_U)
_U32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _finalised(x):
    """One full 32-bit finaliser on int64 values in [0, 2^32)."""
    x = x ^ (x >> 16)
    x = (x * _A) & _U32
    x = x ^ (x >> 15)
    x = (x * _B) & _U32
    return x ^ (x >> 16)


@triton.jit
def row_key(start, seed, position):
    """One of a row's two keys, int64 in [0, 2^32): see `engine.sampling.noise`. start: int64, the stream added."""
    key = _finalised((start * 5 + (seed & _U32)) & _U32)
    key = _finalised((key * 5 + ((seed >> 32) & _U32) + _ID) & _U32)
    key = _finalised((key * 5 + (position & _U32) + 2 * _ID) & _U32)
    return _finalised((key * 5 + ((position >> 32) & _U32) + 3 * _ID) & _U32)


@triton.jit
def _coin_kernel(
    seed_ptr,
    slot_ptr,
    position_ptr,
    out_ptr,
    certain,
    fraction,
    seed_stride,
    STREAM: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0)
    seed = tl.load(seed_ptr + tl.load(slot_ptr + row) * seed_stride)
    position = tl.load(position_ptr + row)
    x = (row_key(seed * 0 + _START_A + STREAM, seed, position) * _A) & _U32
    x = x ^ (x >> 15)
    x = ((x + row_key(seed * 0 + _START_B + STREAM, seed, position)) * _B) & _U32
    x = x ^ (x >> 16)
    x = (x * _A) & _U32
    x = (x ^ (x >> 15)) & 0x7FFFFFFF
    coin = tl.minimum((x.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, _MAX_U)  # 2^-31
    tl.store(out_ptr + row, certain + (coin < fraction).to(tl.int64))


def accepted_by_coin(
    length: float, seed_S: Tensor, slots_R: Tensor, position_R: Tensor, *, pdl: bool = False
) -> Tensor:
    """`engine.sampling.synthetic.synthetic_accepted` of the rows' seeds, seed_S[slots_R]."""
    accepted_R = torch.empty_like(position_R)
    certain = math.floor(length) - 1
    _coin_kernel[(slots_R.shape[0],)](
        seed_S,
        slots_R,
        position_R,
        accepted_R,
        certain,
        length - math.floor(length),
        seed_S.stride(0),
        STREAM=STREAM_ACCEPT,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return accepted_R
