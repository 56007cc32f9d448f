"""Law: the threshold found by halving keeps exactly the tokens that the one of the whole sorted row keeps."""

import itertools

import pytest
import torch

from engine.sampling import filters, sampler, select
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
        parameters = {"top_k_N": top_k, "top_p_N": top_p, "min_p_N": min_p}
        sorted_NV = scaled_NV.sort(dim=1, descending=True).values
        expected_N = row_thresholds(scaled_NV, sorted_NM=sorted_NV, **parameters)
        found_N = selected_thresholds(scaled_NV, **parameters)
        assert torch.equal(scaled_NV >= found_N[:, None], scaled_NV >= expected_N[:, None])


@pytest.mark.parametrize(("has_top_k", "has_top_p"), [(False, True), (True, False), (False, False)])
def test_a_missing_filter_is_skipped(has_top_k: bool, has_top_p: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no row asks for a filter, leaving it out changes nothing, and none of its work is done."""
    scaled_NV = make_logits(len(CASES), 700, 5, ties=True)
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*CASES, strict=True))
    top_k = top_k if has_top_k else torch.zeros_like(top_k)
    top_p = top_p if has_top_p else torch.ones_like(top_p)
    sorted_NV = scaled_NV.sort(dim=1, descending=True).values
    expected_N = row_thresholds(scaled_NV, sorted_NM=sorted_NV, top_k_N=top_k, top_p_N=top_p, min_p_N=min_p)
    used = {"top_k_N": top_k if has_top_k else None, "top_p_N": top_p if has_top_p else None, "min_p_N": min_p}
    for module, suffix in ((filters, "top_{}_threshold"), (select, "_top_{}_threshold")):
        for letter, exists in (("k", has_top_k), ("p", has_top_p)):
            if not exists:
                monkeypatch.delattr(module, suffix.format(letter))
    assert torch.equal(row_thresholds(scaled_NV, sorted_NM=sorted_NV, **used), expected_N)
    found_N = selected_thresholds(scaled_NV, **used)
    assert torch.equal(scaled_NV >= found_N[:, None], scaled_NV >= expected_N[:, None])


def test_rows_drawn_in_parts_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, rows = make_logits(len(PARAMS), 300), make_rows(PARAMS)
    whole = sampler._draw_any_row(logits, rows, 0)
    monkeypatch.setattr(sampler, "_DRAW_ELEMENTS", 700)
    parts = sampler._draw_any_row(logits, rows, 0)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])
