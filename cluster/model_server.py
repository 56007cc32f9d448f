"""`ModelServer`: the Serve deployment that is the HTTP ingress and the owner of one engine at once (one hop).

It wires: engine, admission, metrics, the OpenAI app. It decides nothing about requests or tokens. When the engine
fails, the replica refuses what has no first token yet, ends started streams with an error event, and ends itself, so
that Serve makes a new one with a new placement group.
"""

import asyncio
import logging
import os
import time
from typing import Any

from fastapi import FastAPI
from ray import serve

from cluster.admission import Admission, ReplicaState
from cluster.config import ClusterConfig
from cluster.live_settings import LiveSettings
from cluster.metrics import ServeMetrics
from cluster.openai.api import create_app
from cluster.openai.params import SamplingDefaults
from cluster.openai.service import OpenAIService, ServedModel
from cluster.replica_engine import EngineStarter, start_engine

logger = logging.getLogger(__name__)

EXIT_GRACE_S = 1.0  # between the engine's death and the replica's: open requests get their answer
HEALTH_TIMEOUT_S = 5.0  # a round trip through the engine loop is at most one step


@serve.ingress()
class ModelServer:
    """One replica.

    Args:
        config: a `ClusterConfig` in plain values, paths resolved.
        starter: makes the engine; the default starts the rank actors.
    """

    async def __init__(self, config: dict[str, Any], starter: EngineStarter = start_engine) -> None:  # type: ignore[misc]
        self._config = ClusterConfig.model_validate(config)
        deployment = self._config.deployment
        self._admission = Admission(max_num_seqs=self._config.engine.max_num_seqs, queue_limit=deployment.queue_limit)
        self._metrics = ServeMetrics(
            model_name=self._config.served_name,
            replica=serve.get_replica_context().replica_id.unique_id,
            admission=self._admission,
        )
        self._engine = await starter(self._config)
        self._live = LiveSettings(engine=self._engine, admission=self._admission)
        self._is_dead = False
        self._watch = asyncio.get_running_loop().create_task(self._end_with_engine())
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
            ),
            admission=self._admission,
            observer=self._metrics,
            defaults=SamplingDefaults.from_model_dir(self._engine.model_dir),
        )
        return create_app(
            service,
            max_body_bytes=self._config.http.max_body_bytes,
            health_timeout_s=HEALTH_TIMEOUT_S,
            render_metrics=lambda: self._metrics.render(self._engine.group.client),
            echoes_request_id=False,  # Serve's proxy does
        )

    async def reconfigure(self, live: dict[str, Any]) -> None:
        """Take over what changes without a restart: queue_limit and draft_len_schedule (null: the engine's own).

        Raises:
            ValueError: the engine refuses the schedule.
        """
        await self._live.apply(live)

    async def check_health(self) -> None:
        """Called by Serve. Raises if the engine is dead or its loop does not answer."""
        if self._is_dead:
            raise RuntimeError("the engine is dead; its root cause is in this replica's log")
        async with asyncio.timeout(self._config.deployment.stall_timeout_s):
            await self._engine.group.client.check_health()

    async def _end_with_engine(self) -> None:
        """Wait for the engine's death, let open requests be answered, then end this process."""
        await self._engine.group.wait_dead()  # the group has logged the cause
        self._is_dead = True
        self._admission.state = ReplicaState.DEAD
        logger.warning("This replica ends, as its engine is dead.")
        await asyncio.sleep(EXIT_GRACE_S)
        os._exit(1)

    async def __del__(self) -> None:
        """Called by Serve after the last request, or in place of it once `drain_s` is over."""
        admission = getattr(self, "_admission", None)
        if admission is not None:
            admission.state = ReplicaState.DRAINING
        watch = getattr(self, "_watch", None)
        if watch is not None:
            watch.cancel()
        engine = getattr(self, "_engine", None)
        if engine is not None:
            await engine.group.close()
