"""Exact probabilities of the first tokens after a prompt, under any options, and what draws of them are compared with.

transformers' logits, the rules of `tests.engine.rules_oracle`, filters written down here in float64: nothing of the
engine enters it.

Shape letters: N texts, T positions, V vocabulary.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy import stats

from engine import SamplingParams
from tests.engine.rules_oracle import changed_logits


def exact_probabilities(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 [V] after temperature, min_p, top_k and top_p, in that order; greedy: all of it at the largest."""
    if params.temperature == 0.0:
        return torch.zeros(len(logits_V), dtype=torch.float64).index_fill_(0, logits_V.argmax(), 1.0)
    p_V = torch.softmax(logits_V.double() / params.temperature, dim=0)
    p_V[p_V < params.min_p * p_V.max()] = 0.0
    if params.top_k > 0:
        p_V[p_V < p_V.sort(descending=True).values[params.top_k - 1]] = 0.0
    if params.top_p < 1.0:
        p_V /= p_V.sum()
        best = p_V.sort(descending=True)
        ahead_V = best.values.cumsum(0) - best.values
        p_V[best.indices[ahead_V >= params.top_p]] = 0.0
    return p_V / p_V.sum()


def logits_after(model: Any, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """float32 [N, T, V] of equally long texts."""
    parts = []
    with torch.no_grad():
        for first in range(0, len(texts), 500):
            parts.append(model(torch.tensor([list(text) for text in texts[first : first + 500]])).logits.float())
    return torch.cat(parts)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Draws against exact probabilities: outcomes expected at least five times each, the rest as one.

    impossible: draws of probability 0. total_variation: over all outcomes; expected_of_noise: what it comes to when the
    draws are right. chi_square has `freedom` degrees of freedom; 0 where one outcome is all that was expected.
    """

    num_draws: int
    num_outcomes: int
    impossible: int
    total_variation: float
    expected_of_noise: float
    chi_square: float
    freedom: int

    @property
    def p_value(self) -> float:
        return float(stats.chi2.sf(self.chi_square, self.freedom)) if self.freedom else 1.0


class JointTokens:
    """paths: the first `length` tokens after a prompt -> their probability; shorter where a stop id ends them.

    bad_words: ids of params.bad_words. stop_ids: every id that ends the request.
    """

    def __init__(
        self,
        model: Any,
        prompt: list[int],
        params: SamplingParams,
        *,
        length: int,
        bad_words: Sequence[Sequence[int]] = (),
        stop_ids: Sequence[int] = (),
    ) -> None:
        self.model, self.prompt, self.params = model, prompt, params
        self._bad_words, self._stop_ids = bad_words, stop_ids
        self.paths: dict[tuple[int, ...], float] = {}
        open_paths: dict[tuple[int, ...], float] = {(): 1.0}
        for left in range(length, 0, -1):
            if not open_paths:
                break
            prefixes, longer = list(open_paths), {}
            logits_NV = logits_after(model, [(*prompt, *prefix) for prefix in prefixes])[:, -1]
            for prefix, logits_V in zip(prefixes, logits_NV, strict=True):
                p_V = self.next_token(logits_V, prefix)
                for token in p_V.nonzero()[:, 0].tolist():
                    done = left == 1 or token in stop_ids
                    (self.paths if done else longer)[(*prefix, token)] = open_paths[prefix] * float(p_V[token])
            open_paths = longer

    def next_token(self, logits_V: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        """float64 [V]: the token after `output`, of which the raw logits are given."""
        changed_V = changed_logits(
            logits_V,
            prompt=self.prompt,
            output=output,
            params=self.params,
            bad_words=self._bad_words,
            stop_ids=self._stop_ids,
        )
        return exact_probabilities(changed_V, self.params)

    def compare(self, found: Sequence[tuple[int, ...]]) -> Comparison:
        """found: the tokens of each draw, cut to `length`."""
        counts, total = Counter(found), len(found)
        common = [path for path, p in self.paths.items() if p * total >= 5]
        seen, wanted = [counts[path] for path in common], [self.paths[path] * total for path in common]
        if total - sum(wanted) > 1e-6 * total:
            seen, wanted = [*seen, total - sum(seen)], [*wanted, total - sum(wanted)]
        return Comparison(
            num_draws=total,
            num_outcomes=len(self.paths),
            impossible=sum(count for path, count in counts.items() if path not in self.paths),
            total_variation=0.5 * sum(abs(counts[path] / total - p) for path, p in self.paths.items()),
            expected_of_noise=0.5 * sum(math.sqrt(2 * p * (1 - p) / (math.pi * total)) for p in self.paths.values()),
            chi_square=sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True)),
            freedom=len(wanted) - 1,
        )
