"""`Learnt`: what the counts of replicas whose drafters run blocks of one width say.

Drafts of another width are another drafter's, so their counts are kept apart: while a rollout changes the width, the
replicas of either have a belief of their own, made of nothing else.
"""

import math

import numpy as np

from cluster.control.counts import DifferenceLog, TrafficClock
from cluster.control.hazards import Belief, changed_since
from cluster.control.memory import Memory

SETTLING_INTERVALS = 2.5  # of reports, after a change of traffic: those in between still tell of both kinds
_CHANGE_DEVIATIONS = 4.5


class Learnt:
    """See the module. belief: None while too little is known. clock: of these replicas' traffic.

    settled_at: before it nothing is decided. same_since: since when the traffic has been the same, as far as known.
    """

    def __init__(self, *, settled_at: float) -> None:
        self.belief: Belief | None = None
        self.clock = TrafficClock()
        self.log = DifferenceLog(width=1)
        self.settled_at = settled_at
        self.same_since = -math.inf
        self._memory = Memory(width=1)

    def widen(self, num_positions: int) -> None:
        """Makes room for drafts of so many tokens."""
        self.log.widen(num_positions)
        self._memory.widen(num_positions)
        if self.belief is not None and len(self.belief.hazards) < num_positions:
            self.belief = None  # it says nothing of so long drafts; the next one will

    def add(self, traffic_s: float, counts: np.ndarray, *, origins: np.ndarray, group: int, num_ended: int) -> None:
        """One report's differences, as `DifferenceLog.add` and `Memory.add` take them."""
        self.log.add(time=traffic_s, counts=counts, group=group, num_ended=num_ended)
        self._memory.add(traffic_s, *counts, origins=origins, num_ended=num_ended)

    def learn(self, *, num_running: int, now: float, interval_s: float) -> bool:
        """Makes the belief of now; whether the traffic was found to have changed. num_running: requests now."""
        log, traffic_s = self.log, self.clock.seconds
        if not len(log.times_P):
            return False
        changed_at = changed_since(
            log.times_P,
            log.at_risk_PW,
            log.accepted_PW,
            log.weights(traffic_s),
            deviations=_CHANGE_DEVIATIONS,
            ended_P=log.ended_P,
            num_running=num_running,
        )
        if changed_at is not None:
            log.forget_before(changed_at)
            if now >= self.settled_at:
                self.settled_at = now + SETTLING_INTERVALS * interval_s
                self.same_since = now
            self._memory.changed(changed_at, now=traffic_s)
        belief = self._memory.believe(traffic_s, num_running=num_running)
        if self._memory.starts_anew:
            self.same_since = now
        if self._memory.knows_enough:
            self.belief = belief
        return changed_at is not None or self._memory.starts_anew
