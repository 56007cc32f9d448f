"""Counter-based noise keyed by (seed, position, vocabulary id): the only randomness of the engine.

A token drawn at a position is the same from a plain step, a verify row, another batch row, another tensor-parallel rank
or a recompute, because nothing but the key enters. One definition serves every device:

1. integer part, exact everywhere: two 32-bit row keys are folded from seed (all 64 bits), position and stream; each id
   is mixed once, then mixed with the row keys by xor / add / multiply / shift in two's complement 32-bit arithmetic;
2. float part: the 31 low bits h become u = (float32(h) + 0.5) * 2^-31, at most 1 - 2^-24, so u lies in the open
   interval (0, 1) and keeps 24 significant bits next to 0;
3. Gumbel noise is -log(-log1p(-u)): its long upper tail (the one that decides an argmax) comes from the fine end of u,
   up to 22.2, where -log(-log(u)) in float32 would end at 16.6 in coarse steps.

The two logarithms are the device library's and may differ in the last bit between CPU and GPU; u does not.

Shape letters: N rows, V vocabulary ids (whole or a shard), M pairs.
"""

import torch
from torch import Tensor

# Odd multipliers and shifts of a well-mixing 32-bit finaliser (two multiply / xor-shift rounds).
MUL_A = 0x7FEB352D
MUL_B = 0x846CA68B
MUL_ID = 0x9E3779B1
KEY_STARTS = (0x243F6A88, 0x85A308D3)  # fractional bits of pi: the two keys of a row differ
_U32 = 0xFFFFFFFF
MAX_U = 1.0 - 2.0**-24
_CHUNK = 1 << 16  # elements, 256 KiB of int32

STREAM_TOKEN = 0  # the Gumbel noise a token is drawn with
STREAM_ACCEPT = 1  # the acceptance coin of rejection sampling
STREAM_RESIDUAL = 2  # the residual draw of rejection sampling
STREAM_DRAFT = 3  # the drafter's own draw, where its probabilities enter the verification


def gumbel_noise(
    seed_N: Tensor, position_N: Tensor, vocab_ids_V: Tensor, *, stream: int | Tensor = STREAM_TOKEN
) -> Tensor:
    """Standard Gumbel noise, float32 [N, V], for every (row, id).

    Args:
        seed_N: int64 [N]; all 64 bits count.
        position_N: int64 [N]; absolute position of the token being drawn.
        vocab_ids_V: integer [V] global vocabulary ids shared by the rows, or [N, M] ids of each row's own.
        stream: which independent stream of the key; an int64 [N] tensor gives each row its own.
    """
    key_a_N, key_b_N = _row_keys(seed_N, position_N, stream)
    mixed_ids = _mix_ids(vocab_ids_V)
    if mixed_ids.dim() == 2 or mixed_ids.device.type != "cpu":
        bits = _mix_rows(mixed_ids, key_a_N[:, None], key_b_N[:, None])
        return _gumbel_(_uniform(bits))
    # On the CPU a few rows at a time: the working set stays in the second-level cache, twice as fast.
    count, vocab = seed_N.shape[0], mixed_ids.shape[0]
    noise_NV = torch.empty(count, vocab, dtype=torch.float32)
    step = max(1, _CHUNK // max(vocab, 1))
    for first in range(0, count, step):
        part = slice(first, first + step)
        noise_NV[part] = _gumbel_(_uniform(_mix_rows(mixed_ids, key_a_N[part, None], key_b_N[part, None])))
    return noise_NV


def gumbel_noise_pairs(seed_N: Tensor, position_N: Tensor, row_M: Tensor, id_M: Tensor) -> Tensor:
    """Noise of M (row, id) pairs, float32 [M]: the entries [row_M, id_M] of `gumbel_noise` alone."""
    key_a_N, key_b_N = _row_keys(seed_N, position_N, STREAM_TOKEN)
    return _gumbel_(_uniform(_mix_rows(_mix_ids(id_M), key_a_N[row_M], key_b_N[row_M])))


def uniform_noise(seed_N: Tensor, position_N: Tensor, vocab_ids_V: Tensor, *, stream: int = STREAM_TOKEN) -> Tensor:
    """The uniform u in (0, 1) behind `gumbel_noise`, float32 [N, V]; bit-identical on every device. Same arguments."""
    key_a_N, key_b_N = _row_keys(seed_N, position_N, stream)
    return _uniform(_mix_rows(_mix_ids(vocab_ids_V), key_a_N[:, None], key_b_N[:, None]))


def _signed32(value: int) -> int:
    """The two's complement int32 with these 32 bits."""
    return value - (1 << 32) if value >> 31 else value


def _fmix64_low(x_N: Tensor) -> Tensor:
    """One full 32-bit finaliser on int64 tensors holding values in [0, 2^32)."""
    x_N = x_N ^ (x_N >> 16)
    x_N = (x_N * MUL_A) & _U32
    x_N = x_N ^ (x_N >> 15)
    x_N = (x_N * MUL_B) & _U32
    return x_N ^ (x_N >> 16)


def row_seeds(seed_N: Tensor, position_N: Tensor, *, stream: int) -> Tensor:
    """One int64 seed per row of the same key, for a generator that is not ours."""
    key_a_N, key_b_N = _row_keys(seed_N, position_N, stream)
    return (key_a_N.to(torch.int64) << 32) ^ (key_b_N.to(torch.int64) & _U32)


def _row_keys(seed_N: Tensor, position_N: Tensor, stream: int | Tensor) -> tuple[Tensor, Tensor]:
    """Two int32 keys per row, absorbing the words of (seed, position, stream) one after another."""
    words = (seed_N & _U32, (seed_N >> 32) & _U32, position_N & _U32, (position_N >> 32) & _U32)
    keys = []
    for start in KEY_STARTS:
        state_N = torch.full_like(seed_N, start) + stream
        for index, word_N in enumerate(words):
            state_N = _fmix64_low((state_N * 5 + word_N + index * MUL_ID) & _U32)
        keys.append(torch.where(state_N > 0x7FFFFFFF, state_N - (1 << 32), state_N).to(torch.int32))
    return keys[0], keys[1]


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)


def _mix_ids(ids: Tensor) -> Tensor:
    """Ids spread over 32 bits, int32; shared by all rows, so its cost does not count."""
    wide = ids.to(torch.int64)
    mixed = _fmix64_low((wide * MUL_ID) & _U32)
    return torch.where(mixed > 0x7FFFFFFF, mixed - (1 << 32), mixed).to(torch.int32)


def _mix_rows(mixed_ids: Tensor, key_a: Tensor, key_b: Tensor) -> Tensor:
    """int32 bits of every (row, id): two rounds, a different row key ahead of each (products wrap modulo 2^32)."""
    x = mixed_ids ^ key_a
    x.mul_(MUL_A)
    x.bitwise_xor_(_shift(x, 15))
    x.add_(key_b)
    x.mul_(_signed32(MUL_B))
    x.bitwise_xor_(_shift(x, 16))
    x.mul_(MUL_A)
    x.bitwise_xor_(_shift(x, 15))
    return x


def _uniform(bits: Tensor) -> Tensor:
    """u in (0, 1): every step is a single correctly rounded float32 operation, hence exact on every device."""
    u = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    return u.add_(0.5).mul_(2.0**-31).clamp_(max=MAX_U)


def _gumbel_(u: Tensor) -> Tensor:
    """-log(-log1p(-u)) in place."""
    return u.neg_().log1p_().neg_().log_().neg_()
