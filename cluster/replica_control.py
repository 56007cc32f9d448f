"""`ReplicaControl`: keeps a replica in touch with the speculation controller, if its config wants one."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from ray.serve.context import ReplicaContext

from cluster.config import ClusterConfig
from cluster.control.controller import find_or_make_controller
from cluster.control.messages import ControlOptions
from cluster.control.policy import Rules
from cluster.control.reporter import ReplicaFacts, Reporter
from cluster.live_settings import LiveSettings
from cluster.replica_engine import ReplicaEngine


class ReplicaControl:
    """The reporter of one replica and its task; nothing at all with `controller.enabled: false`.

    Nothing is reported before `start`: what a controller hears first must be the configured schedule, not the engine's
    default.
    """

    def __init__(
        self, *, config: ClusterConfig, engine: ReplicaEngine, live: LiveSettings, replica: ReplicaContext
    ) -> None:
        settings, control = config.controller, engine.control
        self._reporter: Reporter | None = None
        self._task: asyncio.Task[None] | None = None
        if not settings.enabled or control is None:
            return
        options = ControlOptions(
            rules=Rules(margin=settings.margin, dwell_s=settings.dwell_s), corrects_replicas=settings.per_replica
        )
        # A thread of its own, at most one: a head that cannot be reached holds it, and the loop's pool serves requests.
        self._connector = ThreadPoolExecutor(max_workers=1, thread_name_prefix="find-controller")
        loop = asyncio.get_running_loop()
        self._reporter = Reporter(
            facts=ReplicaFacts(
                replica_id=replica.replica_id.unique_id,
                accelerator=control.accelerator,
                block_width=control.block_width,
                draft_lens=control.draft_lens,
                max_num_seqs=config.engine.max_num_seqs,
                step_times=control.step_times,
                options=options,
            ),
            engine=engine.group.client,
            rank0=control.rank0,
            connect=lambda: loop.run_in_executor(
                self._connector, find_or_make_controller, replica.app_name, replica.deployment
            ),
            static_schedule=lambda: live.schedule,
            fallback_s=settings.fallback_s,
        )

    def start(self) -> None:
        """Begins to report, once the configured schedule is known; later calls change nothing."""
        if self._reporter is not None and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._reporter.run(), name="reporter")

    @property
    def is_connected(self) -> bool | None:
        """Whether the controller answered last; None if there is none to ask."""
        return None if self._reporter is None else self._reporter.is_connected

    async def stop(self) -> None:
        """Ends the reports and says so to the controller; idempotent."""
        if self._reporter is not None:
            if self._task is not None:
                self._task.cancel()
            self._connector.shutdown(wait=False, cancel_futures=True)
            await self._reporter.leave()
