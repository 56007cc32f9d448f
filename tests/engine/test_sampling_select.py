"""Law: the threshold found by halving keeps exactly the tokens that the one of the whole sorted row keeps."""

import itertools

import pytest
import torch

from engine.sampling import sampler
from engine.sampling.filters import row_thresholds
from engine.sampling.select import selected_thresholds
from tests.engine.test_sampling_rows import PARAMS, make_logits, make_rows

CASES = list(itertools.product((0, 1, 3, 40, 5000), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.05, 1.0)))


@pytest.mark.parametrize("vocab", [7, 700])
@pytest.mark.parametrize("ties", [False, True])
def test_the_same_tokens_are_kept(vocab: int, ties: bool) -> None:
    for seed in range(3):
        scaled_NV = make_logits(len(CASES), vocab, seed, ties)
        scaled_NV[:, -2:] = -torch.inf  # padding of the vocabulary
        scaled_NV[::5, 0] = -0.0
        scaled_NV[1::5] -= 100.0
        top_k, top_p, min_p = (torch.tensor(column) for column in zip(*CASES, strict=True))
        filters = {"top_k_N": top_k, "top_p_N": top_p, "min_p_N": min_p}
        sorted_NV = scaled_NV.sort(dim=1, descending=True).values
        expected_N = row_thresholds(scaled_NV, sorted_NM=sorted_NV, **filters)
        found_N = selected_thresholds(scaled_NV, **filters)
        assert torch.equal(scaled_NV >= found_N[:, None], scaled_NV >= expected_N[:, None])


def test_rows_drawn_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = make_logits(len(PARAMS), 300), make_rows(PARAMS)
    whole = sampler._draw_any_row(logits, rows, 0)
    monkeypatch.setattr(sampler, "_DRAW_ELEMENTS", 700)
    parts = sampler._draw_any_row(logits, rows, 0)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])
