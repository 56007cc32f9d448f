"""Merging replicas' counters: differences of cumulative counts, and a log of them that forgets with traffic."""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cluster.control.messages import CellCounts

HALF_LIFE_S = 5.0  # of traffic
_KEPT_S = 6 * HALF_LIFE_S  # older differences weigh under 2 %
_ROW_S = 0.5  # reports of a group of replicas within this share a row


class ProgramSteps(NamedTuple):
    """Steps of one program since the last report: see `CellCounts`."""

    batch_bucket: int
    draft_len: int
    steps: int
    rows: int
    decode_steps: int
    decode_time_s: float


@dataclass(frozen=True, slots=True)
class Difference:
    """What happened between two reports of a replica, empty if nothing did.

    at_risk, accepted: by position, of all programs. first_rows: those at risk at the first position, by K.
    """

    programs: tuple[ProgramSteps, ...] = ()
    at_risk: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    first_rows: Mapping[int, int] = field(default_factory=dict)

    @property
    def has_rows(self) -> bool:
        return any(program.rows for program in self.programs)

    def counts(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows at risk and accepted by position, [2, W], and rows counted at K, [W + 1]."""
        counts, origins = np.zeros((2, width)), np.zeros(width + 1)
        counts[0, : len(self.at_risk)] = self.at_risk
        counts[1, : len(self.accepted)] = self.accepted
        for draft_len, rows in self.first_rows.items():
            origins[draft_len] = rows
        return counts, origins


class ReplicaCounts:
    """The last counters accepted from one incarnation of a replica. most_drafts: its largest draft length."""

    def __init__(self, *, incarnation: int, sequence: int, cells: Sequence[CellCounts], most_drafts: int) -> None:
        self.incarnation = incarnation
        self.sequence = sequence
        self._most_drafts = most_drafts
        self._cells = {(cell.batch_bucket, cell.draft_len): cell for cell in cells}

    @property
    def cells(self) -> tuple[CellCounts, ...]:
        """The counters accepted last, by cell."""
        return tuple(self._cells.values())

    def absorb(self, *, incarnation: int, sequence: int, cells: Sequence[CellCounts]) -> Difference:
        """What happened since the last accepted report; nothing for a repeated or late one.

        Raises:
            ValueError: a count shrank, which counters of one incarnation never do, no steps are counted so, or of more
                drafts than the replica makes.
        """
        if incarnation != self.incarnation or sequence <= self.sequence:
            return Difference()
        changed = []
        for cell in cells:
            known = self._cells.get((cell.batch_bucket, cell.draft_len))
            if cell != known:
                if max(cell.draft_len, len(cell.at_risk), len(cell.accepted)) > self._most_drafts:
                    raise ValueError(f"cells: the replica makes at most {self._most_drafts} drafts, got {cell}")
                changed.append((cell, _none_of(cell) if known is None else known))
        difference = _difference(changed)
        self.sequence = sequence
        self._cells.update({(cell.batch_bucket, cell.draft_len): cell for cell, _ in changed})
        return difference


def _none_of(cell: CellCounts) -> CellCounts:
    """Its program before the first step."""
    return CellCounts(
        batch_bucket=cell.batch_bucket,
        draft_len=cell.draft_len,
        steps=0,
        rows=0,
        decode_steps=0,
        decode_time_s=0.0,
        at_risk=(),
        accepted=(),
    )


def _difference(pairs: Sequence[tuple[CellCounts, CellCounts]]) -> Difference:
    """Of (new, old) counters of some programs. Hundreds a second: positions are summed before they are subtracted."""
    programs = []
    first_rows: dict[int, int] = {}
    for new, old in pairs:
        program = ProgramSteps(
            new.batch_bucket,
            new.draft_len,
            new.steps - old.steps,
            new.rows - old.rows,
            new.decode_steps - old.decode_steps,
            new.decode_time_s - old.decode_time_s,
        )
        if min(program[2:]) < 0 or _has_shrunk(new.at_risk, old.at_risk) or _has_shrunk(new.accepted, old.accepted):
            raise ValueError(f"cells: counts of a later report are smaller: {new} after {old}")
        if program.decode_steps > program.steps or not math.isfinite(program.decode_time_s):
            raise ValueError(f"cells: no steps are counted so: {new} after {old}")
        programs.append(program)
        if new.at_risk:
            rows = new.at_risk[0] - (old.at_risk[0] if old.at_risk else 0)
            first_rows[new.draft_len] = first_rows.get(new.draft_len, 0) + rows
    at_risk = _grown([new.at_risk for new, _ in pairs], [old.at_risk for _, old in pairs])
    accepted = _grown([new.accepted for new, _ in pairs], [old.accepted for _, old in pairs])
    return Difference(tuple(programs), at_risk, accepted, first_rows)


def _has_shrunk(new: tuple[int, ...], old: tuple[int, ...]) -> bool:
    return len(new) < len(old) or any(map(operator.lt, new, old))


def _grown(new: list[tuple[int, ...]], old: list[tuple[int, ...]]) -> tuple[int, ...]:
    """By position, the sum of some counts less that of others."""
    more, less = (map(sum, itertools.zip_longest(*counts, fillvalue=0)) for counts in (new, old))
    return tuple(itertools.starmap(operator.sub, itertools.zip_longest(more, less, fillvalue=0)))


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
