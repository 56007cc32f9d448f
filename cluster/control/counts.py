"""Merging replicas' counters: differences of cumulative counts, and a log of them that forgets with traffic."""

import itertools
import operator
from collections.abc import Sequence

import numpy as np

from cluster.control.messages import CellCounts

HALF_LIFE_S = 5.0  # of traffic
_KEPT_S = 6 * HALF_LIFE_S  # older differences weigh under 2 %
_ROW_S = 0.5  # reports of a group of replicas within this share a row


class ReplicaCounts:
    """The last counters accepted from one incarnation of a replica."""

    def __init__(self, *, incarnation: int, sequence: int, cells: Sequence[CellCounts]) -> None:
        self.incarnation = incarnation
        self.sequence = sequence
        self._cells = {(cell.batch_bucket, cell.draft_len): cell for cell in cells}

    @property
    def cells(self) -> tuple[CellCounts, ...]:
        """The counters accepted last, by cell."""
        return tuple(self._cells.values())

    def absorb(self, *, incarnation: int, sequence: int, cells: Sequence[CellCounts]) -> list[CellCounts]:
        """What happened since the last accepted report, by cell; nothing for a repeated or late one.

        Raises:
            ValueError: a count shrank, which counters of one incarnation never do.
        """
        if incarnation != self.incarnation or sequence <= self.sequence:
            return []
        changed = []
        for cell in cells:
            key = (cell.batch_bucket, cell.draft_len)
            known = self._cells.get(key)
            if cell != known:
                changed.append((key, cell, cell if known is None else _difference(cell, known)))
        self.sequence = sequence
        self._cells.update({key: cell for key, cell, _ in changed})
        return [difference for _, _, difference in changed]


def _difference(new: CellCounts, old: CellCounts) -> CellCounts:
    difference = CellCounts(
        batch_bucket=new.batch_bucket,
        draft_len=new.draft_len,
        steps=new.steps - old.steps,
        rows=new.rows - old.rows,
        decode_steps=new.decode_steps - old.decode_steps,
        decode_time_s=new.decode_time_s - old.decode_time_s,
        at_risk=_subtract(new.at_risk, old.at_risk),
        accepted=_subtract(new.accepted, old.accepted),
    )
    counts = (difference.steps, difference.rows, difference.decode_steps, difference.decode_time_s)
    if min(*counts, *difference.at_risk, *difference.accepted) < 0:
        raise ValueError(f"cells: counts of a later report are smaller: {new} after {old}")
    return difference


def _subtract(new: tuple[int, ...], old: tuple[int, ...]) -> tuple[int, ...]:
    if len(new) < len(old):
        raise ValueError(f"cells: a later report has fewer positions: {len(new)} after {len(old)}")
    return (*map(operator.sub, new, old), *new[len(old) :])


class TrafficClock:
    """Seconds during which there was traffic: idle time neither ages what was learnt nor passes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: float | None = None

    def traffic_at(self, now: float, *, longest_gap_s: float) -> float:
        """Traffic was seen at `now`. A gap since the last counts up to longest_gap_s. Returns the clock."""
        if self._last is not None:
            self.seconds += min(max(now - self._last, 0.0), longest_gap_s)
        self._last = now if self._last is None else max(now, self._last)
        return self.seconds


def summed(cells: Sequence[CellCounts], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts at risk and accepted by position, [2, W], and rows counted at K, [W + 1], of some cells."""
    counts, origins = np.zeros((2, width)), np.zeros(width + 1)
    for row, columns in zip(counts, ((cell.at_risk for cell in cells), (cell.accepted for cell in cells)), strict=True):
        sums = [*map(sum, itertools.zip_longest(*columns, fillvalue=0))]  # far cheaper than an array for each cell
        row[: len(sums)] = sums
    for cell in cells:
        if cell.at_risk:
            origins[cell.draft_len] += cell.at_risk[0]
    return counts, origins


class DifferenceLog:
    """Recent differences of all replicas in order of arrival. A row holds those of a group of replicas within half a
    second, so that the log of a large cluster is no longer than that of a few replicas.

    Arrays (P rows, W positions): `times_P` on the traffic clock, `at_risk_PW`, `accepted_PW`, `ended_P`: requests.
    """

    def __init__(self, *, width: int) -> None:
        self.width = width
        self._size = 0
        self._first = 0
        self._times = np.zeros(64)
        self._ended = np.zeros(64)
        self._open: dict[int, int] = {}  # group -> its row of the half second that is on
        self._counts = np.zeros((64, 2, width))

    @property
    def times_P(self) -> np.ndarray:
        return self._times[self._first : self._size]

    @property
    def at_risk_PW(self) -> np.ndarray:
        return self._counts[self._first : self._size, 0]

    @property
    def accepted_PW(self) -> np.ndarray:
        return self._counts[self._first : self._size, 1]

    @property
    def ended_P(self) -> np.ndarray:
        return self._ended[self._first : self._size]

    def add(self, *, time: float, counts: np.ndarray, group: int = 0, num_ended: int = 0) -> None:
        """One report's differences, [2, W], at `time` on the traffic clock, which never runs backwards."""
        index = self._open.get(group, -1)
        if index < self._first or int(self._times[index] / _ROW_S) != int(time / _ROW_S):
            if self._size == len(self._times):
                self._make_room()
            index = self._open[group] = self._size
            self._counts[index], self._times[index], self._ended[index] = 0.0, time, 0
            self._size += 1
            self.forget_before(time - _KEPT_S)
        self._counts[index] += counts
        self._ended[index] += num_ended

    def forget_before(self, time: float) -> None:
        """Drops rows older than `time`."""
        self._first += int(np.searchsorted(self.times_P, time))

    def weights(self, time: float) -> np.ndarray:
        """Weight of each row at `time`: 1 now, 1/2 a half-life ago; [P]."""
        return np.exp2((self.times_P - time) / HALF_LIFE_S)

    def widen(self, width: int) -> None:
        """Makes room for more positions."""
        if width > self.width:
            self._counts = np.pad(self._counts, ((0, 0), (0, 0), (0, width - self.width)))
            self.width = width

    def _make_room(self) -> None:
        """Moves the rows to the front, of larger arrays when over half of them are in use."""
        used = self._size - self._first
        capacity = len(self._times) * (2 if used > len(self._times) // 2 else 1)
        for name in ("_times", "_counts", "_ended"):
            old = getattr(self, name)
            new = np.zeros((capacity, *old.shape[1:]), dtype=old.dtype)
            new[:used] = old[self._first : self._size]
            setattr(self, name, new)
        self._first, self._size = 0, used
        self._open.clear()
