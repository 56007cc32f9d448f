"""`StepTimes`: seconds of a decode step by (batch size, K) on one accelerator type, as now believed.

Start-up measurements give the shape; decode-only steps in service correct it, first all pairs alike, then pair by pair.
Alike means by a factor (a busy host) and by seconds for each row: contexts are short at start-up, and what they cost
depends on the rows that ran, of which a bucket seldom has its full number, and not on K. Pairs that nobody measured are
interpolated.
"""

from collections.abc import Iterable

import numpy as np

from cluster.control.counts import ProgramSteps
from engine.speculative.counters import StepTime, batch_bucket

_HALF_LIFE_S = 30.0  # of traffic
_PRIOR_STEPS = 20.0  # what a pair's start-up measurement weighs against steps in service
_ENOUGH_STEPS = 8.0  # in service, for a pair without a start-up measurement
_TIME_DEVIATION = 0.02  # of a pair from what is common to all
_GUESS_DEVIATION = 0.1  # of a pair that was neither measured nor served: programs do not lie on a line
_FACTOR_DEVIATION = 0.05  # of the common factor from 1
_ROW_SHARE = 0.5  # what contexts may add to the step in which they weigh most
_HEAVIEST = 2.0**40  # newer steps weigh more, up to here: then all are scaled down

Pair = tuple[int, int]


class StepTimes:
    """One accelerator type's table. Times `now` are seconds on the traffic clock."""

    def __init__(self) -> None:
        self._measured: dict[Pair, tuple[float, int]] = {}  # mean seconds, replicas that measured
        self._served: dict[Pair, list[float]] = {}  # [steps, seconds, rows of all steps], times 2 ** (age of `_since`)
        self._since = 0.0
        self._weight = 1.0  # of a step now
        self._table: dict[Pair, float] | None = None

    def measured(self, step_times: Iterable[StepTime]) -> None:
        """A replica's start-up measurements; those of several replicas are averaged.

        Raises:
            ValueError: a time that is not positive.
        """
        for entry in step_times:
            if not entry.seconds > 0:
                raise ValueError(f"step_times: {entry} is not a positive time")
            mean, num = self._measured.get((entry.batch_bucket, entry.draft_len), (0.0, 0))
            self._measured[entry.batch_bucket, entry.draft_len] = ((mean * num + entry.seconds) / (num + 1), num + 1)
        self._table = None

    def served(self, programs: Iterable[ProgramSteps], *, now: float) -> None:
        """What happened since the last report: decode-only steps and their seconds."""
        self._weight = 2.0 ** min((now - self._since) / _HALF_LIFE_S, 1000.0)
        if self._weight > _HEAVIEST:
            for sums in self._served.values():
                sums[:] = [value / self._weight for value in sums]
            self._since, self._weight = now, 1.0
        for bucket, draft_len, steps, rows, decode_steps, decode_time_s in programs:
            if decode_steps:
                sums = self._served.setdefault((bucket, draft_len), [0.0, 0.0, 0.0])
                sums[0] += self._weight * decode_steps
                sums[1] += self._weight * decode_time_s
                sums[2] += self._weight * decode_steps * rows / steps
        self._table = None

    def seconds(self, batch_size: int, draft_len: int, *, max_num_seqs: int) -> float | None:
        """Seconds of a step at this batch size; None when too little is known to say."""
        if self._table is None:
            self._table = self._current()
        bucket = batch_bucket(batch_size, max_num_seqs)
        known = self._table.get((bucket, draft_len))
        return known if known is not None else _interpolate(self._table, bucket, draft_len)

    def deviation(self, batch_size: int, draft_len: int, *, max_num_seqs: int) -> float:
        """Standard deviation of the logarithm of `seconds`.

        What is served is known, a start-up measurement roughly, what lies between others hardly.
        """
        pair = batch_bucket(batch_size, max_num_seqs), draft_len
        steps = self._served[pair][0] / self._weight if pair in self._served else 0.0
        if pair not in self._measured and steps < _ENOUGH_STEPS:
            return _GUESS_DEVIATION
        return _TIME_DEVIATION * (_PRIOR_STEPS / (_PRIOR_STEPS + steps)) ** 0.5

    def _current(self) -> dict[Pair, float]:
        served = {pair: np.array(sums) / self._weight for pair, sums in self._served.items() if sums[0] > 0}
        factor, row_s = self._correction(served)
        rows_of: dict[int, np.ndarray] = {}  # bucket -> [steps, rows] at any K
        for (bucket, _), sums in served.items():
            rows_of[bucket] = rows_of.get(bucket, np.zeros(2)) + sums[[0, 2]]
        table = {
            pair: mean * factor + row_s * (rows_of[pair[0]][1] / rows_of[pair[0]][0] if pair[0] in rows_of else pair[0])
            for pair, (mean, _) in self._measured.items()
        }
        for pair, (steps, seconds, rows) in served.items():
            if pair in table:
                expected = steps * factor * self._measured[pair][0] + rows * row_s
                table[pair] += (seconds - expected) / (_PRIOR_STEPS + steps)
            elif steps >= _ENOUGH_STEPS:
                table[pair] = seconds / steps
        return {pair: float(seconds) for pair, seconds in table.items()}

    def _correction(self, served: dict[Pair, np.ndarray]) -> tuple[float, float]:
        """(factor, seconds a row) that turn the start-up measurements into what is served: least squares over the pairs
        of their relative difference, drawn to (1, 0) by how much either may differ."""
        pairs = [(pair, sums) for pair, sums in served.items() if pair in self._measured]
        if not pairs:
            return 1.0, 0.0
        measured = np.array([self._measured[pair][0] for pair, _ in pairs])
        difference = np.array([sums[1] / sums[0] for _, sums in pairs]) / measured - 1.0
        weights = np.array([sums[0] / (sums[0] + _PRIOR_STEPS) for _, sums in pairs])
        by_row = np.array([sums[2] / sums[0] for _, sums in pairs]) / measured
        most = max(pair[0] / mean for pair, (mean, _) in self._measured.items())
        factor_weight, row_weight = (
            (_TIME_DEVIATION / _FACTOR_DEVIATION) ** 2,
            (_TIME_DEVIATION / _ROW_SHARE * most) ** 2,
        )
        normal = np.array(
            [
                [weights.sum() + factor_weight, weights @ by_row],
                [weights @ by_row, weights @ by_row**2 + row_weight],
            ]
        )
        factor, row_s = np.linalg.solve(normal, [weights @ difference, weights @ (by_row * difference)])
        if row_s < 0:  # nothing gets cheaper by its context
            factor, row_s = weights @ difference / (weights.sum() + factor_weight), 0.0
        return 1.0 + float(factor), float(row_s)


def _interpolate(table: dict[Pair, float], bucket: int, draft_len: int) -> float | None:
    """From the same bucket's other lengths, else from the neighbouring buckets at this length, else None."""
    same = sorted((length, seconds) for (size, length), seconds in table.items() if size == bucket)
    if len(same) > 1:
        return _on_line(same, draft_len)
    lengths_of: dict[int, list[tuple[int, float]]] = {}
    for (size, length), seconds in sorted(table.items()):
        lengths_of.setdefault(size, []).append((length, seconds))
    points = []
    for size, lengths in sorted(lengths_of.items()):
        if any(length == draft_len for length, _ in lengths):
            points.append((size, dict(lengths)[draft_len]))
        elif len(lengths) > 1:
            points.append((size, _on_line(lengths, draft_len)))
    return _on_line(points, bucket) if len(points) > 1 else None


def _on_line(points: list[tuple[int, float]], x: int) -> float:
    """Linear between the points, and beyond them along the outermost two, but never falling there. Ascending points."""
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    if xs[0] <= x <= xs[-1]:
        return float(np.interp(x, xs, ys))
    a, b, end = (0, 1, 0) if x < xs[0] else (-2, -1, -1)
    slope = max((ys[b] - ys[a]) / (xs[b] - xs[a]), 0.0)
    return max(ys[end] + slope * (x - xs[end]), min(ys) / 2)
