"""`LiveSettings`: what a running replica takes over from a changed config file without a restart."""

import logging
from typing import Any

from cluster.admission import Admission
from cluster.replica_engine import ReplicaEngine

logger = logging.getLogger(__name__)


class LiveSettings:
    """queue_limit, drain_s and draft_len_schedule of one replica.

    Schedules of the file have versions (0, 1), (0, 2), ..; a controller's are newer, as its epoch is at
    least 1.
    """

    def __init__(self, *, engine: ReplicaEngine, admission: Admission, drain_s: float) -> None:
        self._engine = engine
        self._admission = admission
        self.drain_s = drain_s
        self._num_schedules = 0
        self._schedule = engine.static_schedule

    @property
    def schedule(self) -> dict[int, int]:
        """The configured schedule: in force unless a controller's is, and again when that controller is gone."""
        return self._schedule

    async def apply(self, live: dict[str, Any]) -> None:
        """Take over all of `live` or, if the engine refuses the schedule, none of it.

        live: queue_limit, drain_s, and draft_len_schedule (None: the engine's own).

        Raises:
            ValueError: the engine refuses the schedule.
        """
        wanted = live["draft_len_schedule"]
        schedule = self._engine.static_schedule if wanted is None else {int(k): v for k, v in wanted.items()}
        if schedule != self._schedule:
            await self._apply_schedule(schedule)
        self._admission.set_queue_limit(live["queue_limit"])
        self.drain_s = live.get("drain_s", self.drain_s)  # a Serve config file of an older time does not give it

    async def _apply_schedule(self, schedule: dict[int, int]) -> None:
        self._num_schedules += 1
        version = (0, self._num_schedules)
        ack = await self._engine.group.client.apply_schedule(version, schedule)
        self._schedule = schedule  # also where a controller's stays in force: it is what comes after the controller
        if not ack.applied:
            logger.warning(
                "draft_len_schedule %s (version %s) is not in force: the engine keeps the newer version %s, %s, that "
                "a controller set",
                schedule,
                version,
                tuple(ack.version),
                ack.schedule,
            )
            return
        logger.info("draft_len_schedule %s is in force%s", ack.schedule, f" ({ack.rounded})" if ack.rounded else "")
