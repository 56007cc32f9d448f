"""`Record`: which of several beliefs is to be trusted, by what they predicted. Shapes: M beliefs, W positions."""

from collections import deque

import numpy as np

_AHEAD_S = 4.0  # a prediction counts from so much later on, about when a change that follows from it would take effect
_RECORD_HALF_LIFE_S = 60.0


class Record:
    """How well several beliefs predicted what came later; lower is better, and old proofs fade.

    Beside the losses it keeps leads: what each belief has lost less than the first since it last was no better. A lead
    is not held back by what a belief lost before, so it shows early that the first has gone stale.
    """

    def __init__(self, num_beliefs: int) -> None:
        self.losses_M = np.zeros(num_beliefs)
        self._leads_M = np.zeros(num_beliefs)
        self._leading_since_M = np.zeros(num_beliefs)
        self._meanwhile_M = np.zeros(num_beliefs)  # what the first lost in that time
        self._first_is_from = -np.inf  # predictions made before are no longer the first belief's
        self._predictions: deque[tuple[float, np.ndarray]] = deque()
        self._judged_at = 0.0

    def predict(self, now: float, hazards_MW: np.ndarray) -> None:
        """What the beliefs say now. Of predictions at one time, as while the traffic clock stands, the last counts."""
        if self._predictions and hazards_MW.shape != self._predictions[-1][1].shape:
            self._predictions.clear()
        if self._predictions and self._predictions[-1][0] == now:
            self._predictions.pop()
        self._predictions.append((now, hazards_MW))

    def judge(self, time: float, at_risk_W: np.ndarray, accepted_W: np.ndarray) -> None:
        """Counts of about `time`, not before the last ones: how unlikely each belief held them well before."""
        if self._predictions and self._predictions[0][1].shape[1] < len(at_risk_W):
            self._predictions.clear()  # a replica with longer drafts has come: nothing was said of those positions
        made_by = time - _AHEAD_S
        while len(self._predictions) > 1 and self._predictions[1][0] <= made_by:
            self._predictions.popleft()
        if not self._predictions or self._predictions[0][0] > made_by:
            return
        hazards_MW = np.clip(self._predictions[0][1], 0.005, 0.995)
        loss_M = -(np.log(hazards_MW) @ accepted_W + np.log1p(-hazards_MW) @ (at_risk_W - accepted_W))
        fade = 2.0 ** ((self._judged_at - time) / _RECORD_HALF_LIFE_S)
        self.losses_M = self.losses_M * fade + loss_M
        if self._predictions[0][0] >= self._first_is_from:
            begins_M = self._leads_M == 0.0
            self._leading_since_M[begins_M] = time
            self._meanwhile_M[begins_M] = 0.0
            self._meanwhile_M = self._meanwhile_M * fade + loss_M[0]
            self._leads_M = np.maximum(self._leads_M * fade + loss_M[0] - loss_M, 0.0)
        self._judged_at = time

    @property
    def has_judged(self) -> bool:
        """Whether anything that was predicted has come to pass, or not."""
        return bool(self.losses_M.any())

    def best(self) -> int:
        """The belief with the least loss; of equal ones the first."""
        return int(self.losses_M.argmin())

    def is_ahead(self, index: int, *, by_s: float, at_least: float) -> bool:
        """Whether a belief has known better than the first lately.

        Its lead is then more than what the first loses in `by_s` seconds, as fast as it did meanwhile, and `at_least`.
        """
        seconds = self._judged_at - self._leading_since_M[index] + 1.0
        return bool(self._leads_M[index] > max(by_s * self._meanwhile_M[index] / seconds, at_least))

    def start_first_anew(self, now: float, *, like: int = 0) -> None:
        """The first belief comes from other counts from now on. like: whose record it goes on with."""
        self._first_is_from = now
        self._leads_M[:] = 0.0
        self.losses_M[0] = self.losses_M[like]
        for _, hazards_MW in self._predictions:
            hazards_MW[0] = hazards_MW[like]

    def is_better(self, index: int, *, by: float) -> bool:
        """Whether a belief has predicted better than the first, by this share of its loss."""
        return bool(self.losses_M[index] < (1.0 - by) * self.losses_M[0])
