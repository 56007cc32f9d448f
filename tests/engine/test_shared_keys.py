"""Rows that need each other's new K/V say so, and are kept from attention that writes them while others read."""

import pytest
import torch

from engine import SamplingParams
from engine.attention import cuda_paged
from engine.attention.context import AttentionContext, AttentionGroup
from engine.attention.cuda_choice import BulkCut
from tests.engine.mixed_steps import arrivals, run
from tests.engine.test_decode_programs import build
from tests.toy import make_drafter, make_target


@pytest.mark.parametrize("shares_keys", [False, True])
def test_pieces_are_not_turned_within_attention(monkeypatch: pytest.MonkeyPatch, shares_keys: bool) -> None:
    monkeypatch.setattr(cuda_paged, "_bulk_cut", lambda *_: BulkCut(num_splits=8))
    group = AttentionGroup(
        first_row=0,
        q_lens=(8, 8),
        q_start_R=torch.tensor([0, 8]),
        kv_len_R=torch.tensor([8, 16]),
        block_table_RB=torch.ones(2, 2, dtype=torch.int64),
        max_kv_len=32,
        causal=True,
        shares_keys=shares_keys,
    )
    context = AttentionContext(slot_mapping_N=torch.arange(16, 32), groups=(group,))
    assert cuda_paged.takes_unturned(16, 8, torch.zeros(3, 16, 2, 128), context) is not shares_keys


def test_programs_that_take_pieces_say_that_their_rows_share_keys(tmp_path) -> None:
    target = make_target(tmp_path / "target", kind="qwen3")
    drafter = make_drafter(tmp_path / "drafter", target)
    requests = arrivals(3, [SamplingParams(temperature=0.0, max_tokens=9, seed=i, ignore_eos=True) for i in range(7)])
    with build((target, drafter), "repeated", max_num_batched_tokens=26) as llm:
        assert run(llm, requests, schedules={0: {5: 2}}).mixed
        pairs = [pair for pair in llm._rank.runner._decode_programs._pairs.values() if pair._step is not None]
        found = {
            (pair.shape.num_rows, pair.shape.takes_pieces): pair._step.inputs.context.groups[0].shares_keys
            for pair in pairs
        }
    assert found and all(shares == takes_pieces for (_, takes_pieces), shares in found.items())
    assert {takes_pieces for _, takes_pieces in found} == {True, False}
