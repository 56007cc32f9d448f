"""Covering arrays: few runs in which every pair of values of any two factors occurs."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    *,
    feasible: Callable[[dict[str, Any]], bool] = lambda run: True,
    seed: int = 7,
    num_candidates: int = 400,
) -> list[dict[str, Any]]:
    """Greedy pairwise array: each run is the best of some random candidates by newly covered pairs.

    factors: name -> its values. feasible: false for values that exclude each other, of a whole run or of two factors;
    such pairs are not asked for. The same arguments give the same runs.
    """

    def run_of(choice: Mapping[str, int]) -> dict[str, Any]:
        return {name: factors[name][index] for name, index in choice.items()}

    def pairs_of(choice: Mapping[str, int]) -> set[Any]:
        return set(itertools.combinations(choice.items(), 2))

    left = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x, y in itertools.product(range(len(factors[a])), range(len(factors[b])))
        if feasible(run_of({a: x, b: y}))
    }
    rng = random.Random(seed)
    runs = []
    while left:
        candidates = [
            {name: rng.randrange(len(values)) for name, values in factors.items()} for _ in range(num_candidates)
        ]
        best = max((c for c in candidates if feasible(run_of(c))), key=lambda c: len(left & pairs_of(c)))
        runs.append(run_of(best))
        left -= pairs_of(best)
    return runs
