"""What a replica and the speculation controller tell each other. Plain messages; nothing here knows Ray.

All counts are cumulative since the replica's engine started: a report that is lost, repeated or late changes nothing.
"""

import itertools
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from cluster.control.policy import Rules
from engine.speculative.counters import CounterSnapshot, StepTime
from engine.speculative.schedule import Version

PROTOCOL_VERSION = 2
SHADOW_TIME_SHARE = 0.01  # of device time at first, for counts at draft lengths that are not in force


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlOptions:
    """rules: of the policy. corrects_replicas: whether a replica may get a schedule of its own."""

    rules: Rules = field(default_factory=Rules)
    corrects_replicas: bool = True


class CellCounts(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Cumulative counts of one program: batch-size bucket (inclusive upper bound) and verify length K.

    decode_steps, decode_time_s: steps of the steady program and their seconds.
    at_risk[j-1], accepted[j-1]: rows whose first j-1 drafts were accepted and that had a draft j, and those of them
        whose draft j was accepted; positions above K come from shadow scoring.
    """

    batch_bucket: int
    draft_len: int
    steps: int
    rows: int
    decode_steps: int
    decode_time_s: float
    at_risk: tuple[int, ...]
    accepted: tuple[int, ...]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator wants of all replicas: `schedule`, or no change. Replicas keep it for the next controller.

    issued_at: seconds since the Unix epoch; the latest order counts. mode "release" ends an earlier one.
    """

    mode: Literal["pin", "freeze", "release"]
    issued_at: float
    schedule: dict[int, int] = {}


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """A replica introduces itself, again whenever a reply asks for it.

    incarnation: grows with every engine that takes the replica's id (its start in nanoseconds).
    sequence:   reports count up from here. cells: the counters now; only what comes later is learnt from.
    block_width: rows of its drafter's block; counts of different widths are never added up.
    draft_lens: the declared lengths K, ascending from 0.
    static_schedule: the configured one. version, schedule: those in force.
    options: as this replica's config says; those of the replica that started last count.
    """

    protocol: int
    replica_id: str
    incarnation: int
    sequence: int
    accelerator: str
    block_width: int
    draft_lens: tuple[int, ...]
    max_num_seqs: int
    static_schedule: dict[int, int]
    version: Version
    schedule: dict[int, int]
    step_times: tuple[StepTime, ...] = ()
    cells: tuple[CellCounts, ...] = ()
    order: Order | None = None
    options: ControlOptions = msgspec.field(default_factory=ControlOptions)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a registered replica and the version of the schedule in force there.

    cells: at least those that differ from the replica's last answered report; after a registration, all.
    draft_len: K of its last step, for operators. num_running, num_ended: requests in its batch, and those that have
        ended since its engine's start; 0 and 0: not known.
    """

    replica_id: str
    incarnation: int
    sequence: int
    version: Version
    gate_disabled: bool
    cells: tuple[CellCounts, ...]
    draft_len: int = 0
    num_running: int = 0
    num_ended: int = 0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a registration or a report.

    interval_s:    when to report again.
    must_register: the controller does not know this replica.
    version, schedule: what should be in force, when that differs from what the replica said.
    order:         the operator's latest, for the replica to keep.
    """

    interval_s: float
    must_register: bool = False
    version: Version | None = None
    schedule: dict[int, int] | None = None
    order: Order | None = None


def cell_counts(snapshot: CounterSnapshot) -> tuple[CellCounts, ...]:
    """The part of an engine's counters that the controller learns from."""
    return tuple(
        CellCounts(
            batch_bucket=cell.batch_bucket,
            draft_len=cell.draft_len,
            steps=cell.steps,
            rows=cell.rows,
            decode_steps=cell.decode_steps,
            decode_time_s=cell.decode_time_s,
            at_risk=_sum(cell.at_risk, cell.shadow_at_risk),
            accepted=_sum(cell.accepted, cell.shadow_accepted),
        )
        for cell in snapshot.cells
    )


def _sum(verified: tuple[int, ...], shadow: tuple[int, ...]) -> tuple[int, ...]:
    """By position; either may be the longer one."""
    return tuple(map(sum, itertools.zip_longest(verified, shadow, fillvalue=0)))


def report_interval_s(num_replicas: int) -> float:
    """Seconds between two reports of a replica, such that the controller gets at most about 250 a second."""
    return min(max(num_replicas / 250, 1.0), 10.0)
