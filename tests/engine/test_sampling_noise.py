"""Noise is a function of (seed, position, id) alone, exact in its integer part, uniform and independent."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from engine.sampling.noise import (
    STREAM_ACCEPT,
    STREAM_RESIDUAL,
    gumbel_noise,
    gumbel_noise_pairs,
    uniform_noise,
)

torch.set_num_threads(1)
U32 = 0xFFFFFFFF


def finalise(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & U32
    x ^= x >> 15
    x = x * 0x846CA68B & U32
    return x ^ x >> 16


def uniform_by_hand(seed: int, position: int, vocab_id: int, stream: int) -> float:
    """The definition in arbitrary-precision integers."""
    keys = []
    for start in (0x243F6A88, 0x85A308D3):
        state = start + stream
        words = (seed & U32, seed >> 32 & U32, position & U32, position >> 32 & U32)
        for index, word in enumerate(words):
            state = finalise(state * 5 + word + index * 0x9E3779B1 & U32)
        keys.append(state)
    x = finalise(vocab_id * 0x9E3779B1 & U32) ^ keys[0]
    x = x * 0x7FEB352D & U32
    x = (x ^ x >> 15) + keys[1] & U32
    x = x * 0x846CA68B & U32
    x ^= x >> 16
    x = x * 0x7FEB352D & U32
    x ^= x >> 15
    bits = x & 0x7FFFFFFF
    rounded = float(torch.tensor(bits, dtype=torch.int32).to(torch.float32))
    half_up = float(torch.tensor(rounded + 0.5, dtype=torch.float64).to(torch.float32))
    return min(half_up * 2.0**-31, 1 - 2.0**-24)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**33),
    vocab_id=st.integers(0, 2**31 - 1),
    stream=st.sampled_from([0, STREAM_ACCEPT, STREAM_RESIDUAL]),
)
def test_integer_part_equals_big_integer_arithmetic(seed: int, position: int, vocab_id: int, stream: int) -> None:
    got = uniform_noise(torch.tensor([seed]), torch.tensor([position]), torch.tensor([vocab_id]), stream=stream)
    assert got.dtype == torch.float32
    assert float(got) == uniform_by_hand(seed, position, vocab_id, stream)


def test_wide_rows_equal_big_integer_arithmetic() -> None:
    """Vector lanes and scalar tails wrap alike."""
    ids = torch.arange(1003)
    got = uniform_noise(torch.tensor([2**63 - 1]), torch.tensor([77]), ids)[0]
    assert got.tolist() == [uniform_by_hand(2**63 - 1, 77, vocab_id, 0) for vocab_id in range(1003)]


def test_frozen_values() -> None:
    """A changed definition changes every seeded output of every user: it must be noticed."""
    u = uniform_noise(torch.tensor([0, 1234]), torch.tensor([0, 99]), torch.tensor([0, 49151]))
    expected = [[uniform_by_hand(s, p, i, 0) for i in (0, 49151)] for s, p in ((0, 0), (1234, 99))]
    assert u.tolist() == expected
    assert [round(x, 6) for row in expected for x in row] == FROZEN


FROZEN = [0.877755, 0.124344, 0.225838, 0.156916]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_shard_equals_whole_bit_for_bit(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 3000))
    start = data.draw(st.integers(0, vocab - 1))
    stop = data.draw(st.integers(start + 1, vocab))
    seeds, positions = torch.tensor([5, -(2**63), 2**40]), torch.tensor([0, 1, 4000])
    ids = torch.arange(vocab)
    whole = gumbel_noise(seeds, positions, ids)
    assert torch.equal(gumbel_noise(seeds, positions, ids[start:stop]), whole[:, start:stop])
    picked = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(row)) for row in range(3)])
    assert torch.equal(gumbel_noise(seeds, positions, picked), whole.gather(1, picked))
    row, column = (whole > 0.5).nonzero(as_tuple=True)
    assert torch.equal(gumbel_noise_pairs(seeds, positions, row, column), whole[row, column])
    order = torch.tensor([2, 0, 1])
    assert torch.equal(gumbel_noise(seeds[order], positions[order], ids), whole[order])


def test_uniform_is_open_and_gumbel_finite() -> None:
    u = uniform_noise(torch.arange(32), torch.arange(32), torch.arange(8000))
    assert float(u.min()) > 0.0
    assert float(u.max()) < 1.0
    noise = gumbel_noise(torch.arange(32), torch.arange(32), torch.arange(8000))
    assert bool(torch.isfinite(noise).all())
    torch.testing.assert_close(noise.double(), -torch.log(-torch.log1p(-u.double())), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axis", ["seed", "position", "id", "high_seed"])
def test_uniform_along_every_axis_of_the_key(axis: str) -> None:
    count = 40000
    line = torch.arange(count)
    if axis == "id":
        u = uniform_noise(torch.tensor([3]), torch.tensor([9]), line)[0]
    else:
        seeds = {"seed": line, "high_seed": line << 32, "position": torch.full_like(line, 3)}[axis]
        positions = line if axis == "position" else torch.full_like(line, 9)
        u = uniform_noise(seeds, positions, torch.tensor([17]))[:, 0]
    assert stats.kstest(u.double().numpy(), "uniform").pvalue > 1e-3
    for lag in (1, 2, 3, 7, 64, 1024):  # neighbours in the key are uncorrelated
        correlation = torch.corrcoef(torch.stack([u[:-lag], u[lag:]]).double())[0, 1]
        assert abs(float(correlation)) < 4.5 / math.sqrt(count), lag
    pairs = (u[:-1] * 8).long() * 8 + (u[1:] * 8).long()  # and their joint distribution is flat
    assert stats.chisquare(torch.bincount(pairs[::2], minlength=64).numpy()).pvalue > 1e-3


def test_rows_streams_and_bits_are_independent() -> None:
    ids = torch.arange(30000)
    seeds = torch.tensor([0, 1, 2, 0, 0, 2**32, 2**63 - 1, -1])
    positions = torch.tensor([0, 0, 0, 1, 2, 0, 0, 0])
    rows = [uniform_noise(seeds, positions, ids, stream=stream) for stream in (0, STREAM_ACCEPT, STREAM_RESIDUAL)]
    correlation = torch.corrcoef(torch.cat(rows).double()) - torch.eye(24, dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / math.sqrt(30000)
    # Distinct keys do not give one row's values in another order.
    assert not torch.equal(rows[0][0].sort().values, rows[0][1].sort().values)
    # Swapping seed and position, or adding them, is not the same key.
    swapped = uniform_noise(torch.tensor([1, 2]), torch.tensor([2, 1]), ids)
    assert not torch.equal(swapped[0], swapped[1])


def test_avalanche() -> None:
    """Flipping any one bit of seed or position changes about half of the 24 leading bits."""
    ids = torch.arange(2000)
    base = uniform_noise(torch.tensor([123456789]), torch.tensor([77]), ids)[0]
    for bit in range(63):
        flipped = uniform_noise(torch.tensor([123456789 ^ (1 << bit)]), torch.tensor([77]), ids)[0]
        changed = (base * 2**24).long() ^ (flipped * 2**24).long()
        share = sum(float((changed >> b & 1).double().mean()) for b in range(24)) / 24
        assert abs(share - 0.5) < 0.02, bit
