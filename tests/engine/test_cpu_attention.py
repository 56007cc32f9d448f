"""The CPU attention kernel: equal to attention in float64, and each query independent of its neighbours bit for bit."""

import math

import pytest
import torch
from torch import Tensor

from engine.attention import cpu_paged
from engine.attention.context import AttentionContext, AttentionGroup
from engine.attention.cpu_paged import cpu_paged_attention
from engine.attention.reference import paged_attention
from engine.layers.cpu_jit import obstacle

NUM_BLOCKS = 40
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=f"kernel: {obstacle()}")


@pytest.fixture(autouse=True)
def _kernel_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_paged, "unavailable_reason", lambda: None)


def _cache(block_size: int, kv_heads: int, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(block_size * 100 + D)
    return tuple(torch.randn(NUM_BLOCKS, block_size, kv_heads, D).to(dtype) for _ in "kv")


def _group(
    q_lens: list[int], q_starts: list[int], *, block_size: int, causal: bool, first_row: int = 0, spare: int = 0
) -> AttentionGroup:
    """Sequences over scattered blocks; the table and max_kv_len are `spare` positions longer than needed."""
    kv_lens = [s + n for s, n in zip(q_starts, q_lens, strict=True)]
    longest = max(kv_lens) + spare
    columns = -(-longest // block_size)
    ids = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(7)) + 1
    table = torch.stack([ids.roll(5 * r)[:columns] for r in range(len(q_lens))])
    return AttentionGroup(
        first_row=first_row,
        q_lens=tuple(q_lens),
        q_start_R=torch.tensor(q_starts),
        kv_len_R=torch.tensor(kv_lens),
        block_table_RB=table,
        max_kv_len=longest,
        causal=causal,
    )


def _context(*groups: AttentionGroup, rows: int) -> AttentionContext:
    return AttentionContext(slot_mapping_N=torch.zeros(rows, dtype=torch.int64), groups=groups)


def _exact(q_NhD: Tensor, k_cache: Tensor, v_cache: Tensor, group: AttentionGroup) -> Tensor:
    """One query and head at a time, float64."""
    N, h, D = q_NhD.shape
    block_size, kv_heads = k_cache.shape[1:3]
    out, row = torch.zeros(N, h, D, dtype=torch.float64), 0
    for sequence, num_rows in enumerate(group.q_lens):
        for i in range(num_rows):
            limit = int(group.kv_len_R[sequence])
            if group.causal:
                limit = min(limit, int(group.q_start_R[sequence]) + i + 1)
            places = [divmod(p, block_size) for p in range(limit)]
            for head in range(h):
                kv_head = head // (h // kv_heads)
                k, v = (
                    torch.stack([c[int(group.block_table_RB[sequence, b]), o, kv_head] for b, o in places]).double()
                    for c in (k_cache, v_cache)
                )
                weights = (k @ q_NhD[row, head].double() / math.sqrt(D)).softmax(0)
                out[row, head] = weights @ v
            row += 1
    return out.view(N, h * D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("h", "kv_heads", "D", "block_size"), [(9, 3, 64, 16), (4, 4, 8, 4), (6, 1, 24, 1), (20, 1, 16, 16)]
)
def test_equals_attention_in_float64(
    h: int, kv_heads: int, D: int, block_size: int, causal: bool, dtype: torch.dtype
) -> None:
    k_cache, v_cache = _cache(block_size, kv_heads, D, dtype)
    group = _group([1, 7, 4], [0, 9, 30], block_size=block_size, causal=causal)
    qkv = torch.randn(12, h + 2 * kv_heads, D).to(dtype)
    q = qkv[:, :h]  # a view with a longer row stride
    y = cpu_paged_attention(q, k_cache, v_cache, _context(group, rows=12))
    expected = _exact(q, k_cache, v_cache, group)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_large_scores_neither_overflow_nor_vanish() -> None:
    k_cache, v_cache = (c * 40 for c in _cache(16, 1, 16, torch.float32))
    group = _group([3], [50], block_size=16, causal=True)
    q = torch.randn(3, 2, 16) * 40
    y = cpu_paged_attention(q, k_cache, v_cache, _context(group, rows=3))
    torch.testing.assert_close(y.double(), _exact(q, k_cache, v_cache, group), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_does_not_depend_on_rows_padding_or_threads(dtype: torch.dtype) -> None:
    k_cache, v_cache = _cache(16, 3, 64, dtype)
    q = torch.randn(16, 9, 64).to(dtype)
    group = _group([16], [200], block_size=16, causal=True)
    whole = cpu_paged_attention(q, k_cache, v_cache, _context(group, rows=16))
    for row in range(16):
        for spare in (0, 37):
            alone = _group([1], [200 + row], block_size=16, causal=True, spare=spare)
            y = cpu_paged_attention(q[row : row + 1], k_cache, v_cache, _context(alone, rows=1))
            assert torch.equal(y[0], whole[row]), row
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        group.cache.clear()
        assert torch.equal(cpu_paged_attention(q, k_cache, v_cache, _context(group, rows=16)), whole)
    finally:
        torch.set_num_threads(threads)


def test_several_groups_and_rows_of_none() -> None:
    k_cache, v_cache = _cache(4, 2, 16, torch.float32)
    q = torch.randn(9, 4, 16)
    groups = (
        _group([1, 1], [12, 3], block_size=4, causal=True),
        _group([5], [20], block_size=4, causal=False, first_row=3),
    )
    context = _context(*groups, rows=9)
    y = cpu_paged_attention(q, k_cache, v_cache, context)
    torch.testing.assert_close(y, paged_attention(q, k_cache, v_cache, context), rtol=1e-5, atol=1e-5)
    assert not bool(y[[2, 8]].any())


def test_the_reference_takes_head_sizes_that_the_kernel_does_not() -> None:
    k_cache, v_cache = _cache(4, 1, 12, torch.float32)
    context = _context(_group([2], [5], block_size=4, causal=True), rows=2)
    q = torch.randn(2, 2, 12)
    y = cpu_paged_attention(q, k_cache, v_cache, context)
    assert torch.equal(y, paged_attention(q, k_cache, v_cache, context))
