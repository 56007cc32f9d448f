"""`ReplicaControl`: keeps a replica in touch with the speculation controller, if its config wants one."""

import asyncio

from ray.serve.context import ReplicaContext

from cluster.config import ClusterConfig
from cluster.control.controller import find_or_make_controller
from cluster.control.messages import ControlOptions
from cluster.control.policy import Rules
from cluster.control.reporter import ReplicaFacts, Reporter
from cluster.live_settings import LiveSettings
from cluster.replica_engine import ReplicaEngine


class ReplicaControl:
    """The reporter of one replica and its task; nothing at all with `controller.enabled: false`."""

    def __init__(
        self, *, config: ClusterConfig, engine: ReplicaEngine, live: LiveSettings, replica: ReplicaContext
    ) -> None:
        settings, control = config.controller, engine.control
        self._reporter: Reporter | None = None
        if not settings.enabled or control is None:
            return
        options = ControlOptions(
            rules=Rules(margin=settings.margin, dwell_s=settings.dwell_s), corrects_replicas=settings.per_replica
        )
        self._reporter = Reporter(
            facts=ReplicaFacts(
                replica_id=replica.replica_id.unique_id,
                accelerator=control.accelerator,
                draft_lens=control.draft_lens,
                max_num_seqs=config.engine.max_num_seqs,
                step_times=control.step_times,
                options=options,
            ),
            engine=engine.group.client,
            rank0=control.rank0,
            connect=lambda: asyncio.to_thread(find_or_make_controller, replica.app_name, replica.deployment),
            static_schedule=lambda: live.schedule,
            fallback_s=settings.fallback_s,
        )
        self._task = asyncio.get_running_loop().create_task(self._reporter.run(), name="reporter")

    @property
    def is_connected(self) -> bool | None:
        """Whether the controller answered last; None if there is none to ask."""
        return None if self._reporter is None else self._reporter.is_connected

    async def stop(self) -> None:
        """Ends the reports and says so to the controller; idempotent."""
        if self._reporter is not None:
            self._task.cancel()
            await self._reporter.leave()
