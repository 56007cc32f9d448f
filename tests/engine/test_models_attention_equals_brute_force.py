"""Law: paged reference attention equals softmax attention written out query by query, and is never NaN."""

import pytest
import torch
from torch import Tensor

from engine.attention.context import Attention, AttentionContext, AttentionGroup
from engine.attention.cpu_paged import cpu_paged_attention
from engine.attention.reference import paged_attention

BLOCK, KV_HEADS, HEAD_DIM = 4, 2, 8


def caches(num_blocks: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (num_blocks, BLOCK, KV_HEADS, HEAD_DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def group(
    q_lens: list[int], starts: list[int], tables: list[list[int]], *, causal: bool, **kw: int | None
) -> AttentionGroup:
    kv_lens = [start + n for start, n in zip(starts, q_lens, strict=True)]
    return AttentionGroup(
        first_row=kw.get("first_row") or 0,
        q_lens=tuple(q_lens),
        q_start_R=torch.tensor(starts),
        kv_len_R=torch.tensor(kv_lens),
        block_table_RB=torch.tensor(tables),
        max_kv_len=max(kv_lens) + (kw.get("slack") or 0),
        causal=causal,
        window=kw.get("window"),
    )


def brute_force(q: Tensor, k_cache: Tensor, v_cache: Tensor, groups: list[AttentionGroup]) -> Tensor:
    out = torch.zeros(q.shape[0], q.shape[1] * HEAD_DIM)
    per_kv = q.shape[1] // KV_HEADS
    for g in groups:
        row = g.first_row
        for r, q_len in enumerate(g.q_lens):
            for i in range(q_len):
                seen = min(int(g.kv_len_R[r]), int(g.q_start_R[r]) + i + 1) if g.causal else int(g.kv_len_R[r])
                first = 0 if g.window is None else max(0, int(g.q_start_R[r]) + i - g.window + 1)
                where = [(int(g.block_table_RB[r, p // BLOCK]), p % BLOCK) for p in range(first, seen)]
                for h in range(q.shape[1]):
                    keys = torch.stack([k_cache[b, o, h // per_kv] for b, o in where])
                    values = torch.stack([v_cache[b, o, h // per_kv] for b, o in where])
                    weights = (keys @ q[row, h] / HEAD_DIM**0.5).softmax(0)
                    out[row, h * HEAD_DIM : (h + 1) * HEAD_DIM] = weights @ values
                row += 1
    return out


CASES = [
    ([1], [0], [[5, 0, 0]], 0),
    ([1], [9], [[5, 6, 7]], 0),  # consecutive blocks: the view
    ([3], [6], [[5, 6, 7, 9]], 5),  # padded bound over the view
    ([2], [6], [[38, 39, 0, 0, 0]], 6),  # the view would leave the cache
    ([3], [6], [[7, 5, 9]], 0),
    ([2, 2], [3, 9], [[4, 8, 0], [1, 12, 3]], 0),
    ([5, 1, 3], [0, 10, 2], [[4, 8, 0], [1, 12, 3], [20, 21, 0]], 1),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("per_kv", [1, 3])
@pytest.mark.parametrize(("q_lens", "starts", "tables", "slack"), CASES)
def test_one_group(
    q_lens: list[int], starts: list[int], tables: list[list[int]], slack: int, per_kv: int, causal: bool
) -> None:
    k, v = caches()
    tables = [row + [0] * 4 for row in tables]
    made = group(q_lens, starts, tables, causal=causal, slack=slack)
    q = torch.randn(sum(q_lens), KV_HEADS * per_kv, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    ctx = AttentionContext(slot_mapping_N=torch.zeros(len(q), dtype=torch.int64), groups=(made,))
    want = brute_force(q, k, v, [made])
    for _ in range(2):  # the second call takes the group's cached layout
        torch.testing.assert_close(paged_attention(q, k, v, ctx), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", [paged_attention, cpu_paged_attention])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 3, 8, 9, 30])
@pytest.mark.parametrize(("q_lens", "starts", "tables", "slack"), CASES)
def test_window(
    q_lens: list[int],
    starts: list[int],
    tables: list[list[int]],
    slack: int,
    window: int,
    causal: bool,
    attention: Attention,
) -> None:
    """A query sees at most `window` positions up to its own, those after its own only where not causal."""
    k, v = caches()
    made = group(q_lens, starts, [row + [0] * 4 for row in tables], causal=causal, slack=slack, window=window)
    q = torch.randn(sum(q_lens), KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    ctx = AttentionContext(slot_mapping_N=torch.zeros(len(q), dtype=torch.int64), groups=(made,))
    torch.testing.assert_close(attention(q, k, v, ctx), brute_force(q, k, v, [made]), rtol=1e-5, atol=1e-5)


def test_several_groups_and_rows_of_none() -> None:
    k, v = caches()
    groups = [
        group([2, 2], [5, 1], [[3, 9], [6, 2]], causal=True),
        group([3, 1], [0, 4], [[11, 0], [13, 12]], causal=False, first_row=5),
    ]
    q = torch.randn(10, KV_HEADS * 2, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    ctx = AttentionContext(slot_mapping_N=torch.zeros(10, dtype=torch.int64), groups=tuple(groups))
    out = paged_attention(q, k, v, ctx)
    torch.testing.assert_close(out, brute_force(q, k, v, groups), rtol=1e-5, atol=1e-5)
    assert not out[4].any() and not out[9].any()


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("start", [0, 9])
def test_padding_row_on_the_null_block_is_finite(start: int, window: int | None) -> None:
    k, v = caches()
    made = group([4, 4], [start, 7], [[0, 0, 0, 0], [3, 4, 5, 6]], causal=True, window=window)
    object.__setattr__(made, "kv_len_R", torch.tensor([1, 11]))
    q = torch.randn(8, KV_HEADS, HEAD_DIM)
    ctx = AttentionContext(slot_mapping_N=torch.zeros(8, dtype=torch.int64), groups=(made,))
    assert paged_attention(q, k, v, ctx).isfinite().all()
