"""Drawing tokens in Triton: the filters' threshold of each row, and the argmax of scaled logit plus Gumbel noise.

What a row does not ask for costs it nothing: a greedy row is an argmax, a row without filters is not searched. The
threshold is found without sorting, as `engine.sampling.select` does it, but three steps of the search share a pass, and
the search ends where it can no longer change what is kept. Noise has the integers of `engine.sampling.noise`; its two
logarithms may differ from torch's in the last bit. A row's result depends on that row alone.

Shapes: N rows, V columns (the whole vocabulary where there are filters), C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.coin_rows import row_key
from engine.kernels.device_ops import begin
from engine.kernels.shard_argmax import CHUNK, argmax_of_chunks, largest
from engine.sampling.noise import KEY_STARTS, MAX_U, MUL_A, MUL_B, MUL_ID, STREAM_TOKEN

_A, _B, _ID = tl.constexpr(MUL_A), tl.constexpr(MUL_B), tl.constexpr(MUL_ID)
_START_A = tl.constexpr(KEY_STARTS[0] + STREAM_TOKEN)
_START_B = tl.constexpr(KEY_STARTS[1] + STREAM_TOKEN)
_MAX_U = tl.constexpr(MAX_U)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-2139095041)  # the ordered key of -inf
_SEARCH_BLOCK = 4096


@triton.jit
def _ordered(x):
    """int32 in the order of float32 values; 0.0 and -0.0 are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits)


@triton.jit
def _value(key):
    """The float32 of an int64 that holds an ordered key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ _MAGNITUDE, bits).to(tl.float32, bitcast=True)


@triton.jit
def _kept_by_top_k(x_at, temperature, V, k, low, high, BLOCK: tl.constexpr):
    """A key that exactly the k largest reach, or with ties the largest that at least k do. low, high: int64 keys."""
    while low < high:
        span = high - low
        one, two, three = low + (span + 3) // 4, low + (span + 1) // 2, low + (3 * span + 3) // 4
        # int32: the keys lie between those of -inf and of the maximum.
        key_1, key_2, key_3 = one.to(tl.int32), two.to(tl.int32), three.to(tl.int32)
        num_1, num_2, num_3 = 0, 0, 0
        for first in range(0, V, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(x_at + column, mask=column < V, other=float("-inf"))
            key = tl.where(column < V, _ordered(tl.div_rn(x, temperature)), -2147483648)
            num_1 += tl.sum((key >= key_1).to(tl.int32), 0)
            num_2 += tl.sum((key >= key_2).to(tl.int32), 0)
            num_3 += tl.sum((key >= key_3).to(tl.int32), 0)
        if num_3 >= k:
            low = three
            if num_3 == k:
                high = three
        elif num_2 >= k:
            low = two
            high = three - 1
            if num_2 == k:
                high = two
        elif num_1 >= k:
            low = one
            high = two - 1
            if num_1 == k:
                high = one
        else:
            high = one - 1
    return low


@triton.jit
def _kept_by_top_p(x_at, temperature, V, top, floor, p, low, high, BLOCK: tl.constexpr):
    """A key that the nucleus of what reaches `floor` reaches, and nothing else. top: the largest scaled logit."""
    total = tl.full([], 0.0, tl.float64)
    num_low = 0
    for first in range(0, V, BLOCK):
        column = first + tl.arange(0, BLOCK)
        scaled = tl.div_rn(tl.load(x_at + column, mask=column < V, other=float("-inf")), temperature)
        real = (column < V) & (scaled >= floor)
        total += tl.sum(tl.where(real, tl.exp(scaled - top), 0.0).to(tl.float64), 0)
        num_low += tl.sum(real.to(tl.int32), 0)
    enough = total * p.to(tl.float64)
    num_high = 0  # keys above `high`; num_low: keys from `low` on. With one left between them its own cut is known
    while (low < high) & (num_low - num_high > 1):
        span = high - low
        one, two, three = low + span // 4, low + span // 2, low + 3 * span // 4
        key_1, key_2, key_3 = one.to(tl.int32), two.to(tl.int32), three.to(tl.int32)
        num_1, num_2, num_3 = 0, 0, 0
        mass_1 = total * 0.0
        mass_2 = total * 0.0
        mass_3 = total * 0.0
        for first in range(0, V, BLOCK):
            column = first + tl.arange(0, BLOCK)
            scaled = tl.div_rn(tl.load(x_at + column, mask=column < V, other=float("-inf")), temperature)
            real = (column < V) & (scaled >= floor)
            key = _ordered(scaled)
            weight = tl.exp(scaled - top)
            above_1, above_2, above_3 = real & (key > key_1), real & (key > key_2), real & (key > key_3)
            num_1 += tl.sum(above_1.to(tl.int32), 0)
            num_2 += tl.sum(above_2.to(tl.int32), 0)
            num_3 += tl.sum(above_3.to(tl.int32), 0)
            mass_1 += tl.sum(tl.where(above_1, weight, 0.0).to(tl.float64), 0)
            mass_2 += tl.sum(tl.where(above_2, weight, 0.0).to(tl.float64), 0)
            mass_3 += tl.sum(tl.where(above_3, weight, 0.0).to(tl.float64), 0)
        if mass_1 < enough:
            high = one
            num_high = num_1
        elif mass_2 < enough:
            low = one + 1
            num_low = num_1
            high = two
            num_high = num_2
        elif mass_3 < enough:
            low = two + 1
            num_low = num_2
            high = three
            num_high = num_3
        else:
            low = three + 1
            num_low = num_3
    return low


@triton.jit(do_not_specialize=["V", "x_stride"])
def _threshold_kernel(
    x_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    out_ptr,
    V,
    x_stride,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    wanted = min_p > 0.0
    k = 0
    if TOP_K:
        k = tl.load(top_k_ptr + row).to(tl.int32)
        wanted = wanted | ((k > 0) & (k < V))
    if TOP_P:
        p = tl.load(top_p_ptr + row)
        wanted = wanted | (p < 1.0)
    floor = float("-inf")
    if wanted & (temperature > 0.0):
        x_at = x_ptr + row * x_stride
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in range(0, V, BLOCK):
            column = first + tl.arange(0, BLOCK)
            peaks = tl.maximum(peaks, tl.load(x_at + column, mask=column < V, other=float("-inf")))
        top = tl.div_rn(tl.max(peaks, 0), temperature)
        if min_p > 0.0:
            floor = (top.to(tl.float64) + tl.log(min_p.to(tl.float64))).to(tl.float32)
        lowest = tl.full([], _LOWEST, tl.int64)
        highest = _ordered(top).to(tl.int64)
        if TOP_K:  # noqa: SIM102 (of the program, where the next is of the row)
            if (k > 0) & (k < V):
                key = _kept_by_top_k(x_at, temperature, V, k, lowest, highest, BLOCK)
                floor = tl.maximum(floor, _value(key))
        if TOP_P:  # noqa: SIM102
            if p < 1.0:
                low = tl.maximum(lowest, _ordered(floor).to(tl.int64))
                key = _kept_by_top_p(x_at, temperature, V, top, floor, p, low, highest, BLOCK)
                floor = tl.maximum(floor, _value(key))
    tl.store(out_ptr + row, floor)


@triton.jit
def _mixed(x):
    """One full 32-bit finaliser, of uint32."""
    x = x ^ (x >> 16)
    x = x * _A
    x = x ^ (x >> 15)
    x = x * _B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(ids, key_a, key_b):
    """Standard Gumbel noise of int32 ids under a row's two uint32 keys, float32."""
    x = _mixed(ids.to(tl.uint32) * _ID) ^ key_a
    x = x * _A
    x = (x ^ (x >> 15)) + key_b
    x = x * _B
    x = (x ^ (x >> 16)) * _A
    x = (x ^ (x >> 15)) & _MAGNITUDE
    u = tl.minimum((x.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, _MAX_U)  # 2^-31
    # log1p(-u): the rounding of 1 - u taken out again.
    rest = 1.0 - u
    lost = tl.where(rest == 1.0, 1.0, rest - 1.0)
    log_rest = tl.where(rest == 1.0, -u, tl.log(rest) * (-u / lost))
    return -tl.log(-log_rest)


@triton.jit(do_not_specialize=["V", "x_stride", "num_chunks", "first_id"])
def _draw_kernel(
    x_ptr,
    temperature_ptr,
    threshold_ptr,
    seed_ptr,
    position_ptr,
    value_ptr,
    id_ptr,
    V,
    x_stride,
    num_chunks,
    first_id,
    FILTER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < V, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
        key_a = row_key(seed * 0 + _START_A, seed, position).to(tl.uint32)
        key_b = row_key(seed * 0 + _START_B, seed, position).to(tl.uint32)
        scaled = tl.div_rn(x, temperature)
        noisy = scaled + _gumbel(first_id + column, key_a, key_b)
        if FILTER:
            noisy = tl.where(scaled < tl.load(threshold_ptr + row), float("-inf"), noisy)
        x = tl.where(column < V, noisy, float("-inf"))
    value, first = largest(x, column, V - 1)
    tl.store(value_ptr + row * num_chunks + chunk, value)
    tl.store(id_ptr + row * num_chunks + chunk, tl.minimum(first, V - 1))


def filter_thresholds(
    logits_NV: Tensor,
    *,
    temperature_N: Tensor,
    top_k_N: Tensor | None,
    top_p_N: Tensor | None,
    min_p_N: Tensor,
    pdl: bool = False,
) -> Tensor:
    """float32 [N]: a token of a row stays iff its logit / temperature is at least this; -inf where nothing is cut.

    logits: float32, the whole vocabulary. top_k, top_p: None where no row may ask for them. The same tokens stay as by
    `engine.sampling.filters.row_thresholds`, but for one whose mass decides within the rounding of float32 weights.
    """
    N, V = logits_NV.shape
    assert logits_NV.dtype == torch.float32
    assert logits_NV.stride(1) == 1
    threshold_N = logits_NV.new_empty(N)
    if N:
        _threshold_kernel[(N,)](
            logits_NV,
            temperature_N.contiguous(),
            temperature_N if top_k_N is None else top_k_N.contiguous(),
            temperature_N if top_p_N is None else top_p_N.contiguous(),
            min_p_N.contiguous(),
            threshold_N,
            V,
            logits_NV.stride(0),
            TOP_K=top_k_N is not None,
            TOP_P=top_p_N is not None,
            BLOCK=_SEARCH_BLOCK,
            PDL=pdl,
            num_warps=8,
            launch_pdl=pdl,
        )
    return threshold_N


def draw_rows(
    logits_NV: Tensor,
    *,
    temperature_N: Tensor,
    threshold_N: Tensor | None,
    seed_N: Tensor,
    position_N: Tensor,
    vocab_start: int,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """(value [N] float32, global id [N] int64) of each row's draw: what `shard_argmax` gives of its noisy logits.

    Rows of temperature 0 are the argmax. threshold: of `filter_thresholds`; None without filters. A row that holds a
    NaN has the value NaN and any valid id.
    """
    N, V = logits_NV.shape
    assert logits_NV.dtype == torch.float32
    assert logits_NV.stride(1) == 1
    chunks = triton.cdiv(V, CHUNK)
    part_value = logits_NV.new_empty(N, chunks)
    part_id = torch.empty(N, chunks, dtype=torch.int32, device=logits_NV.device)
    if N:
        _draw_kernel[(N, chunks)](
            logits_NV,
            temperature_N.contiguous(),
            temperature_N if threshold_N is None else threshold_N,
            seed_N.contiguous(),
            position_N.contiguous(),
            part_value,
            part_id,
            V,
            logits_NV.stride(0),
            chunks,
            vocab_start,
            FILTER=threshold_N is not None,
            BLOCK=CHUNK,
            PDL=pdl,
            num_warps=8,
            launch_pdl=pdl,
        )
    return argmax_of_chunks(part_value, part_id, vocab_start, pdl=pdl)
