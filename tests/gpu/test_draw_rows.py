"""The kernels that draw tokens keep what sorting keeps, and draw what torch's noise draws."""

import math

import pytest
import torch
from torch import Tensor

from engine.sampling.filters import row_thresholds, scale_by_temperature
from engine.sampling.noise import gumbel_noise
from tests.gpu.places import places

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.draw_rows import draw_rows, filter_thresholds

# (rows, vocabulary, columns that are equal to others): ties are kept or cut together.
CASES = [(64, 49152, 0), (48, 151936, 40), (7, 5000, 3000), (32, 6, 3)]
TOYS = [(9, 300, 0), (8, 60, 30)]


def _logits(rows: int, vocab: int, ties: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=generator) * torch.linspace(0.2, 6, rows)[:, None]
    for row in range(rows if ties else 0):
        places_T = torch.randperm(vocab, generator=generator)[: min(ties, vocab)]
        logits[row, places_T] = logits[row].sort(descending=True).values[row % min(vocab, 5)]
    logits[0, vocab // 2 :] = -math.inf  # padded ids
    return logits.to(device)


def _parameters(rows: int, vocab: int, device: str) -> dict[str, Tensor]:
    """Every filter alone, together, and off, by turns."""
    kinds = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.1), (40, 0.5, 0.0), (3, 0.95, 0.05), (1, 1.0, 0.0)]
    kinds += [(vocab, 0.99, 0.0), (vocab + 5, 0.01, 0.0)]
    chosen = [kinds[row % len(kinds)] for row in range(rows)]
    temperature = [0.0 if row % 8 == 7 else 0.3 + 0.2 * (row % 6) for row in range(rows)]
    return {
        "temperature_N": torch.tensor(temperature, device=device),
        "top_k_N": torch.tensor([k for k, _, _ in chosen], dtype=torch.int64, device=device),
        "top_p_N": torch.tensor([p for _, p, _ in chosen], device=device),
        "min_p_N": torch.tensor([m for _, _, m in chosen], device=device),
    }


def _sorted_thresholds(logits_NV: Tensor, parameters: dict[str, Tensor]) -> Tensor:
    scaled_NV = scale_by_temperature(logits_NV, parameters["temperature_N"])
    filters = {name: parameters[name] for name in ("top_k_N", "top_p_N", "min_p_N")}
    return row_thresholds(scaled_NV, sorted_NM=scaled_NV.sort(dim=1, descending=True).values, **filters)


@pytest.mark.parametrize(("case", "device"), places(CASES, TOYS))
def test_the_tokens_that_sorting_keeps_are_kept(case: tuple[int, int, int], device: str) -> None:
    rows, vocab, _ = case
    logits, parameters = _logits(*case, device), _parameters(rows, vocab, device)
    scaled = scale_by_temperature(logits, parameters["temperature_N"])
    found = scaled >= filter_thresholds(logits, **parameters)[:, None]
    drawn = parameters["temperature_N"] > 0
    wanted = (scaled >= _sorted_thresholds(logits, parameters)[:, None]) | ~drawn[:, None]
    assert torch.equal(found, wanted)
    assert not wanted[drawn].all()
    alone = [filter_thresholds(logits[r : r + 1], **{n: p[r : r + 1] for n, p in parameters.items()}) for r in range(4)]
    assert torch.equal(torch.cat(alone), filter_thresholds(logits, **parameters)[:4])


SHARDS = [(*case, start) for case in CASES for start in (0, 77)]


@pytest.mark.parametrize(("case", "device"), places(SHARDS, [(*TOYS[0], 9)]))
def test_draws_are_those_of_torchs_noise(case: tuple[int, int, int, int], device: str) -> None:
    pdl = device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    rows, vocab, ties, start = case
    logits, parameters = _logits(rows, vocab, ties, device), _parameters(rows, vocab, device)
    seeds = torch.arange(rows, device=device) * 0x1234567890123 - 5
    positions = torch.arange(rows, device=device) * 7919
    temperature = parameters["temperature_N"]
    scaled = scale_by_temperature(logits, temperature)
    noise = gumbel_noise(seeds, positions, torch.arange(start, start + vocab, device=device))
    for threshold in (None, filter_thresholds(logits, **parameters, pdl=pdl)):
        score = torch.where(temperature[:, None] > 0, scaled + noise, scaled)
        if threshold is not None:
            score = torch.where(scaled < threshold[:, None], -math.inf, score)
        value, index = draw_rows(
            logits,
            temperature_N=temperature,
            threshold_N=threshold,
            seed_N=seeds,
            position_N=positions,
            vocab_start=start,
            pdl=pdl,
        )
        greedy = temperature == 0
        assert torch.equal(index[greedy] - start, score[greedy].max(dim=1).indices)  # ties: the lowest id
        best = score.max(dim=1).values
        torch.testing.assert_close(value, best, rtol=2e-6, atol=2e-6)
        # Equal but for draws that the last bit of a logarithm decides.
        torch.testing.assert_close(score.gather(1, index[:, None] - start)[:, 0], best, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("case", "device"), places([5000], [70]))
def test_a_row_with_nan_says_so_and_harms_no_other(case: int, device: str) -> None:
    logits, parameters = _logits(6, case, 0, device), _parameters(6, case, device)
    keys = {"seed_N": torch.arange(6, device=device), "position_N": torch.arange(6, device=device), "vocab_start": 0}

    def drawn() -> tuple[Tensor, Tensor]:
        threshold = filter_thresholds(logits, **parameters)
        return draw_rows(logits, temperature_N=parameters["temperature_N"], threshold_N=threshold, **keys)

    before = drawn()
    logits[2, case // 3] = math.nan
    value, index = drawn()
    others = torch.tensor([0, 1, 3, 4, 5], device=device)
    assert torch.isnan(value).tolist() == [row == 2 for row in range(6)]
    assert torch.equal(index[others], before[1][others])
    assert 0 <= int(index[2]) < case
