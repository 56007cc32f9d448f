"""Drawn tokens follow the exact probabilities, and a wrong filter is noticed.

Draws are deterministic (fixed seeds), so a p-value is a constant of the code: 1e-4 is far from the observed ones.
"""

import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats

import engine.sampling.sampler as sampler_module
from engine.sampling.filters import FilterFlags, row_thresholds
from engine.sampling.sampler import SamplingRows, _draw_any_row, sample

torch.set_num_threads(1)
NUM_DRAWS = 20000
ALPHA = 1e-4
# A toy vocabulary with one exact tie (ids 3 and 4) and one token no filter should keep.
LOGITS = [2.0, 1.6, 1.1, 0.7, 0.7, 0.4, 0.0, -0.5, -1.1, -2.0, -math.inf, -9.0]
CASES = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.7": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_k on a tie": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "top_p just above a boundary": {"top_p": 0.3676},
    "min_p": {"min_p": 0.25},
    "hot min_p": {"temperature": 1.8, "min_p": 0.4},
    "top_k and top_p": {"top_k": 4, "top_p": 0.75},
    "min_p and top_p": {"min_p": 0.3, "top_p": 0.8},
    "all": {"temperature": 1.4, "top_k": 7, "top_p": 0.8, "min_p": 0.15},
}


class OneRank:
    rank = 0
    size = 1

    def all_gather(self, x: torch.Tensor, *, dim: int) -> torch.Tensor:
        return x


def exact(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    """Probabilities by plain Python on a dictionary of tokens."""
    weights = {token: math.exp(logit / temperature) for token, logit in enumerate(LOGITS)}
    best = max(weights.values())
    weights = {token: weight for token, weight in weights.items() if weight >= min_p * best}
    if top_k > 0:
        kth = sorted(weights.values(), reverse=True)[:top_k][-1]
        weights = {token: weight for token, weight in weights.items() if weight >= kth}
    total = sum(weights.values())
    if top_p < 1.0:
        weights = {
            token: weight
            for token, weight in weights.items()
            if sum(other for other in weights.values() if other > weight) < top_p * total
        }
    total = sum(weights.values())
    return [weights.get(token, 0.0) / total for token in range(len(LOGITS))]


def many_rows(
    count: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingRows:
    flags = FilterFlags.of([temperature], [top_k], [top_p], [min_p])
    return SamplingRows(
        temperature_N=torch.full((count,), temperature),
        top_k_N=torch.full((count,), top_k),
        top_p_N=torch.full((count,), top_p),
        min_p_N=torch.full((count,), min_p),
        seed_N=torch.full((count,), 20),
        position_N=torch.arange(count),
        all_greedy=flags.all_greedy,
        any_filter=flags.any_filter,
        sort_width=flags.sort_width,
    )


def goodness(case: dict[str, float], expected: list[float] | None = None) -> float:
    """p-value of the draws against the exact probabilities; 0 if a token outside the support was drawn."""
    probabilities = exact(**case) if expected is None else expected
    logits = torch.tensor(LOGITS).expand(NUM_DRAWS, -1)
    tokens = _draw_any_row(logits, many_rows(NUM_DRAWS, **case), 0)[1]
    counts = torch.bincount(tokens, minlength=len(LOGITS)).tolist()
    if any(count > 0 and p == 0.0 for count, p in zip(counts, probabilities, strict=True)):
        return 0.0
    kept = [(count, p * NUM_DRAWS) for count, p in zip(counts, probabilities, strict=True) if p > 1e-4]
    if len(kept) == 1:
        return 1.0
    scale = sum(count for count, _ in kept) / sum(mean for _, mean in kept)
    return float(stats.chisquare([count for count, _ in kept], [mean * scale for _, mean in kept]).pvalue)


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_exact_probabilities(name: str) -> None:
    assert goodness(CASES[name]) > ALPHA


@pytest.mark.parametrize("name", CASES)
def test_row_by_row_path_draws_the_same_tokens(name: str) -> None:
    rows = many_rows(300, **CASES[name])
    logits = torch.tensor(LOGITS).expand(300, -1)
    assert torch.equal(sample(logits, rows, OneRank(), 0), _draw_any_row(logits, rows, 0)[1])


def thresholds_with(change: str) -> Callable[..., torch.Tensor]:
    """`row_thresholds`, or `selected_thresholds`, with one mistake in it."""

    def mutated(scaled_NV: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        off = {
            "top_k_N": torch.zeros_like(kwargs["top_k_N"]),
            "top_p_N": torch.ones_like(kwargs["top_p_N"]),
            "min_p_N": torch.zeros_like(kwargs["min_p_N"]),
        }
        whole = scaled_NV.sort(dim=1, descending=True).values

        def only(*names: str) -> torch.Tensor:
            return row_thresholds(scaled_NV, **(off | {n: kwargs[n] for n in names}), sorted_NM=whole)

        if change == "top_k + 1":
            return row_thresholds(scaled_NV, **(kwargs | {"top_k_N": kwargs["top_k_N"] + 1, "sorted_NM": whole}))
        if change == "top_k - 1":
            return row_thresholds(scaled_NV, **(kwargs | {"top_k_N": kwargs["top_k_N"] - 1, "sorted_NM": whole}))
        if change == "top_p before top_k":
            return torch.maximum(only("top_p_N", "min_p_N"), only("top_k_N"))
        if change == "top_p before min_p":
            return torch.maximum(only("top_p_N", "top_k_N"), only("min_p_N"))
        return only("top_k_N", "min_p_N")

    return mutated


@pytest.mark.parametrize(
    ("change", "case"),
    [
        ("top_k + 1", "top_k"),
        ("top_k - 1", "top_k"),
        ("top_p before top_k", "top_k and top_p"),
        ("top_p before min_p", "min_p and top_p"),
        ("no top_p", "top_p"),
    ],
)
def test_a_wrong_filter_fails(change: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert goodness(CASES[case]) > ALPHA
    for name in ("row_thresholds", "selected_thresholds"):  # with a bound on top_k, and without
        monkeypatch.setattr(sampler_module, name, thresholds_with(change))
    assert goodness(CASES[case]) < ALPHA


@pytest.mark.parametrize("wrong", [0.94, 1.07])
def test_a_slightly_wrong_temperature_would_be_seen(wrong: float) -> None:
    assert goodness({}, expected=exact(temperature=wrong)) < ALPHA


def test_temperature_after_the_filters_would_be_seen() -> None:
    case = CASES["hot min_p"]
    cold = exact(min_p=case["min_p"])
    kept = [math.exp(logit / case["temperature"]) if p > 0 else 0.0 for logit, p in zip(LOGITS, cold, strict=True)]
    assert goodness(case, expected=[weight / sum(kept) for weight in kept]) < ALPHA
