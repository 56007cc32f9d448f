"""`Memory`: how far back to look. The cluster's belief, from counts by the second and the memory that has proved best.

One memory is too short for a trickle of requests, whose chance composition it would chase, and too long for traffic
that has just changed. So several are kept side by side: all since the last detected change, and fading ones. The first
is used, unless another one has predicted the counts of seconds still to come clearly better: where traffic swings
faster than draft lengths can follow, that is a long one, which sees the average. A change that stands alone is no
swing: behind it the first is used whatever the record says, which the change itself has spoilt for all.

Where a few requests run, no change of traffic is sure enough to be detected from their counts at once, and the first
memory would hold the old traffic for minutes. A short one shows that it does, by predicting better for a while, if only
by little. Then the first starts anew at the moment of the last minute before and after which the counts differ most.

Shapes: P seconds with traffic, M memories, W positions. Times are seconds on the traffic clock.
"""

from collections import deque

import numpy as np

from cluster.control.hazards import Belief, smoothed_hazards
from cluster.control.record import Record

_HALF_LIVES_S = (5.0, 20.0, 80.0, 320.0)
_SINCE_CHANGE_HALF_LIFE_S = 320.0
_KEPT_S = 1280
_ALONE_S = 40.0  # without another change before it: then a change is no swing
_SAME_CHANGE_S = 6.0  # detections so close are of one change, whose place becomes clearer
_BETTER = 0.01  # share of the loss by which a fading memory must be better
_NUM_SHORT = 2  # fading memories that follow a change by themselves within a minute
_OLDER = 3.0  # half-lives of such a one that the first must reach back: else it may be worse for being too short
_AHEAD_BY_S = 0.8  # seconds of the first's loss that a short memory must be ahead, to show that the first is stale
_AHEAD_BY_LEAST = 6.0  # the same, in units of log-likelihood: less may be chance
_CHANGE_WITHIN_S = 60.0
_BLOCK_S = 8.0  # counts of neighbouring seconds come from the same requests
_ENOUGH_ROWS = 32.0  # at risk at the first position, for a belief that says anything


class Memory:
    """Counts of the whole cluster by the second, and the record of each memory's predictions."""

    def __init__(self, *, width: int) -> None:
        self.width = width
        self._times: deque[int] = deque(maxlen=_KEPT_S)
        self._counts: deque[np.ndarray] = deque(maxlen=_KEPT_S)
        self._origins: deque[np.ndarray] = deque(maxlen=_KEPT_S)  # rows counted at K, [W + 1]
        self._ended: deque[int] = deque(maxlen=_KEPT_S)
        self._num_judged = 0  # seconds on record, of all there have been
        self._num_seconds = 0
        self._changed_at = -np.inf
        self._changes: deque[float] = deque(maxlen=2)
        self._record = Record(1 + len(_HALF_LIVES_S))
        self.chosen = 0
        self.starts_anew = False  # the first memory has just been found stale
        self.knows_enough = False  # the last belief comes from more than a few rows

    def widen(self, width: int) -> None:
        """Makes room for more positions."""
        if width > self.width:
            more = ((0, 0), (0, width - self.width))
            self._counts = deque((np.pad(counts, more) for counts in self._counts), maxlen=_KEPT_S)
            self._origins = deque((np.pad(rows, more[1]) for rows in self._origins), maxlen=_KEPT_S)
            self.width = width

    def add(
        self,
        time: float,
        at_risk_W: np.ndarray,
        accepted_W: np.ndarray,
        *,
        origins: np.ndarray | None = None,
        num_ended: int = 0,
    ) -> None:
        """Counts that arrived at `time`, which never runs backwards.

        origins: rows counted at K. num_ended: requests that ended.
        """
        second = int(time)
        if not self._times or self._times[-1] != second:
            self._times.append(second)
            self._counts.append(np.zeros((2, self.width)))
            self._origins.append(np.zeros(self.width + 1))
            self._ended.append(0)
            self._num_seconds += 1
        self._counts[-1][0] += at_risk_W
        self._counts[-1][1] += accepted_W
        self._ended[-1] += num_ended
        if origins is not None:
            self._origins[-1] += origins

    def changed(self, time: float, *, now: float) -> None:
        """The traffic was found to be another one since `time`."""
        self._changed_at = max(self._changed_at, time)
        self._record.start_first_anew(now)
        if not self._changes or time - self._changes[-1] > _SAME_CHANGE_S:
            self._changes.append(time)

    def _stands_alone(self, now: float) -> bool:
        """Whether the last change is recent, and the one before it is not."""
        return bool(self._changes) and now - self._changes[-1] < _ALONE_S <= now - (
            self._changes[0] if len(self._changes) > 1 else -np.inf
        )

    def believe(self, now: float, *, num_running: int = 0) -> Belief:
        """The belief of the memory in use. There must be counts. num_running: requests now."""
        times_P, counts_P2W = np.array(self._times, dtype=np.float64), np.array(self._counts)
        self._judge_seconds(now)
        self._maybe_start_anew(now)
        ages_P = now - times_P
        weights_MP = np.exp2(-ages_P / np.array([_SINCE_CHANGE_HALF_LIFE_S, *_HALF_LIVES_S])[:, None])
        is_since_P = times_P >= np.ceil(self._changed_at)  # the second in which it happened holds both kinds
        if is_since_P.any():
            weights_MP[0] *= is_since_P
        else:
            weights_MP[0] = weights_MP[1]
        sums_M2W = np.tensordot(weights_MP, counts_P2W, axes=1)
        hazards_MW = smoothed_hazards(sums_M2W[:, 0], sums_M2W[:, 1])
        self._record.predict(now, hazards_MW)
        best = self._record.best()
        self.chosen = best if self._record.is_better(best, by=_BETTER) and not self._stands_alone(now) else 0
        rows_M = sums_M2W[:, 0, 0]
        while 0 < self.chosen < len(_HALF_LIVES_S) and rows_M[self.chosen] < _ENOUGH_ROWS:
            self.chosen += 1  # as far back as it takes to know anything
        weights_P = weights_MP[self.chosen]
        self.knows_enough = bool(rows_M[self.chosen] >= _ENOUGH_ROWS)
        used = weights_P > 0
        span = times_P[-1] - times_P[used][0] + 1.0
        blocks_P = (ages_P[used] // min(max(span / 8.0, 1.0), _BLOCK_S)).astype(np.int64)
        counts = (counts_P2W[used, 0], counts_P2W[used, 1], weights_P[used])
        if not (num_running or any(self._ended)):
            return Belief.from_reports(*counts, blocks_P=blocks_P)
        return Belief.from_reports(
            *counts,
            blocks_P=blocks_P,
            num_requests=max(float(weights_P @ np.array(self._ended)) + num_running, 1.0),
            origins=weights_P @ np.array(self._origins),
        )

    def _maybe_start_anew(self, now: float) -> None:
        """Drops what the first memory holds of other traffic, if a short one has shown that it does."""
        reach_s = now - max(self._changed_at, self._times[0])
        ahead = [
            index
            for index, half_life_s in enumerate(_HALF_LIVES_S[:_NUM_SHORT], 1)
            if reach_s >= _OLDER * half_life_s
            and self._record.is_ahead(index, by_s=_AHEAD_BY_S, at_least=_AHEAD_BY_LEAST)
        ]
        self.starts_anew = bool(ahead)
        if ahead:
            self.changed(self._likeliest_change(), now=now)
            self._record.start_first_anew(now, like=ahead[0])

    def _likeliest_change(self) -> float:
        """The middle of the second, of the last minute, before and after which the counts differ most by likelihood."""
        times_P = np.array(self._times)
        first = int(np.searchsorted(times_P, max(times_P[-1] - _CHANGE_WITHIN_S, self._changed_at)))
        first = min(first, len(times_P) - 2)
        sums_P2W = np.cumsum(np.array(self._counts)[first:], axis=0)
        likelihood_P = _likelihood(sums_P2W[:-1]) + _likelihood(sums_P2W[-1] - sums_P2W[:-1])
        return float(times_P[first + 1 + int(np.argmax(likelihood_P))]) + 0.5  # it may hold both kinds

    def _judge_seconds(self, now: float) -> None:
        """Puts the seconds that are over on record."""
        first = self._num_seconds - len(self._times)
        num_over = self._num_seconds - (self._times[-1] == int(now))
        for number in range(max(self._num_judged, first), num_over):
            at_risk_W, accepted_W = self._counts[number - first]
            self._record.judge(self._times[number - first] + 1.0, at_risk_W, accepted_W)
        self._num_judged = max(self._num_judged, num_over)


def _likelihood(counts_P2W: np.ndarray) -> np.ndarray:
    """Of each of some counts, its logarithm under the hazards that fit these best; [P]."""
    at_risk_PW, accepted_PW = counts_P2W[:, 0], counts_P2W[:, 1]
    hazards_PW = np.clip(smoothed_hazards(at_risk_PW, accepted_PW), 0.005, 0.995)
    return (np.log(hazards_PW) * accepted_PW + np.log1p(-hazards_PW) * (at_risk_PW - accepted_PW)).sum(axis=1)
