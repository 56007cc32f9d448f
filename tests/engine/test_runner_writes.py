"""The runner's own check of what a forward writes (debug_checks): no lost K/V, no slot written twice."""

import pytest
import torch

from engine.runner.batch import assert_owned

BLOCK_SIZE = 4


def test_a_write_into_the_null_block_or_a_shared_slot_is_caught() -> None:
    slots = torch.tensor([4, 5, 3, 9, 5])
    everything = torch.ones(5, dtype=torch.bool)
    assert_owned(slots, torch.tensor([True, True, False, True, False]), BLOCK_SIZE)
    assert_owned(slots, ~everything, BLOCK_SIZE)
    with pytest.raises(AssertionError, match="null block"):
        assert_owned(slots[:3], everything[:3], BLOCK_SIZE)
    with pytest.raises(AssertionError, match="two rows write one cache slot"):
        assert_owned(slots, torch.tensor([True, True, False, True, True]), BLOCK_SIZE)
