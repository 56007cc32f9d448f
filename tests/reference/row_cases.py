"""Decode rows with every kind of end, for the kernels that verify and commit them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from engine.kernels.row_state import Commit, Slots, TargetRows
from engine.sampling.synthetic import synthetic_accepted
from engine.sampling.verify import verify


def random_rows(K: int, R: int, device: str) -> tuple[Slots, TargetRows, Tensor, Tensor, Tensor, Tensor]:
    """Slots and rows in which drafts match in part, stop ids appear, limits are near and some logits are broken."""
    generator = torch.Generator().manual_seed(K * 100 + R)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    S, Q = R + 1, K + 1
    slots_R = torch.randperm(S, generator=generator)[:R].to(device)
    committed = integers(5, 60, S)
    slots = Slots(
        committed_len=committed.clone(),
        last_token=integers(0, 9, S),
        draft_tokens=integers(0, 9, S, max(K, 1)),
        draft_count=integers(0, K + 1, S),
        finished=(integers(0, 5, S) == 0),
        max_len=committed + integers(1, Q + 4, S),
        min_len=committed + integers(-3, Q, S),
        stop_ids=torch.where(integers(0, 3, S, 3) == 0, integers(0, 4, S, 3), -1),
        block_table=integers(1, 40, S, 8),
    )
    drawn_RQ = integers(0, 4, R, Q)
    drafts_RK = torch.where(integers(0, 4, R, K) > 0, drawn_RQ[:, :-1], integers(0, 9, R, K)) if K else drawn_RQ[:, :0]
    k_R = integers(0, K + 1, R)
    peak_RQ = torch.randn(R, Q, generator=generator).to(device)
    peak_RQ[integers(0, 12, R, Q) == 0] = float("nan")
    peak_RQ[integers(0, 20, R, Q) == 0] = float("inf")
    rows = TargetRows(
        drafts_RK=drafts_RK.contiguous(),
        k_R=k_R,
        committed_R=committed[slots_R],
        finished_R=slots.finished[slots_R],
        kv_len_R=committed[slots_R] + k_R + 1,
        ids_N=drawn_RQ.flatten(),
        positions_N=(committed[slots_R, None] + torch.arange(Q, device=device)).flatten(),
        cache_N=integers(16, 640, R * Q),
    )
    return slots, rows, slots_R, drawn_RQ, peak_RQ, integers(0, K + 2, R)


def check_commit(
    commit: Callable[..., Commit],
    case: tuple[int, int],
    device: str,
    *,
    synthetic: bool,
    W: int = 8,
    coin_of: float | None = None,
) -> None:
    """`commit` decides what `verify` decides, writes it to the slots, and makes the context's and the block's rows.

    coin_of: a synthetic length, for a commit that tosses the coin itself.
    """
    (K, R), positions = case, 64
    slots, rows, slots_R, drawn_RQ, peak_RQ, synthetic_R = random_rows(K, R, device)
    options: dict[str, Any] = {"synthetic_R": synthetic_R if synthetic else None}
    if coin_of is not None:
        seed_S = torch.randint(-(2**63), 2**63 - 1, (R + 1,), generator=torch.Generator().manual_seed(K)).to(device)
        options = {"synthetic": (coin_of, seed_S) if synthetic else None}
        synthetic_R = synthetic_accepted(coin_of, seed_S[slots_R], rows.committed_R)
    valid_RQ = peak_RQ < torch.inf
    tokens_RQ = drawn_RQ.masked_fill(~valid_RQ, 0)
    before_last, before_finished = slots.last_token.clone(), slots.finished.clone()
    want = verify(
        target_RK1=tokens_RQ,
        draft_RK=rows.drafts_RK,
        k_R=rows.k_R,
        committed_R=rows.committed_R,
        max_len_R=slots.max_len[slots_R],
        min_len_R=slots.min_len[slots_R],
        stop_ids_RS=slots.stop_ids[slots_R],
        finished_R=rows.finished_R,
        valid_RK1=valid_RQ,
        synthetic_R=synthetic_R if synthetic else None,
    )
    got = commit(
        slots,
        slots_R,
        rows,
        drawn_RQ.flatten(),
        peak_RQ.flatten(),
        width=K,
        block_size=16,
        **options,
        block_width=W,
        mask_id=77,
        positions=positions,
    )
    assert len(set(want.finish_R.tolist())) == 4  # every kind of end is among the rows
    assert torch.equal(got.tokens_RQ, tokens_RQ)
    assert torch.equal(got.emitted_R, want.num_emitted_R)
    assert torch.equal(got.accepted_R, want.num_accepted_R)
    assert torch.equal(got.finish_R, want.finish_R)
    packed = torch.stack([want.num_emitted_R, want.num_accepted_R, rows.k_R, want.finish_R], dim=1)
    assert torch.equal(got.packed.long(), torch.cat([packed, tokens_RQ], dim=1))

    committed_R = rows.committed_R + want.num_emitted_R
    emits_R = want.num_emitted_R > 0
    last_R = torch.where(emits_R, want.last_token_R, before_last[slots_R])
    finished_R = rows.finished_R | (want.finish_R != 0)
    assert torch.equal(slots.committed_len[slots_R], committed_R)
    assert torch.equal(slots.last_token[slots_R], last_R)
    assert torch.equal(slots.finished[slots_R], finished_R)
    untouched = [s for s in range(len(before_last)) if s not in slots_R.tolist()]
    assert torch.equal(slots.last_token[untouched], before_last[untouched])
    assert torch.equal(slots.finished[untouched], before_finished[untouched])

    columns_Q = torch.arange(K + 1, device=device)
    kept = (columns_Q < want.num_emitted_R[:, None]).flatten() & (rows.positions_N < positions)
    assert torch.equal(got.context_slots_N, torch.where(kept, rows.cache_N, 0))
    assert torch.equal(got.context_positions_N, rows.positions_N.clamp(max=positions - 1))
    live_R = ~finished_R & (committed_R + W <= positions)
    assert torch.equal(got.live_R, live_R)
    assert 0 < int(live_R.sum()) < R
    places_RW = (committed_R[:, None] + torch.arange(W, device=device)).clamp(max=positions - 1)
    cache_RW = slots.block_table[slots_R[:, None], places_RW // 16] * 16 + places_RW % 16
    assert torch.equal(got.block_positions.view(R, W), places_RW)
    assert torch.equal(got.block_cache.view(R, W), torch.where(live_R[:, None], cache_RW, 0))
    ids_RW = torch.full_like(places_RW, 77)
    ids_RW[:, 0] = last_R
    assert torch.equal(got.block_ids.view(R, W), ids_RW)
    assert torch.equal(got.start_R, committed_R)
    assert torch.equal(got.kv_len_R, torch.where(live_R, committed_R + W, 1))
