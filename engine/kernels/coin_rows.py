"""A row's random keys, and the coin of synthetic acceptance.

The same integers as `engine.sampling.noise.uniform_noise` of id 0, hence the same coins.
"""

import triton
import triton.language as tl

from engine.sampling.noise import KEY_STARTS, MAX_U, MUL_A, MUL_B, MUL_ID

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
def accepted_by_coin(seed, position, certain, fraction, STREAM: tl.constexpr):
    """`engine.sampling.synthetic.synthetic_accepted` of one row. certain: drafts that are accepted anyhow."""
    x = (row_key(seed * 0 + _START_A + STREAM, seed, position) * _A) & _U32
    x = x ^ (x >> 15)
    x = ((x + row_key(seed * 0 + _START_B + STREAM, seed, position)) * _B) & _U32
    x = x ^ (x >> 16)
    x = (x * _A) & _U32
    x = (x ^ (x >> 15)) & 0x7FFFFFFF
    coin = tl.minimum((x.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, _MAX_U)  # 2^-31
    return certain + (coin < fraction).to(tl.int64)
