"""What a controller says of itself to operators: plain messages made from a `ControlState`."""

import msgspec

from cluster.control.estimate import ControlState
from cluster.control.members import Replica
from cluster.control.messages import Order
from cluster.control.policy import Schedule, Verdict
from engine.speculative.schedule import Version


class BoundStatus(msgspec.Struct, frozen=True, kw_only=True):
    """K of one batch-size bound, why it became that, how long ago (None: from the start), and what is weighed now."""

    batch_size: int
    draft_len: int
    reason: str
    changed_s_ago: float | None
    now: str


class LineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The schedule of an accelerator type, or of one replica with a schedule of its own."""

    accelerator: str
    bounds: tuple[BoundStatus, ...]
    num_replicas: int = 0


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """version: in force there; target: what should be. own: its own schedule, if it has one."""

    replica_id: str
    accelerator: str
    version: Version
    target: Version
    schedule: dict[int, int]
    draft_len: int
    num_running: int
    gate_disabled: bool
    seen_s_ago: float
    own: LineStatus | None = None


class ControllerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """order: the operator's, if in force. hazards: by the width of the drafters' blocks; [j-1]: chance that draft j is
    accepted if those before it were."""

    app: str
    deployment: str
    epoch: int | None
    interval_s: float
    num_changes: int
    order: Order | None
    hazards: dict[int, tuple[float, ...]]
    lines: tuple[LineStatus, ...]
    replicas: tuple[ReplicaStatus, ...]


def status_of(state: ControlState, *, app: str, deployment: str, now: float) -> ControllerStatus:
    """Everything, now."""
    return ControllerStatus(
        app=app,
        deployment=deployment,
        epoch=state.epoch,
        interval_s=state.interval_s,
        num_changes=state.num_changes,
        order=state.held,
        hazards={width: tuple(float(hazard) for hazard in belief.hazards) for width, belief in state.beliefs.items()},
        lines=tuple(
            LineStatus(
                accelerator=key.accelerator,
                bounds=_bounds(line.schedule, line.verdicts, now),
                num_replicas=sum(replica.line is line for replica in state.replicas.values()),
            )
            for key, line in state.live_lines.items()
        ),
        replicas=tuple(_replica(replica, now) for replica in state.replicas.values()),
    )


def _replica(replica: Replica, now: float) -> ReplicaStatus:
    latest = replica.latest
    accelerator = replica.registration.accelerator
    own = None
    if replica.own is not None:
        bounds = _bounds(replica.own, replica.verdicts, now)
        own = LineStatus(accelerator=accelerator, bounds=bounds, num_replicas=1)
    return ReplicaStatus(
        replica_id=replica.registration.replica_id,
        accelerator=accelerator,
        version=replica.version,
        target=replica.target,
        schedule=replica.target_schedule or replica.registration.schedule,
        draft_len=0 if latest is None else latest.draft_len,
        num_running=0 if latest is None else latest.num_running,
        gate_disabled=latest is not None and latest.gate_disabled,
        seen_s_ago=now - replica.seen_at,
        own=own,
    )


def _bounds(schedule: Schedule, verdicts: dict[int, Verdict], now: float) -> tuple[BoundStatus, ...]:
    return tuple(
        BoundStatus(
            batch_size=bound,
            draft_len=setting.draft_len,
            reason=setting.reason,
            changed_s_ago=None if setting.since == float("-inf") else now - setting.since,
            now=verdicts[bound].reason if bound in verdicts else "",
        )
        for bound, setting in schedule.items()
    )
