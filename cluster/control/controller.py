"""`SpeculationController`: the Ray actor around a `ControlState`, and how replicas find or make it.

Named, detached, on the head node, one per (application, deployment). It owns no request and no engine: replicas go on
without it. Not a deployment actor of Serve's: one that cannot start would keep replicas from starting.

Its methods return at once (`reset_gates` waits for its answers) and run on a few threads, one at a time: of a thousand
replicas' reports most of the cost is Ray's, and a call that goes through an event loop costs a third more.
"""

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from cluster.control import order_note
from cluster.control.control_metrics import ControlMetrics
from cluster.control.estimate import ControlState, Push
from cluster.control.messages import PROTOCOL_VERSION, Order, Registration, Report
from cluster.control.status import status_of
from cluster.error_text import first_line
from engine.speculative.schedule import ScheduleAck, Version

logger = logging.getLogger(__name__)

NAMESPACE = "dflash"
_THREADS = 4  # so that the one that waits for gates keeps no report waiting
_TICK_S = 0.5  # between two decisions, or a quarter of the reports' interval where that is longer
_METRICS_S = 5.0  # between two times the series are set; Ray takes them up every 10 s
_PUSH_TIMEOUT_S = 10.0
_LEAVE_AFTER_S = 600.0  # without a replica
_ASK_SERVE_AFTER_S = 5.0  # without a replica, whether the application still exists


class SpeculationController:
    """See the module. Messages are bytes: msgpack of `cluster.control.messages`."""

    def __init__(self, app: str, deployment: str) -> None:
        self._app, self._deployment = app, deployment
        self._lock = threading.Lock()  # of all below
        self._state = ControlState(started_at=time.monotonic())
        self._state.see_order(order_note.recall(app, deployment))
        self._metrics = ControlMetrics(app=app, deployment=deployment)
        self._metrics_due = 0.0
        self._ranks: dict[str, Any] = {}  # replica -> handle of its rank 0
        self._pushing: dict[str, tuple[float, Version]] = {}  # replica -> when its push is given up, and of what
        self._gates_lock = threading.Lock()  # of those that ask ranks to reset their gates
        self._orders_lock = threading.Lock()  # of those that give and keep orders, taken before the other
        self._answers: SimpleQueue[tuple[Push, Future[ScheduleAck]]] = SimpleQueue()  # to pushes
        self._registration = msgspec.msgpack.Decoder(Registration)
        self._report = msgspec.msgpack.Decoder(Report)
        self._encoder = msgspec.msgpack.Encoder()
        self._actor = ray.get_runtime_context().current_actor
        threading.Thread(target=self._work, name="decisions", daemon=True).start()

    # ---------------------------------------------------------------------------------------------------- replicas

    def register(self, protocol: int, registration: bytes, rank0: Any) -> bytes:
        """A replica introduces itself and its rank 0 (an actor with `apply_schedule` and `reset_gate`).

        Raises:
            ValueError: it speaks an older protocol, or what it says cannot be. Before a newer one, the controller ends
                and leaves the place to one that speaks it.
        """
        if protocol > PROTOCOL_VERSION:
            self._end(f"a replica speaks protocol {protocol}, this controller {PROTOCOL_VERSION}")
        with self._lock:
            message = self._registration.decode(registration)
            reply = self._state.register(message, now=time.monotonic())
            self._ranks[message.replica_id] = rank0
            self._pushing.pop(message.replica_id, None)  # its earlier incarnation's
            return self._encoder.encode(reply)

    def report(self, report: bytes) -> bytes:
        """A replica's counters."""
        with self._lock:
            return self._encoder.encode(self._state.report(self._report.decode(report), now=time.monotonic()))

    def leave(self, replica_id: str, incarnation: int) -> None:
        """A replica ends."""
        with self._lock:
            self._state.leave(replica_id, incarnation=incarnation, now=time.monotonic())

    # ---------------------------------------------------------------------------------------------------- operators

    def give(self, order: bytes) -> None:
        """An operator's order: pushed, and kept before this returns. Raises ValueError for a schedule that cannot be
        pinned."""
        with self._orders_lock:
            with self._lock:
                now = time.monotonic()
                self._take_answers()
                pushes = self._due(self._state.give(msgspec.msgpack.decode(order, type=Order), now=now), now)
                given = self._state.order
            self._push(pushes)
            assert given is not None
            order_note.keep(self._app, self._deployment, given)  # the head may be slow: reports must not wait for it

    def reset_gates(self) -> list[str]:
        """Lets every replica's tripped gate speculate again; the replicas that have done so.

        Raises:
            ValueError: another call waits for the ranks; one alone may, so that threads are left for reports.
        """
        if not self._gates_lock.acquire(blocking=False):
            raise ValueError(f"the gates are being reset already; ask again in {_PUSH_TIMEOUT_S:g} s")
        try:
            with self._lock:
                self._forget_ranks()
                ranks = dict(self._ranks)
            asked = {replica_id: rank0.reset_gate.remote() for replica_id, rank0 in ranks.items()}
            answers = list(asked.values())
            if answers:
                ray.wait(answers, num_returns=len(answers), timeout=_PUSH_TIMEOUT_S)
            return [replica_id for replica_id, answer in asked.items() if _has_succeeded(answer)]
        finally:
            self._gates_lock.release()

    def status(self) -> bytes:
        """A `ControllerStatus`."""
        with self._lock:
            self._take_answers()
            shown = status_of(self._state, app=self._app, deployment=self._deployment, now=time.monotonic())
        return msgspec.msgpack.encode(shown)

    # ---------------------------------------------------------------------------------------------------- own work

    def _work(self) -> None:
        """Decides up to twice a second; leaves when there is nothing to control any more."""
        try:
            asked_at = 0.0
            while True:
                time.sleep(max(_TICK_S, self._state.interval_s / 4))
                now = time.monotonic()
                with self._lock:
                    pushes = self._tick(now)
                    idle_s = None if self._state.idle_since is None else now - self._state.idle_since
                    is_superseded = self._state.is_superseded
                self._push(pushes)
                if is_superseded:
                    self._end("a controller with a later epoch is at work")
                if idle_s is not None and idle_s > _LEAVE_AFTER_S:
                    self._end(f"no replica for {idle_s:.0f} s")
                if idle_s is not None and idle_s > _ASK_SERVE_AFTER_S and now - asked_at > _ASK_SERVE_AFTER_S:
                    asked_at = now
                    if _is_deleted(self._app):
                        order_note.forget(self._app, self._deployment)
                        self._end(f"the application {self._app!r} does not exist any more")
        except Exception:
            logger.exception("the controller's own work failed; it starts anew")
            try:
                ray.kill(self._actor, no_restart=False)
            except Exception:  # Ray's head may be away as well: who only answers and decides nothing must not stay
                logger.exception("Ray cannot end the controller; its process ends itself")
                os._exit(1)

    def _tick(self, now: float) -> list[tuple[Any, Push]]:
        self._take_answers()
        changes = self._state.num_changes
        pushes = self._state.decide(now=now)
        if self._state.num_changes != changes:
            self._log_schedules()
        self._forget_ranks()
        if now >= self._metrics_due:
            self._metrics_due = now + _METRICS_S
            self._metrics.set(self._state)
        return self._due(pushes, now)

    def _due(self, pushes: Iterable[Push], now: float) -> list[tuple[Any, Push]]:
        """Those with somebody to push to and none under way, with the handle."""
        due = []
        for push in pushes:
            rank0 = self._ranks.get(push.replica_id)
            until, _ = self._pushing.get(push.replica_id, (now, None))
            if rank0 is not None and until <= now:
                self._pushing[push.replica_id] = now + _PUSH_TIMEOUT_S, push.version
                due.append((rank0, push))
        return due

    def _push(self, pushes: Iterable[tuple[Any, Push]]) -> None:
        for rank0, push in pushes:
            try:
                answer = rank0.apply_schedule.remote(push.version, push.schedule).future()
            except RayError as error:  # given up after a while, as one that is never answered
                logger.warning("replica %s cannot be pushed to: %s", push.replica_id, first_line(error))
            else:
                answer.add_done_callback(functools.partial(self._answered, push))

    def _answered(self, push: Push, answer: "Future[ScheduleAck]") -> None:
        """Runs on a thread of Ray's, which must not wait for the lock."""
        self._answers.put((push, answer))

    def _take_answers(self) -> None:
        """What pushes have led to. One that fails is made up for by the reply to the replica's next report."""
        while not self._answers.empty():
            push, answer = self._answers.get()
            if self._pushing.get(push.replica_id, (0.0, None))[1] == push.version:  # not a late one's, given up before
                del self._pushing[push.replica_id]
            error = answer.exception()
            if error is not None:
                logger.warning("pushing %s to replica %s failed: %s", push.version, push.replica_id, first_line(error))
                continue
            ack = answer.result()
            self._state.acknowledged(push.replica_id, ack)
            if ack.rounded:
                logger.warning("replica %s: schedule %s was %s", push.replica_id, push.version, ack.rounded)

    def _forget_ranks(self) -> None:
        for replica_id in self._ranks.keys() - self._state.replicas.keys():
            del self._ranks[replica_id]
            self._pushing.pop(replica_id, None)

    def _log_schedules(self) -> None:
        for key, line in self._state.live_lines.items():
            for bound, verdict in line.verdicts.items():
                if verdict.changes:
                    logger.info("%s, batch size up to %d: %s", key.accelerator, bound, verdict.reason)

    def _end(self, reason: str) -> None:
        logger.info("The speculation controller of %s:%s ends: %s", self._app, self._deployment, reason)
        ray.kill(self._actor, no_restart=True)


def _has_succeeded(answer: Any) -> bool:
    try:
        ray.get(answer, timeout=0)
    except (RayError, RuntimeError) as error:
        logger.warning("resetting a gate failed: %s", first_line(error))
        return False
    return True


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
            max_concurrency=_THREADS,
            enable_task_events=False,  # hundreds of calls a second, which nobody looks up
        )
        .remote(app, deployment)
    )


def find_controller(app: str, deployment: str) -> Any:
    """The handle of a controller that exists. Raises ValueError if there is none."""
    return ray.get_actor(controller_name(app, deployment), namespace=NAMESPACE)


def remove_controller(app: str, deployment: str) -> None:
    """Ends the controller of an application that is deleted; none is no error."""
    with contextlib.suppress(ValueError):
        ray.kill(find_controller(app, deployment), no_restart=True)
    order_note.forget(app, deployment)  # behind the kill: nobody is left who would keep one again


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
        logger.warning("Serve does not say whether %s exists: %s", app, first_line(error))
        return False
