"""`Record`: which of several beliefs is to be trusted, by what they predicted. Shapes: M beliefs, W positions."""

from collections import deque

import numpy as np

_AHEAD_S = 4.0  # a prediction counts from so much later on, about when a change that follows from it would take effect
_RECORD_HALF_LIFE_S = 60.0


class Record:
    """How well several beliefs predicted what came later; lower is better, and old proofs fade."""

    def __init__(self, num_beliefs: int) -> None:
        self.losses_M = np.zeros(num_beliefs)
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
        made_by = time - _AHEAD_S
        while len(self._predictions) > 1 and self._predictions[1][0] <= made_by:
            self._predictions.popleft()
        if not self._predictions or self._predictions[0][0] > made_by:
            return
        hazards_MW = np.clip(self._predictions[0][1], 0.005, 0.995)
        loss_M = -(np.log(hazards_MW) @ accepted_W + np.log1p(-hazards_MW) @ (at_risk_W - accepted_W))
        self.losses_M = self.losses_M * 2.0 ** ((self._judged_at - time) / _RECORD_HALF_LIFE_S) + loss_M
        self._judged_at = time

    @property
    def has_judged(self) -> bool:
        """Whether anything that was predicted has come to pass, or not."""
        return bool(self.losses_M.any())

    def best(self) -> int:
        """The belief with the least loss; of equal ones the first."""
        return int(self.losses_M.argmin())

    def is_better(self, index: int, *, by: float) -> bool:
        """Whether a belief has predicted better than the first, by this share of its loss."""
        return bool(self.losses_M[index] < (1.0 - by) * self.losses_M[0])
