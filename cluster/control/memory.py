"""`Memory`: how far back to look. The cluster's belief, from counts by the second and the memory that has proved best.

One memory is too short for a trickle of requests, whose chance composition it would chase, and too long for traffic
that has just changed. So several are kept side by side: all since the last detected change, and fading ones. The first
is used, unless another one has predicted the counts of seconds still to come clearly better: where traffic swings
faster than draft lengths can follow, that is a long one, which sees the average. A change that stands alone is no
swing: behind it the first is used whatever the record says, which the change itself has spoilt for all.

Where a few requests run, no change of traffic is sure enough to be detected from their counts at once. The first memory
would then hold old traffic for ever. It is shown up by a short memory that keeps predicting better, if only a little:
since that began the traffic is held to be another one, and the first memory starts there.

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
_SHORT = slice(1, 3)  # memories that follow a change by themselves within a minute
_SHOWN_UP = 0.005  # share of the loss that a short memory must have been ahead, for all before to be old traffic
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
        self.starts_anew = False  # a short memory has just shown up the first one
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

    def changed(self, time: float) -> None:
        """The traffic was found to be another one since `time`."""
        self._changed_at = max(self._changed_at, time)
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
        old_until = self._record.overtaken_since(_SHORT, by=_SHOWN_UP)
        self.starts_anew = old_until is not None
        if old_until is not None:
            self.changed(old_until)
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

    def _judge_seconds(self, now: float) -> None:
        """Puts the seconds that are over on record."""
        first = self._num_seconds - len(self._times)
        num_over = self._num_seconds - (self._times[-1] == int(now))
        for number in range(max(self._num_judged, first), num_over):
            at_risk_W, accepted_W = self._counts[number - first]
            self._record.judge(self._times[number - first] + 1.0, at_risk_W, accepted_W)
        self._num_judged = max(self._num_judged, num_over)
