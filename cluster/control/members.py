"""Who takes part: the registered replicas, and the schedules that several of them share."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from cluster.control.counts import ProgramSteps, ReplicaCounts
from cluster.control.learnt import Learnt
from cluster.control.messages import PROTOCOL_VERSION, Registration, Report
from cluster.control.own_traffic import OwnTraffic
from cluster.control.policy import Schedule, Verdict
from cluster.control.step_times import StepTimes
from engine.speculative.counters import batch_bucket
from engine.speculative.schedule import DraftLengthSchedule, Version, round_down

_IDLE_S = 10.0  # since a batch size was last run


class LineKey(NamedTuple):
    """What replicas that share a schedule have in common."""

    accelerator: str
    block_width: int
    draft_lens: tuple[int, ...]
    max_num_seqs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """A schedule that `replica_id` should have and does not."""

    replica_id: str
    version: Version
    schedule: dict[int, int]


@dataclass(kw_only=True, slots=True)
class Replica:
    """One registered replica.

    own: its own line, None while it shares one. group: its reports share rows of the log. num_ended: requests that
    had ended with the last report that told of rows; None before the first report.
    """

    registration: Registration
    line: "Line"
    counts: ReplicaCounts
    traffic: OwnTraffic
    group: int
    seen_at: float
    version: Version  # in force there, as far as known
    target: Version = (0, 0)
    target_schedule: dict[int, int] = field(default_factory=dict)
    own: Schedule | None = None
    latest: Report | None = None
    num_ended: int | None = None
    verdicts: dict[int, Verdict] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Line:
    """The schedule shared by the replicas of one accelerator type. seen_at: when it last had any.

    learnt: from them and all others whose drafters run blocks of the same width.
    """

    schedule: Schedule
    draft_lens: tuple[int, ...]
    max_num_seqs: int
    learnt: Learnt
    times: StepTimes = field(default_factory=StepTimes)
    served_at: dict[int, float] = field(default_factory=dict)  # batch bucket -> when it was last reported
    came_into_use: dict[int, float] = field(default_factory=dict)  # batch bucket -> when, after nobody had run it
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    seen_at: float = -math.inf

    def serve(self, programs: Iterable[ProgramSteps], now: float) -> None:
        """Takes note of the batch sizes that were run."""
        for bucket in {program.batch_bucket for program in programs if program.rows}:
            if now - self.served_at.get(bucket, -math.inf) > _IDLE_S:
                self.came_into_use[bucket] = now
            self.served_at[bucket] = now

    def fresh(self, bounds: Iterable[int], since: float) -> list[int]:
        """The batch sizes that came into use after `since`."""
        used = {bound: self.came_into_use.get(batch_bucket(bound, self.max_num_seqs), -math.inf) for bound in bounds}
        return [bound for bound, at in used.items() if at > since]

    def idle(self, bounds: Iterable[int], now: float) -> list[int]:
        """The batch sizes that nobody runs."""
        last = {bound: self.served_at.get(batch_bucket(bound, self.max_num_seqs), -math.inf) for bound in bounds}
        return [bound for bound, served_at in last.items() if now - served_at > _IDLE_S]


def line_key(registration: Registration) -> LineKey:
    """Replicas of one key share a schedule."""
    return LineKey(
        registration.accelerator, registration.block_width, registration.draft_lens, registration.max_num_seqs
    )


def schedule_entries(schedule: Mapping[int, int], max_num_seqs: int, draft_lens: tuple[int, ...]) -> dict[int, int]:
    """A schedule with every batch bucket among its bounds, saying the same at each of them. Ascending."""
    buckets = {batch_bucket(rows, max_num_seqs) for rows in range(1, max_num_seqs + 1)}
    bounds = buckets | {bound for bound in schedule if bound <= max_num_seqs}
    given = DraftLengthSchedule(schedule)
    return {bound: round_down(given.draft_len(bound), draft_lens) for bound in sorted(bounds)}


def plain(schedule: Schedule) -> dict[int, int]:
    """Batch size -> K."""
    return {bound: setting.draft_len for bound, setting in schedule.items()}


def check_registration(registration: Registration) -> None:
    if registration.protocol != PROTOCOL_VERSION:
        raise ValueError(
            f"protocol: replica {registration.replica_id} speaks version {registration.protocol}, the controller "
            f"{PROTOCOL_VERSION}"
        )
    lengths = registration.draft_lens
    if not lengths or lengths[0] != 0 or any(a >= b for a, b in itertools.pairwise(lengths)):
        raise ValueError(f"draft_lens: must ascend strictly and start with 0, got {list(lengths)}")
    if registration.block_width <= lengths[-1]:
        raise ValueError(f"block_width: must be above the longest draft, {lengths[-1]}, got {registration.block_width}")
    if registration.max_num_seqs < 1:
        raise ValueError(f"max_num_seqs: must be >= 1, got {registration.max_num_seqs}")
