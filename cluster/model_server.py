"""`ModelServer`: the Serve deployment that is the HTTP ingress and the owner of one engine at once (one hop).

It wires: engine, admission, metrics, the OpenAI app. It decides nothing about requests or tokens. When the engine
fails, the replica refuses what has no first token yet, ends started streams with an error event, and ends itself, so
that Serve makes a new one with a new placement group. When it is
stopped, it ends what outlasts `drain_s` in the same way.
"""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster import death_notes
from cluster.admission import Admission, ReplicaState
from cluster.config import ClusterConfig
from cluster.drain import Drain, StopNotice
from cluster.live_settings import LiveSettings
from cluster.metrics import ServeMetrics
from cluster.openai.api import create_app
from cluster.openai.params import SamplingDefaults
from cluster.openai.service import OpenAIService, ServedModel
from cluster.ray_metrics import RayMetrics
from cluster.replica_control import ReplicaControl
from cluster.replica_engine import EngineStarter, start_engine
from cluster.replica_logging import log_with_serve
from engine.heap import freeze_heap

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0  # between the engine's death and the replica's: open requests get their answer
HEALTH_PERIOD_S = 2.0  # between two of Serve's health checks
HEALTH_TIMEOUT_S = 5.0  # a round trip through the engine loop is at most one step


@serve.ingress()
class ModelServer:
    """One replica.

    Args:
        config: a `ClusterConfig` in plain values, paths resolved.
        starter: makes the engine; the default starts the rank actors.
    """

    async def __init__(self, config: dict[str, Any], starter: EngineStarter = start_engine) -> None:  # type: ignore[misc]
        log_with_serve()
        self._config = ClusterConfig.model_validate(config)
        deployment = self._config.deployment
        self._admission = Admission(max_num_seqs=self._config.engine.max_num_seqs, queue_limit=deployment.queue_limit)
        self._metrics = ServeMetrics(
            model_name=self._config.served_name,
            replica=serve.get_replica_context().replica_id.unique_id,
            admission=self._admission,
        )
        self._ray_metrics = RayMetrics(
            model_name=self._config.served_name, replica=serve.get_replica_context().replica_id.unique_id
        )
        self._engine = await starter(self._config)
        self._live = LiveSettings(engine=self._engine, admission=self._admission, drain_s=deployment.drain_s)
        self._is_dead = False
        self._drain = Drain(admission=self._admission, close_engine=self._engine.group.close)
        context = serve.get_replica_context()
        self._stop_notice = StopNotice(
            period_s=HEALTH_PERIOD_S, is_stopping=lambda: serve_stops_replicas(context.app_name, context.deployment)
        )
        self._control = ReplicaControl(config=self._config, engine=self._engine, live=self._live, replica=context)
        self._watches = (
            asyncio.create_task(self._end_with_engine(), name="engine-watch"),
            asyncio.create_task(self._end_with_notice(), name="stop-watch"),
            asyncio.create_task(self._ray_metrics.run(self._engine.group.client), name="ray-metrics"),
        )
        self._admission.state = ReplicaState.READY

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """The ASGI app; Serve calls this once, after the constructor."""
        service = OpenAIService(
            engine=self._engine.group.client,
            tokenizer=self._engine.tokenizer,
            model=ServedModel(
                name=self._config.served_name,
                root=self._config.model.source,
                max_model_len=self._engine.max_model_len,
                vocab_size=self._engine.vocab_size,
                max_draft_len=self._engine.max_draft_len,
                created=int(time.time()),
                fabrication=self._config.fabrication,
            ),
            admission=self._admission,
            observer=self._metrics,
            defaults=SamplingDefaults.from_model_dir(self._engine.model_dir).within(
                has_penalty=self._engine.has_penalty,
                has_top_k=self._engine.has_top_k,
                has_top_p=self._engine.has_top_p,
            ),
        )
        app = create_app(
            service,
            max_body_bytes=self._config.http.max_body_bytes,
            health_timeout_s=HEALTH_TIMEOUT_S,
            render_metrics=lambda: self._metrics.render(
                self._engine.group.client, is_controller_connected=self._control.is_connected
            ),
            echoes_request_id=False,  # Serve's proxy does
        )
        freeze_heap()
        return app

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Take over what changes without a restart: queue_limit, drain_s, draft_len_schedule (null: the engine's own).

        Raises:
            ValueError: the engine refuses the schedule.
        """
        await self._live.apply(live)
        self._control.start()  # not before: the constructor's config lacks the schedule

    async def check_health(self) -> None:
        """Called by Serve. Raises if the engine is dead or its loop does not answer."""
        with self._stop_notice.health_check():
            if self._is_dead:
                raise RuntimeError("the engine is dead; its root cause is in this replica's log")
            async with asyncio.timeout(self._config.deployment.stall_timeout_s):
                await self._engine.group.client.check_health()

    async def _end_with_engine(self) -> None:
        """Wait for the engine's death, let open requests be answered, then end this process."""
        cause = await self._engine.group.wait_dead()  # the group has logged it
        self._is_dead = True
        self._admission.state = ReplicaState.DEAD
        logger.warning("This replica ends, as its engine is dead.")
        context = serve.get_replica_context()
        note = asyncio.to_thread(death_notes.leave, context.app_name, context.rank.rank, cause)
        await asyncio.wait([asyncio.create_task(note)], timeout=EXIT_GRACE_S / 2)  # without a head nobody reads it
        await asyncio.sleep(EXIT_GRACE_S)
        os._exit(1)

    async def drain(self, limit_s: float) -> int:
        """Stop the service, as `dflash serve` does before it ends Ray: refuse new requests, give open ones `limit_s`.

        Returns:
            The number of requests that did not end in time and got an error instead. The engine is gone afterwards.
        """
        num_cut = await self._drain.run(limit_s)
        await self._control.stop()
        if num_cut:
            logger.warning("%d requests did not end in time and were ended with an error.", num_cut)
        return num_cut

    async def _end_with_notice(self) -> None:
        """When Serve stops this replica, end after `drain_s` what Serve would cut off without a word."""
        begun_s = await self._stop_notice.wait()
        logger.info("Ray Serve stops this replica.")
        await self.drain(max(0.0, self._live.drain_s - begun_s))

    async def __del__(self) -> None:
        """Called by Serve after the last request; also for a replica whose constructor failed."""
        for watch in getattr(self, "_watches", ()):
            watch.cancel()
        drain = getattr(self, "_drain", None)
        if drain is not None:
            await drain.run(0.0)
        control = getattr(self, "_control", None)
        if control is not None:
            await control.stop()


def serve_stops_replicas(app: str, deployment: str) -> bool:
    """Whether Serve is stopping replicas of a deployment, or has forgotten it. Asks the controller and blocks."""
    status = serve.status().applications.get(app)
    if status is None or status.status == "DELETING" or deployment not in status.deployments:
        return True
    states: Mapping[Any, int] = status.deployments[deployment].replica_states  # by ReplicaState, which is a str
    return states.get("STOPPING", 0) > 0
