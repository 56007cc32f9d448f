"""A run's replicas and their controller, with the way between them: late, lost and repeated messages, and outages.

The controller is `cluster.control`'s own. Time moves in ticks; what happens between two is seen at the second.
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cluster.control.estimate import ControlState, Push
from cluster.control.messages import PROTOCOL_VERSION, Registration, Reply, Report
from cluster.simulate.fleet import Fleet
from cluster.simulate.scenario import Network, Scenario
from cluster.simulate.traffic import replica_groups
from engine.speculative.counters import StepTime
from engine.speculative.schedule import ScheduleAck, Version

TICK_S = 0.25
_DECIDE_EVERY_S = 0.5
_FALLBACK_S = 60.0  # without an answer, after which a replica goes back to its configured schedule
_STARTUP_DEVIATION = 0.02  # of the step times measured at start-up


@dataclass(kw_only=True, slots=True)
class _Replica:
    """The replica's side. sequence: of its last report. report_at: when the next one is due."""

    lane: int
    replica_id: str
    joins_s: float
    leaves_s: float
    rng: np.random.Generator
    sequence: int = 0
    version: Version = (0, 0)
    schedule: dict[int, int]
    registered: bool = False
    interval_s: float = 1.0
    report_at: float = 0.0
    heard_at: float = 0.0


class ControlLink:
    """Drives one `ControlState` for some lanes of a fleet. network None: no delays, no losses."""

    def __init__(self, fleet: Fleet, lanes: list[int], *, seed: int, network: Network | None) -> None:
        self._fleet = fleet
        self._scenario: Scenario = fleet.lanes.world.scenario
        self._network = network or Network()
        self._rng = np.random.default_rng([seed, 2, lanes[0] % fleet.lanes.num_replicas])
        groups = replica_groups(self._scenario)
        self._replicas: dict[str, _Replica] = {}
        for lane in lanes:
            group = groups[lane % fleet.lanes.num_replicas]
            name = f"replica-{lane % fleet.lanes.num_replicas}"
            self._replicas[name] = _Replica(
                lane=lane,
                replica_id=name,
                joins_s=group.from_s,
                leaves_s=group.until_s or np.inf,
                rng=np.random.default_rng([seed, 3, lane % fleet.lanes.num_replicas]),
                schedule=dict(self._scenario.configured_schedule),
                report_at=group.from_s,
                heard_at=group.from_s,
            )
        self._state: ControlState | None = ControlState(started_at=0.0)
        self._messages: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._decide_at = 0.0
        self.num_changes = 0
        self.num_pushes = 0

    @property
    def state(self) -> ControlState | None:
        """The controller; None during an outage."""
        return self._state

    def network_heals(self) -> None:
        """From now on nothing is late or lost."""
        self._network = Network()

    def tick(self, now: float) -> float:
        """Everything due by `now`. Returns the time of the next tick."""
        self._outage(now)
        for replica in self._replicas.values():
            self._speak(replica, now)
        self._deliver(now)
        if self._state is not None and now >= self._decide_at:
            self._decide_at = now + _DECIDE_EVERY_S
            for push in self._state.decide(now=now):
                self.num_pushes += 1
                self._send(now, self._network.push_delay_s, self._pushed(push))
            self._deliver(now)
        return now + TICK_S

    def _outage(self, now: float) -> None:
        down = any(outage.from_s <= now < outage.until_s for outage in self._network.controller_down)
        if down and self._state is not None:
            self.num_changes += self._state.num_changes
            self._state = None
        elif not down and self._state is None:
            self._state = ControlState(started_at=now)
            self._decide_at = now

    # ---------------------------------------------------------------------------------------- the replicas' side

    def _speak(self, replica: _Replica, now: float) -> None:
        """A registration or a report, when one is due. A replica that has left and is empty is silent."""
        lanes = self._fleet.lanes
        if now < replica.joins_s or (now >= replica.leaves_s and not lanes.num_rows_L[replica.lane]):
            return
        if now - replica.heard_at > _FALLBACK_S and replica.version > (0, 0):
            epoch, number = replica.version
            self._enforce(replica, (epoch, number + 1), dict(self._scenario.configured_schedule))
            replica.heard_at = now
        if now < replica.report_at:
            return
        replica.report_at = now + replica.interval_s
        cells = self._fleet.tallies.cells(replica.lane)
        if not replica.registered:
            message: Registration | Report = self._registration(replica)
        else:
            replica.sequence += 1
            message = Report(
                replica_id=replica.replica_id,
                incarnation=1,
                sequence=replica.sequence,
                version=replica.version,
                gate_disabled=False,
                cells=cells,
                num_running=int(lanes.num_rows_L[replica.lane]),
                num_ended=int(self._fleet.tallies.finished_L[replica.lane]),
            )
        if replica.rng.random() < self._network.lost:
            return
        copies = 2 if replica.rng.random() < self._network.doubled else 1
        for _ in range(copies):
            late = self._network.report_jitter_s * replica.rng.random()
            self._send(now + late, self._network.report_delay_s, self._heard(message))

    def _registration(self, replica: _Replica) -> Registration:
        lanes = self._fleet.lanes
        seconds = lanes.step_s_AIJ[lanes.machine_L[replica.lane]]
        noise = np.exp(_STARTUP_DEVIATION * replica.rng.standard_normal(seconds.shape))
        table = lanes.world.tables[replica.lane % lanes.num_replicas]
        draft_lens = self._scenario.draft_lens
        return Registration(
            protocol=PROTOCOL_VERSION,
            replica_id=replica.replica_id,
            incarnation=1,
            sequence=replica.sequence,
            accelerator=table.accelerator,
            block_width=self._scenario.engine.drafter_block,
            draft_lens=draft_lens,
            max_num_seqs=self._scenario.engine.max_num_seqs,
            static_schedule=dict(self._scenario.configured_schedule),
            version=replica.version,
            schedule=replica.schedule,
            step_times=tuple(
                StepTime(
                    batch_bucket=bucket,
                    draft_len=draft_len,
                    seconds=float(seconds[i, j] * noise[i, j]),  # contexts are short then
                )
                for i, bucket in enumerate(lanes.buckets)
                for j, draft_len in enumerate(draft_lens)
            ),
            cells=self._fleet.tallies.cells(replica.lane),
        )

    def _answered(self, replica: _Replica, reply: Reply) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            replica.heard_at = now
            replica.registered = not reply.must_register
            replica.interval_s = reply.interval_s
            if reply.must_register:
                replica.report_at = now
            if reply.version is not None and reply.schedule is not None:
                self._enforce(replica, reply.version, reply.schedule)

        return arrive

    def _enforce(self, replica: _Replica, version: Version, schedule: dict[int, int]) -> ScheduleAck:
        applied = version > replica.version
        if applied:
            replica.version, replica.schedule = version, dict(schedule)
            self._fleet.lanes.set_schedule(replica.lane, schedule)
        return ScheduleAck(applied=applied, version=replica.version, schedule=replica.schedule)

    # ---------------------------------------------------------------------------------------- the controller's side

    def _heard(self, message: Registration | Report) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            if self._state is None:
                return
            replica = self._replicas[message.replica_id]
            if isinstance(message, Registration):
                reply = self._state.register(message, now=now)
            else:
                reply = self._state.report(message, now=now)
            self._send(now, self._network.report_delay_s, self._answered(replica, reply))

        return arrive

    def _pushed(self, push: Push) -> Callable[[float], None]:
        def arrive(now: float) -> None:
            replica = self._replicas[push.replica_id]
            ack = self._enforce(replica, push.version, push.schedule)
            if self._state is not None:
                self._state.acknowledged(replica.replica_id, ack)

        return arrive

    # ---------------------------------------------------------------------------------------- the way between

    def _send(self, now: float, mean_delay_s: float, arrive: Callable[[float], None]) -> None:
        delay = self._rng.exponential(mean_delay_s) if mean_delay_s else 0.0
        heapq.heappush(self._messages, (now + delay, next(self._numbers), arrive))

    def _deliver(self, now: float) -> None:
        while self._messages and self._messages[0][0] <= now:
            _, _, arrive = heapq.heappop(self._messages)
            arrive(now)


class Controls:
    """Several links of one run: every replica its own controller."""

    def __init__(self, links: list[ControlLink]) -> None:
        self.links = links

    def tick(self, now: float) -> float:
        """See `fleet.Control`."""
        return min(link.tick(now) for link in self.links)

    @property
    def num_changes(self) -> int:
        """Changes of K, of all bounds and controllers."""
        return sum(link.num_changes + (link.state.num_changes if link.state else 0) for link in self.links)
