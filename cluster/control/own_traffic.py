"""`OwnTraffic`: whether a replica's traffic is its own, and what is believed of it then.

The replica's counts under several half-lives, with the cluster's hazards as the prior, are held against the cluster's
belief: it gets a belief of its own once one of them has clearly predicted its counts better, and keeps it while one
does at all.
Shapes: M memories, W positions. Times are seconds on the traffic clock.
"""

import numpy as np

from cluster.control.hazards import Belief
from cluster.control.record import Record

_HALF_LIVES_S = np.array([20.0, 80.0, 320.0])
_BETTER = 0.01  # share of the loss by which an own memory must be better: less is passing composition
_PRIOR_ROWS = 20.0  # of the cluster's hazard
_REQUESTS_DIFFER = 5.0  # times the variance that chance alone gives: a request's rows are alike


class OwnTraffic:
    """One replica's counts and their proof against the cluster's belief. is_own: they have passed it."""

    def __init__(self, *, width: int) -> None:
        self.is_own = False
        self._sums_M2W = np.zeros((len(_HALF_LIVES_S), 2, width))
        self._squares_MW = np.zeros((len(_HALF_LIVES_S), width))
        self._record = Record(1 + len(_HALF_LIVES_S))
        self._at = 0.0
        self._is_new = False

    def add(self, time: float, at_risk_W: np.ndarray, accepted_W: np.ndarray) -> None:
        """Counts of a report at `time`, which never runs backwards."""
        self._widen(len(at_risk_W))
        fade_M = np.exp2((self._at - time) / _HALF_LIVES_S)
        self._sums_M2W *= fade_M[:, None, None]
        self._squares_MW *= fade_M[:, None] ** 2
        self._sums_M2W += (at_risk_W, accepted_W)
        self._squares_MW += at_risk_W
        self._record.judge(time, at_risk_W, accepted_W)
        self._at = time
        self._is_new = True

    def changed(self) -> None:
        """The cluster's traffic has changed: old predictions say nothing. `is_own` stays until a new one is judged."""
        self._record = Record(1 + len(_HALF_LIVES_S))

    def believe(self, now: float, cluster: Belief) -> Belief:
        """The replica's own belief, or the cluster's."""
        if not (self._is_new or self.is_own):
            return cluster  # only new counts can prove anything
        self._widen(len(cluster.hazards))
        rows_MW, accepted_MW = self._sums_M2W[:, 0], self._sums_M2W[:, 1]
        hazards_MW = (accepted_MW + _PRIOR_ROWS * cluster.hazards) / (rows_MW + _PRIOR_ROWS)
        if self._is_new:
            self._record.predict(now, np.vstack([cluster.hazards, hazards_MW]))
            self._is_new = False
        best = self._record.best() if self._record.has_judged else int(self.is_own)
        self.is_own = best > 0 and (self.is_own or self._record.is_better(best, by=_BETTER))
        if not self.is_own:
            return cluster
        hazards_W, rows_W, squares_W = hazards_MW[best - 1], rows_MW[best - 1], self._squares_MW[best - 1]
        effective_W = np.divide(rows_W**2, squares_W, out=np.zeros_like(rows_W), where=squares_W > 0) + _PRIOR_ROWS
        covariance = np.diag(_REQUESTS_DIFFER * hazards_W * (1 - hazards_W) / effective_W)
        return Belief.of(hazards_W, covariance, origins=cluster.origins)

    def _widen(self, width: int) -> None:
        """Makes room for more positions."""
        more = width - self._squares_MW.shape[1]
        if more > 0:
            self._sums_M2W = np.pad(self._sums_M2W, ((0, 0), (0, 0), (0, more)))
            self._squares_MW = np.pad(self._squares_MW, ((0, 0), (0, more)))
