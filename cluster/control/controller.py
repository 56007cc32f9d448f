"""`SpeculationController`: the Ray actor around a `ControlState`, and how replicas find or make it.

Named, detached, on the head node, one per (application, deployment). It owns no request and no engine: replicas go on
without it. Not a deployment actor of Serve's: one that cannot start would keep replicas from starting.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from cluster.control.control_metrics import ControlMetrics
from cluster.control.estimate import ControlState, Push
from cluster.control.messages import PROTOCOL_VERSION, Order, Registration, Report
from cluster.control.status import status_of

logger = logging.getLogger(__name__)

NAMESPACE = "dflash"
_MAX_CONCURRENCY = 20_000  # calls in progress; far above the number of replicas
_TICK_S = 0.5
_PUSH_TIMEOUT_S = 10.0
_LEAVE_AFTER_S = 600.0  # without a replica
_ASK_SERVE_AFTER_S = 5.0  # without a replica, whether the application still exists


class SpeculationController:
    """See the module. Messages are bytes: msgpack of `cluster.control.messages`."""

    async def __init__(self, app: str, deployment: str) -> None:  # type: ignore[misc]
        self._app, self._deployment = app, deployment
        self._state = ControlState(started_at=time.monotonic())
        self._metrics = ControlMetrics(app=app, deployment=deployment)
        self._ranks: dict[str, Any] = {}  # replica -> handle of its rank 0
        self._pushing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._registration = msgspec.msgpack.Decoder(Registration)
        self._report = msgspec.msgpack.Decoder(Report)
        self._encoder = msgspec.msgpack.Encoder()
        self._keep(asyncio.get_running_loop().create_task(self._work()))

    # ---------------------------------------------------------------------------------------------------- replicas

    async def register(self, protocol: int, registration: bytes, rank0: Any) -> bytes:
        """A replica introduces itself and its rank 0 (an actor with `apply_schedule` and `reset_gate`).

        Raises:
            ValueError: it speaks an older protocol, or what it says cannot be. Before a newer one, the controller ends
                and leaves the place to one that speaks it.
        """
        if protocol > PROTOCOL_VERSION:
            self._end(f"a replica speaks protocol {protocol}, this controller {PROTOCOL_VERSION}")
        message = self._registration.decode(registration)
        reply = self._state.register(message, now=time.monotonic())
        self._ranks[message.replica_id] = rank0
        return self._encoder.encode(reply)

    async def report(self, report: bytes) -> bytes:
        """A replica's counters."""
        return self._encoder.encode(self._state.report(self._report.decode(report), now=time.monotonic()))

    async def leave(self, replica_id: str, incarnation: int) -> None:
        """A replica ends."""
        self._state.leave(replica_id, incarnation=incarnation, now=time.monotonic())

    # ---------------------------------------------------------------------------------------------------- operators

    async def give(self, order: bytes) -> None:
        """An operator's order. Raises ValueError for a schedule that cannot be pinned."""
        self._push(self._state.give(msgspec.msgpack.decode(order, type=Order), now=time.monotonic()))

    async def reset_gates(self) -> list[str]:
        """Lets every replica's tripped gate speculate again; the replicas that have done so."""
        self._forget_ranks()
        ranks = dict(self._ranks)
        done = await asyncio.gather(*[self._reset_gate(rank0) for rank0 in ranks.values()])
        return [replica_id for replica_id, is_done in zip(ranks, done, strict=True) if is_done]

    async def status(self) -> bytes:
        """A `ControllerStatus`."""
        return self._encoder.encode(
            status_of(self._state, app=self._app, deployment=self._deployment, now=time.monotonic())
        )

    # ---------------------------------------------------------------------------------------------------- own work

    async def _work(self) -> None:
        """Decides twice a second; leaves when there is nothing to control any more."""
        asked_at = 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            changes = self._state.num_changes
            self._push(self._state.decide(now=now))
            if self._state.num_changes != changes:
                self._log_schedules()
            self._forget_ranks()
            self._metrics.set(self._state)
            if self._state.is_superseded:
                self._end("a controller with a later epoch is at work")
            if self._state.idle_since is not None:
                idle_s = now - self._state.idle_since
                if idle_s > _LEAVE_AFTER_S:
                    self._end(f"no replica for {idle_s:.0f} s")
                if idle_s > _ASK_SERVE_AFTER_S and now - asked_at > _ASK_SERVE_AFTER_S:
                    asked_at = now
                    if await asyncio.to_thread(_is_deleted, self._app):
                        self._end(f"the application {self._app!r} does not exist any more")

    def _push(self, pushes: Iterable[Push]) -> None:
        for push in pushes:
            rank0 = self._ranks.get(push.replica_id)
            if rank0 is not None and push.replica_id not in self._pushing:
                self._pushing.add(push.replica_id)
                self._keep(asyncio.get_running_loop().create_task(self._push_one(rank0, push)))

    async def _push_one(self, rank0: Any, push: Push) -> None:
        """A push that fails is made up for by the reply to the replica's next report."""
        try:
            async with asyncio.timeout(_PUSH_TIMEOUT_S):
                ack = await rank0.apply_schedule.remote(push.version, push.schedule)
            self._state.acknowledged(push.replica_id, ack)
            if ack.rounded:
                logger.warning("replica %s: schedule %s was %s", push.replica_id, push.version, ack.rounded)
        except (RayError, TimeoutError, RuntimeError, ValueError) as error:
            logger.warning("pushing %s to replica %s failed: %s", push.version, push.replica_id, _first_line(error))
        finally:
            self._pushing.discard(push.replica_id)

    async def _reset_gate(self, rank0: Any) -> bool:
        try:
            async with asyncio.timeout(_PUSH_TIMEOUT_S):
                await rank0.reset_gate.remote()
        except (RayError, TimeoutError, RuntimeError) as error:
            logger.warning("resetting a gate failed: %s", _first_line(error))
            return False
        return True

    def _forget_ranks(self) -> None:
        for replica_id in self._ranks.keys() - self._state.replicas.keys():
            del self._ranks[replica_id]

    def _log_schedules(self) -> None:
        for key, line in self._state.live_lines.items():
            for bound, verdict in line.verdicts.items():
                if verdict.changes:
                    logger.info("%s, batch size up to %d: %s", key[0], bound, verdict.reason)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        """asyncio itself keeps no reference to a task."""
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the controller's own work failed; it starts anew", exc_info=task.exception())
            ray.kill(ray.get_runtime_context().current_actor, no_restart=False)

    def _end(self, reason: str) -> None:
        logger.info("The speculation controller of %s:%s ends: %s", self._app, self._deployment, reason)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def controller_name(app: str, deployment: str) -> str:
    """The actor's name in namespace `NAMESPACE`."""
    return f"dflash-controller:{app}:{deployment}"


def controller_apps(names: Iterable[str]) -> dict[str, str]:
    """Application -> deployment, of those actor names that are controllers'."""
    parts = [name.split(":") for name in names if name.startswith("dflash-controller:")]
    return {app: deployment for _, app, deployment in parts}


def find_or_make_controller(app: str, deployment: str, *, actor_class: type = SpeculationController) -> Any:
    """The controller's handle; blocks for a few milliseconds. Whether it lives shows at the first call.

    The strategy is named because an actor made inside a replica would otherwise join the replica's placement group and
    die with it.

    Raises:
        RayError, ValueError: Ray cannot say.
    """
    return (
        ray.remote(actor_class)
        .options(
            name=controller_name(app, deployment),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
            scheduling_strategy="DEFAULT",
            max_concurrency=_MAX_CONCURRENCY,
            enable_task_events=False,  # hundreds of calls a second, which nobody looks up
        )
        .remote(app, deployment)
    )


def find_controller(app: str, deployment: str) -> Any:
    """The handle of a controller that exists. Raises ValueError if there is none."""
    return ray.get_actor(controller_name(app, deployment), namespace=NAMESPACE)


def remove_controller(app: str, deployment: str) -> None:
    """Ends the controller of an application that is deleted; none is no error."""
    try:
        handle = find_controller(app, deployment)
    except ValueError:
        return
    ray.kill(handle, no_restart=True)


def _is_deleted(app: str) -> bool:
    """Whether Serve runs here and does not know the application, or does not run any more."""
    from ray import serve

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return True
    try:
        return app not in serve.status().applications
    except Exception as error:  # Serve restarts, or is too busy to say; asked again later
        logger.warning("Serve does not say whether %s exists: %s", app, _first_line(error))
        return False


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
