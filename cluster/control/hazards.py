"""From counts by position to expected tokens per step, with their uncertainty. Pure functions of arrays.

    h_j = accepted_j / at_risk_j        chance that draft j is accepted, its predecessors being so (hazard)
    S_j = h_1 x .. x h_j                chance that at least j drafts are accepted
    E(K) = 1 + S_1 + .. + S_K           expected tokens of a step and row that verifies K drafts

accepted_j over steps would be censored wherever K varies. Shapes: P reports, W positions.

Requests differ, and one that accepts much takes few steps at a large K: with n tokens to emit it is seen in n / E(K)
of them. So what a schedule gives is tokens over steps, the harmonic mean of the requests' E(K), while counts made at
some K weigh each request by its steps at that K. To second order in c(K), the relative deviation of E(K) between
requests,

    harmonic mean of E(K)  =  E(K) as counted at K'  x  (1 - c(K) (c(K) - c(K')))

K' = 0 counts the easy ones most: a schedule chosen from it without this would draft too far.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

_PSEUDO_ROWS = 4.0  # weight of the guess for a position that was hardly observed: the hazard before it
_FIRST_GUESS = 0.5
_LEAST_HAZARD = 1e-12
_NUM_SPLITS, _SPLIT_S = 24, 0.5
_SAME_REQUESTS_S = 4.0  # within which reports are not independent
_REQUESTS_DIFFER = 0.5  # deviation between requests of their hazards' log-odds: a guess
_AT_MOST_DIFFER = 0.8  # the same, where less would be bold
_TOKENS_DIFFER = 0.8  # deviation between requests of E(W) - 1, over its mean
LOWER_90 = 1.2816  # standard deviations: one-sided


def expected_tokens(hazards_W: np.ndarray) -> np.ndarray:
    """E(K) for K = 0 .. W; [..., W + 1]."""
    survival = np.cumprod(hazards_W, axis=-1)
    ones = np.ones((*hazards_W.shape[:-1], 1))
    return np.concatenate([ones, 1.0 + np.cumsum(survival, axis=-1)], axis=-1)


def token_gradients(hazards_W: np.ndarray) -> np.ndarray:
    """dE(K)/dh_j for K = 0 .. W and j = 1 .. W; [..., W + 1, W]: the S_i with j <= i <= K, without the factor h_j."""
    hazards_W = np.maximum(hazards_W, _LEAST_HAZARD)  # so that the factor can be taken out by division
    survival = np.cumprod(hazards_W, axis=-1)
    terms = survival[..., :, None] / hazards_W[..., None, :]
    return np.concatenate([np.zeros_like(terms[..., :1, :]), np.cumsum(np.tril(terms), axis=-2)], axis=-2)


def smoothed_hazards(at_risk_W: np.ndarray, accepted_W: np.ndarray) -> np.ndarray:
    """Hazards where a position's few rows are mixed with the hazard before it; defined without counts too. [..., W]"""
    hazards = np.empty_like(at_risk_W, dtype=float)
    guess: np.ndarray | float = _FIRST_GUESS
    for index in range(at_risk_W.shape[-1]):
        guess = (accepted_W[..., index] + _PSEUDO_ROWS * guess) / (at_risk_W[..., index] + _PSEUDO_ROWS)
        hazards[..., index] = guess
    return hazards


@dataclass(frozen=True, slots=True)
class Belief:
    """Hazards [W] with their covariance [W, W], and what follows for every K."""

    hazards: np.ndarray
    covariance: np.ndarray
    tokens: np.ndarray  # of a step and row where all steps verify K drafts, [W + 1]
    gradients: np.ndarray  # of E(K), [W + 1, W]
    origins: np.ndarray | None  # rows counted at K, [W + 1]

    @classmethod
    def of(cls, hazards: np.ndarray, covariance: np.ndarray, *, origins: np.ndarray | None = None) -> Self:
        """A belief from its hazards, which were counted at `origins`; None: at the very K they are asked for."""
        tokens, gradients = expected_tokens(hazards), token_gradients(hazards)
        if origins is not None and origins.any():
            relative = _REQUESTS_DIFFER * (gradients @ (hazards * (1.0 - hazards))) / tokens  # c(K)
            tokens = tokens * np.exp(-relative * (relative - relative @ origins / origins.sum()))
            tokens = np.maximum.accumulate(tokens)
        return cls(hazards, covariance, tokens, gradients, origins)

    @classmethod
    def from_reports(
        cls,
        at_risk_PW: np.ndarray,
        accepted_PW: np.ndarray,
        weights_P: np.ndarray,
        *,
        blocks_P: np.ndarray | None = None,
        num_requests: float = np.inf,
        origins: np.ndarray | None = None,
    ) -> Self:
        """The cluster's belief.

        The covariance comes from how much reports differ beyond what chance within them explains (requests are not
        alike, and a report sees few of them), and is never below what chance alone gives. blocks_P: monotonic numbers
        of blocks, of which the reports are not independent; default: every report is a block. num_requests: so many
        requests were counted; a few of them are no picture of the traffic, however many their rows and reports.
        origins: rows counted at K, [W + 1].
        """
        rows, accepted = weights_P @ at_risk_PW, weights_P @ accepted_PW
        hazards = smoothed_hazards(rows, accepted)
        residuals = (accepted_PW - hazards * at_risk_PW) * weights_P[:, None] / (rows + _PSEUDO_ROWS)
        block_weights = weights_P
        if blocks_P is not None:
            starts = np.flatnonzero(np.diff(blocks_P, prepend=blocks_P[0] - 1))
            residuals, block_weights = np.add.reduceat(residuals, starts), np.add.reduceat(weights_P, starts)
        num_blocks = block_weights.sum() ** 2 / max(block_weights @ block_weights, 1e-12)
        between = residuals.T @ residuals * _small_sample(num_blocks)
        squared = (weights_P * weights_P) @ at_risk_PW
        effective = np.divide(rows * rows, squared, out=np.zeros_like(rows), where=squared > 0) + _PSEUDO_ROWS
        chance = hazards * (1.0 - hazards) / effective
        covariance = between + np.diag(np.maximum(chance - np.diag(between), 0.0))
        slope = hazards * (1.0 - hazards)  # of the hazards by their log-odds, all together
        covariance += _AT_MOST_DIFFER**2 * np.outer(slope, slope) / num_requests
        return cls.of(hazards, covariance, origins=origins)

    def log_ratio_deviation(self, draft_len: int, other: int) -> float:
        """Standard deviation of log(E(draft_len) / E(other))."""
        gradient = self.gradients[draft_len] / self.tokens[draft_len] - self.gradients[other] / self.tokens[other]
        return float(np.sqrt(max(gradient @ self.covariance @ gradient, 0.0)))


def changed_since(
    times_P: np.ndarray,
    at_risk_PW: np.ndarray,
    accepted_PW: np.ndarray,
    weights_P: np.ndarray,
    *,
    deviations: float,
    ended_P: np.ndarray | None = None,
    num_running: int = 0,
) -> float | None:
    """The time from which on the reports tell of other traffic than before; None if they do not.

    The reports are split in two at every half second of the last twelve. The split where E(W) before and after differs
    most, in standard deviations, counts if these are more than `deviations` and E differs by over 5 %.
    ended_P, num_running: requests that ended with each report and that run now, where known: before and after are then
    so many draws from all there are.
    """
    if len(times_P) < 2:
        return None
    cuts_S = np.unique(np.searchsorted(times_P, times_P[-1] - np.arange(_NUM_SPLITS) * _SPLIT_S))
    cuts_S = cuts_S[cuts_S > 0]
    if not len(cuts_S):
        return None
    is_before_SP = np.arange(len(times_P)) < cuts_S[:, None]
    all_W = smoothed_hazards(weights_P @ at_risk_PW, weights_P @ accepted_PW)
    (before_S, spread_before_S, scores_before_SP), (after_S, spread_after_S, scores_after_SP) = (
        _longest_of_parts(at_risk_PW, accepted_PW, weights_P * part_SP, all_W)
        for part_SP in (is_before_SP, ~is_before_SP)
    )
    difference_S = np.abs(after_S - before_S)
    spread_S = spread_before_S + spread_after_S
    if ended_P is not None and (num_running or ended_P.any()):
        weighted_P = weights_P * ended_P
        after_ended_S = (weighted_P * ~is_before_SP).sum(axis=1)
        per_request_S = 1.0 / np.maximum(weighted_P.sum() - after_ended_S + num_running, 1.0)
        per_request_S += 1.0 / np.maximum(after_ended_S + num_running, 1.0)
        larger_S = np.maximum(before_S, after_S) - 1.0
        spread_S = np.maximum(spread_S, (_TOKENS_DIFFER * larger_S) ** 2 * per_request_S)
    deviations_S = difference_S / np.sqrt(spread_S)
    deviations_S[difference_S <= 0.05 * before_S] = 0.0
    best = int(deviations_S.argmax())
    if deviations_S[best] <= deviations:
        return None
    # Reports that follow each other tell of the same requests, the more so the fewer these are.
    scores_P = scores_before_SP[best] + scores_after_SP[best]
    blocks_P = ((times_P[-1] - times_P) // _SAME_REQUESTS_S).astype(np.int64)
    together = np.bincount(blocks_P, scores_P)
    excess = max(float(together @ together) / max(float(scores_P @ scores_P), 1e-12), 1.0)
    return float(times_P[cuts_S[best]]) if deviations_S[best] > deviations * excess**0.5 else None


def _longest_of_parts(
    at_risk_PW: np.ndarray, accepted_PW: np.ndarray, weights_SP: np.ndarray, guess_W: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of S weightings of the reports: E(W), its variance, and what each report adds to its error [S, P].

    guess_W: hazards of all reports. A part that saw few rows is no evidence against them.
    """
    rows_SW, accepted_SW = weights_SP @ at_risk_PW, weights_SP @ accepted_PW
    hazards_SW = (accepted_SW + _PSEUDO_ROWS * guess_W) / (rows_SW + _PSEUDO_ROWS)
    gradient_SW = token_gradients(hazards_SW)[:, -1]
    squared_SP = weights_SP * weights_SP
    squared_SW = squared_SP @ at_risk_PW
    effective_SW = np.divide(rows_SW**2, squared_SW, out=np.zeros_like(rows_SW), where=squared_SW > 0) + _PSEUDO_ROWS
    chance_S = (gradient_SW**2 * hazards_SW * (1 - hazards_SW) / effective_SW).sum(axis=1)
    share_SW = gradient_SW / (rows_SW + _PSEUDO_ROWS)
    scores_SP = share_SW @ accepted_PW.T - (share_SW * hazards_SW) @ at_risk_PW.T
    num_S = weights_SP.sum(axis=1) ** 2 / squared_SP.sum(axis=1)
    between_S = (squared_SP * scores_SP**2).sum(axis=1) * _small_sample(num_S)
    return expected_tokens(hazards_SW)[:, -1], np.maximum(between_S, chance_S), weights_SP * scores_SP


def _small_sample(num_reports: np.ndarray) -> np.ndarray:
    """Factor for a variance estimated from so many reports around their own mean."""
    return num_reports / (np.maximum(num_reports, 1.5) - 1.0)
