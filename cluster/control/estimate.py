"""`ControlState`: all that a controller knows and decides, free of Ray, with the clock passed in.

The actor drives it with messages of real replicas, the simulator with those of simulated ones. `now` is any clock in
seconds that does not run backwards.

Replicas of one accelerator type share one schedule (a line). A replica whose traffic demonstrably differs gets a
schedule of its own, decided from its own counts with the cluster's as the prior, until the difference is gone. "The
cluster's" are those of all replicas whose drafters run blocks of the same width (`Learnt`).
"""

import math
from collections.abc import Collection, Mapping

import msgspec

from cluster.control import policy
from cluster.control.counts import ReplicaCounts
from cluster.control.hazards import Belief
from cluster.control.learnt import SETTLING_INTERVALS, Learnt
from cluster.control.members import Line, LineKey, Push, Replica, check_registration, line_key, plain, schedule_entries
from cluster.control.messages import (
    ControlOptions,
    Order,
    Registration,
    Reply,
    Report,
    report_interval_s,
)
from cluster.control.own_traffic import OwnTraffic
from cluster.control.policy import Schedule, Setting, Verdict
from engine.speculative.schedule import ScheduleAck, Version, check_schedule

_MISSED_REPORTS = 10  # after which a replica is forgotten
_GROUPS = 4  # of replicas, whose reports are told apart in the log
_PIN_ENTRIES = 1024  # every controller and replica keeps them, and every reply tells them
_LINE_KEPT_S = 600.0  # without a replica: one that returns goes on with its schedule and step times


class ControlState:
    """See the module. All methods return at once and raise ValueError for messages that cannot be right."""

    def __init__(self, *, started_at: float) -> None:
        self.options = ControlOptions()
        self.replicas: dict[str, Replica] = {}
        self.lines: dict[LineKey, Line] = {}
        self.learnt: dict[int, Learnt] = {}  # by the width of the drafters' blocks
        self.epoch: int | None = None  # None: still listening which epochs there were
        self.is_superseded = False  # a later controller is at work
        self.order: Order | None = None
        self.num_changes = 0
        self.idle_since: float | None = started_at
        self._first_at: float | None = None
        self._greatest_seen: Version = (0, 0)
        self._num_versions = 0
        self._newest_incarnation = 0
        self._settled_at = started_at

    @property
    def interval_s(self) -> float:
        """Seconds between two reports of a replica."""
        return report_interval_s(len(self.replicas))

    @property
    def live_lines(self) -> dict[LineKey, Line]:
        """The lines that have replicas; those that a rollout has left wait, and nobody should hear of them."""
        followed = {id(replica.line) for replica in self.replicas.values()}
        return {key: line for key, line in self.lines.items() if id(line) in followed}

    @property
    def beliefs(self) -> dict[int, Belief]:
        """What is believed of the replicas there are, by the width of the drafters' blocks."""
        live = {replica.registration.block_width for replica in self.replicas.values()}
        found = {width: learnt.belief for width, learnt in self.learnt.items() if width in live}
        return {width: belief for width, belief in found.items() if belief is not None}

    @property
    def held(self) -> Order | None:
        """The operator's order in force."""
        return None if self.order is None or self.order.mode == "release" else self.order

    # ---------------------------------------------------------------------------------------------------- messages

    def register(self, registration: Registration, *, now: float) -> Reply:
        """Takes a replica in, or takes note that it still lives.

        Raises:
            ValueError: another protocol version, or facts that contradict each other.
        """
        check_registration(registration)
        known = self.replicas.get(registration.replica_id)
        if known is not None and registration.incarnation < known.counts.incarnation:
            return Reply(interval_s=self.interval_s)
        self._see_version(registration.version)
        self.see_order(registration.order)
        if registration.incarnation >= self._newest_incarnation:
            self._newest_incarnation, self.options = registration.incarnation, registration.options
        line = self._join_line(registration, now)
        if known is not None and registration.incarnation == known.counts.incarnation:
            known.registration, known.line = registration, line
            known.seen_at, known.version = now, registration.version
            known.target = (0, 0)  # it may have fallen back to its own schedule meanwhile
        else:
            line.times.measured(registration.step_times)
            known = self.replicas[registration.replica_id] = Replica(
                registration=registration,
                line=line,
                counts=ReplicaCounts(
                    incarnation=registration.incarnation,
                    sequence=registration.sequence,
                    cells=registration.cells,
                    most_drafts=registration.draft_lens[-1],
                ),
                traffic=OwnTraffic(width=registration.draft_lens[-1]),
                group=len(self.replicas) % _GROUPS,
                seen_at=now,
                version=registration.version,
            )
        self.idle_since = None
        if self._first_at is None:
            self._first_at = now
        self._settle_epoch(now)
        self._set_targets([known])
        return self._reply(known)

    def report(self, report: Report, *, now: float) -> Reply:
        """Learns from a replica's counters. Repeated, late and lost reports make no difference.

        Raises:
            ValueError: counts that shrank or cannot be.
        """
        replica = self.replicas.get(report.replica_id)
        if replica is None or report.incarnation > replica.counts.incarnation:
            return Reply(interval_s=self.interval_s, must_register=True)
        if report.incarnation < replica.counts.incarnation:
            return Reply(interval_s=self.interval_s)
        self._see_version(report.version)
        is_new = report.sequence > replica.counts.sequence
        new = replica.counts.absorb(incarnation=report.incarnation, sequence=report.sequence, cells=report.cells)
        replica.seen_at = max(replica.seen_at, now)
        replica.version = max(replica.version, report.version)
        if is_new:
            replica.latest = report
        if replica.num_ended is None:
            replica.num_ended = report.num_ended
        if new.has_rows:
            num_ended, replica.num_ended = report.num_ended - replica.num_ended, report.num_ended
            line = replica.line
            traffic_s = line.learnt.clock.traffic_at(now, longest_gap_s=2 * self.interval_s)
            counts, origins = new.counts(line.learnt.log.width)
            line.learnt.add(traffic_s, counts, origins=origins, group=replica.group, num_ended=num_ended)
            replica.traffic.add(traffic_s, *counts)
            line.times.served(new.programs, now=traffic_s)
            line.serve(new.programs, now)
        self._settle_epoch(now)
        return self._reply(replica)

    def leave(self, replica_id: str, *, incarnation: int, now: float) -> None:
        """A replica ends."""
        replica = self.replicas.get(replica_id)
        if replica is not None and replica.counts.incarnation == incarnation:
            del self.replicas[replica_id]
            self._note_idleness(now)

    def acknowledged(self, replica_id: str, ack: ScheduleAck) -> None:
        """A replica's answer to a push."""
        replica = self.replicas.get(replica_id)
        self._see_version(ack.version)
        if replica is not None:
            replica.version = max(replica.version, ack.version)

    def give(self, order: Order, *, now: float) -> list[Push]:
        """An operator's order; the pushes it leads to. It follows the one in force, whatever the operator's clock says.

        Raises:
            ValueError: a pinned schedule that cannot be.
        """
        if not math.isfinite(order.issued_at):
            raise ValueError(f"issued_at: must be a finite number of seconds, got {order.issued_at}")
        if order.mode == "pin":
            if len(order.schedule) > _PIN_ENTRIES:
                raise ValueError(
                    f"schedule: a pin has at most {_PIN_ENTRIES} entries, got {len(order.schedule)}; name only the "
                    "batch sizes up to which another draft length holds"
                )
            longest = max(order.schedule.values(), default=0)  # without a replica no limit is known
            for limit in [line.draft_lens[-1] for line in self.live_lines.values()] or [longest]:
                check_schedule(order.schedule, max_draft_len=limit)
        if self.order is not None and order.issued_at <= self.order.issued_at:
            order = msgspec.structs.replace(order, issued_at=math.nextafter(self.order.issued_at, math.inf))
        self.see_order(order)
        return self.decide(now=now)

    # ---------------------------------------------------------------------------------------------------- decisions

    def decide(self, *, now: float) -> list[Push]:
        """Forgets replicas that are gone, learns, decides, and says who should get what (all that lag behind)."""
        self._forget_gone(now)
        self._settle_epoch(now)
        if self.epoch is None or self.is_superseded:
            return []
        self._learn(now)
        if self.held is None:
            for line in self.live_lines.values():
                belief = line.learnt.belief
                if belief is not None and now >= line.learnt.settled_at:
                    line.verdicts = self._weigh(line, line.schedule, belief, now)
                    line.schedule = self._take(line, line.schedule, line.verdicts, now)
            for replica in self.replicas.values():
                belief = replica.line.learnt.belief
                if belief is not None and now >= replica.line.learnt.settled_at:
                    self._correct(replica, belief, now)
        self._set_targets(self.replicas.values())
        return [
            Push(replica_id=replica_id, version=replica.target, schedule=replica.target_schedule)
            for replica_id, replica in self.replicas.items()
            if replica.version < replica.target
        ]

    def _wanted(self, replica: Replica, plains: dict[int, dict[int, int]]) -> dict[int, int]:
        """The schedule a replica should have: the pinned one, its own, or its line's. plains: those known in plain, by
        their identity, of a pinned one by its longest draft."""
        if self.held is not None and self.held.mode == "pin":
            limit = replica.registration.draft_lens[-1]  # `give` checked it for the replicas of its time
            if limit not in plains:
                entries = sorted(self.held.schedule.items())
                plains[limit] = {bound: min(draft_len, limit) for bound, draft_len in entries}
            return plains[limit]
        schedule = replica.line.schedule if replica.own is None else replica.own
        if id(schedule) not in plains:
            plains[id(schedule)] = plain(schedule)
        return plains[id(schedule)]

    def _learn(self, now: float) -> None:
        for learnt in self.learnt.values():
            replicas = [replica for replica in self.replicas.values() if replica.line.learnt is learnt]
            num_running = sum(replica.latest.num_running for replica in replicas if replica.latest is not None)
            if learnt.learn(num_running=num_running, now=now, interval_s=self.interval_s):
                for replica in replicas:
                    replica.traffic.changed()

    def _correct(self, replica: Replica, cluster: Belief, now: float) -> None:
        """Lets a replica whose traffic is its own have a line of its own, and takes that back. cluster: its belief."""
        line = replica.line
        belief = replica.traffic.believe(line.learnt.clock.seconds, cluster)
        if not (self.options.corrects_replicas and replica.traffic.is_own):
            replica.own, replica.verdicts = None, {}
            return
        schedule = line.schedule if replica.own is None else replica.own
        replica.verdicts = self._weigh(line, schedule, belief, now)
        replica.own = self._take(line, schedule, replica.verdicts, now)

    def _weigh(self, line: Line, schedule: Schedule, belief: Belief, now: float) -> dict[int, Verdict]:
        limit = line.max_num_seqs
        return policy.decide(
            schedule,
            draft_lens=line.draft_lens,
            belief=belief,
            step_seconds=lambda rows, draft_len: line.times.seconds(rows, draft_len, max_num_seqs=limit),
            step_deviation=lambda rows, draft_len: line.times.deviation(rows, draft_len, max_num_seqs=limit),
            now=now,
            rules=self.options.rules,
            idle=line.idle(schedule, now),
            fresh=line.fresh(schedule, now - SETTLING_INTERVALS * self.interval_s),
            same_since=line.learnt.same_since,
        )

    def _take(self, line: Line, schedule: Schedule, verdicts: Mapping[int, Verdict], now: float) -> Schedule:
        self.num_changes += sum(verdict.changes for verdict in verdicts.values())
        idle, same_since = line.idle(schedule, now), line.learnt.same_since
        return policy.apply(schedule, verdicts, now=now, idle=idle, same_since=same_since)

    # ---------------------------------------------------------------------------------------------------- versions

    def _settle_epoch(self, now: float) -> None:
        if self.epoch is None and self._first_at is not None and now - self._first_at >= 2 * self.interval_s:
            self.epoch = self._greatest_seen[0] + 1
            self._settled_at = max(self._settled_at, now + SETTLING_INTERVALS * self.interval_s)
            for learnt in self.learnt.values():
                learnt.settled_at = self._settled_at
            self._adopt_schedules()

    def _adopt_schedules(self) -> None:
        """Goes on from what an earlier controller left in force: of each line, the schedule that most replicas have.

        The newest may be one replica's own, or the configured one that it fell back to.
        """
        for line in self.lines.values():
            members = [replica.registration for replica in self.replicas.values() if replica.line is line]
            versions: dict[tuple[tuple[int, int], ...], list[Version]] = {}
            for member in members:
                if member.version[0] > 0:
                    entries = schedule_entries(member.schedule, line.max_num_seqs, line.draft_lens)
                    versions.setdefault(tuple(entries.items()), []).append(member.version)
            if versions:
                adopted = max(versions, key=lambda entries: (len(versions[entries]), max(versions[entries])))
                line.schedule = {
                    bound: Setting(draft_len=draft_len, reason="taken over from an earlier controller")
                    for bound, draft_len in adopted
                }

    def _see_version(self, version: Version) -> None:
        self._greatest_seen = max(self._greatest_seen, version)
        if self.epoch is not None:
            self.is_superseded |= version[0] > self.epoch
            if version[0] == self.epoch:  # a replica that fell back counted on by itself
                self._num_versions = max(self._num_versions, version[1])

    def see_order(self, order: Order | None) -> None:
        """An order that was given before: it counts if it is the latest."""
        if order is None or (self.order is not None and self.order.issued_at >= order.issued_at):
            return
        self.order = order

    def _set_targets(self, replicas: Collection[Replica]) -> None:
        """Gives a version to every schedule that these should have from now on; equal schedules share one."""
        if self.epoch is None:
            return
        plains: dict[int, dict[int, int]] = {}  # of schedules that many share
        lagging = [
            (replica, wanted)
            for replica in replicas
            if (wanted := self._wanted(replica, plains)) != replica.target_schedule or replica.target == (0, 0)
        ]
        if not lagging:
            return
        newest: dict[tuple[tuple[int, int], ...], Version] = {}
        for replica in self.replicas.values():
            key = tuple(replica.target_schedule.items())
            newest[key] = max(newest.get(key, (0, 0)), replica.target)
        for replica, wanted in lagging:
            key = tuple(wanted.items())
            version = newest.get(key, (0, 0))
            if version <= max(replica.version, replica.target):
                version = newest[key] = self._new_version()
            replica.target, replica.target_schedule = version, wanted

    def _new_version(self) -> Version:
        assert self.epoch is not None
        self._num_versions += 1
        return (self.epoch, self._num_versions)

    def _reply(self, replica: Replica) -> Reply:
        if self.epoch is None or self.is_superseded or replica.target <= replica.version:
            return Reply(interval_s=self.interval_s, order=self.order)
        return Reply(
            interval_s=self.interval_s, version=replica.target, schedule=replica.target_schedule, order=self.order
        )

    # ---------------------------------------------------------------------------------------------------- membership

    def _join_line(self, registration: Registration, now: float) -> Line:
        width = registration.block_width
        if width not in self.learnt:
            settled_at = self._settled_at if self.epoch is None else now + SETTLING_INTERVALS * self.interval_s
            self.learnt[width] = Learnt(settled_at=settled_at)
        self.learnt[width].widen(registration.draft_lens[-1])
        key = line_key(registration)
        if key not in self.lines:
            entries = schedule_entries(registration.static_schedule, registration.max_num_seqs, registration.draft_lens)
            self.lines[key] = Line(
                schedule={bound: Setting(draft_len=draft_len) for bound, draft_len in entries.items()},
                draft_lens=registration.draft_lens,
                max_num_seqs=registration.max_num_seqs,
                learnt=self.learnt[width],
            )
        return self.lines[key]

    def _forget_gone(self, now: float) -> None:
        patience_s = _MISSED_REPORTS * self.interval_s
        for replica_id in [key for key, replica in self.replicas.items() if now - replica.seen_at > patience_s]:
            del self.replicas[replica_id]
        live = self.live_lines
        for key, line in list(self.lines.items()):
            if key in live:
                line.seen_at = now
            elif now - line.seen_at > _LINE_KEPT_S:
                del self.lines[key]
        widths = {key.block_width for key in self.lines}
        self.learnt = {width: learnt for width, learnt in self.learnt.items() if width in widths}
        self._note_idleness(now)

    def _note_idleness(self, now: float) -> None:
        if not self.replicas and self.idle_since is None:
            self.idle_since = now
