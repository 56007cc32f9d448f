"""What Ray Serve says about our application: whether it runs, and if it cannot start, why. And its last call to it."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

_POLL_S = 0.25
# "ValueError: text" or "engine.errors.EngineError: text" at the start of a line, as a traceback ends.
_EXCEPTION_LINE = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b(?::.*)?$")


class StartFailedError(Exception):
    """The application cannot start; the message is the root cause."""


class DrainFailedError(Exception):
    """Replicas did not answer the call to drain; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AppState:
    """One look at the application.

    failure: Serve's whole text about a replica that could not start. waiting: what it says of one that finds no room.
    """

    running: bool
    status: str
    replicas: str
    failure: str | None
    waiting: str | None = None


def root_cause(message: str) -> str:
    """The reason inside Serve's text about a failed replica.

    A traceback's last exception is what the replica failed with; lines after it belong to its message up to an empty
    line or the next sentence of Serve's. Without a traceback, the text itself.
    """
    lines = [line.rstrip() for line in message.splitlines()]
    starts = [i for i, line in enumerate(lines) if _EXCEPTION_LINE.match(line)]
    if not starts:
        return message.strip()
    kept: list[str] = []
    for line in lines[starts[-1] :]:
        if kept and not line:
            break
        kept.append(line)
    text = "\n".join(kept)
    return re.sub(r"^(?:[a-z_]\w*\.)*(?:ValueError|RuntimeError): ", "", text)


def look(app_name: str) -> AppState:
    """Ask the Serve controller."""
    from ray import serve

    status = serve.status().applications.get(app_name)
    if status is None:
        return AppState(running=False, status="NOT_STARTED", replicas="", failure=None)
    counts: dict[str, int] = {}
    waiting: str | None = None
    failure = status.message if status.status in ("DEPLOY_FAILED", "UNHEALTHY") else None
    for deployment in status.deployments.values():
        for state, count in deployment.replica_states.items():
            counts[str(state)] = counts.get(str(state), 0) + count
        if "failed to start" in deployment.message or deployment.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            failure = deployment.message or failure
        elif "to be scheduled" in deployment.message:
            waiting = deployment.message
    return AppState(
        running=status.status == "RUNNING",
        status=str(status.status.value if hasattr(status.status, "value") else status.status),
        replicas=", ".join(f"{count} {state.lower()}" for state, count in counts.items()),
        failure=failure,
        waiting=waiting,
    )


def wait_until_running(app_name: str, on_state: Callable[[AppState], None]) -> None:
    """Poll until the application runs.

    Raises:
        StartFailedError: a replica failed to start. Serve would retry it; a wrong config or model fails every time.
    """
    while True:
        state = look(app_name)
        on_state(state)
        if state.running:
            return
        if state.failure is not None:
            raise StartFailedError(root_cause(state.failure))
        time.sleep(_POLL_S)


def drain_replicas(app_name: str, limit_s: float, *, timeout_s: float) -> int:
    """Have every replica of the application end its service (`ModelServer.drain`); returns the number of cut requests.

    Raises:
        DrainFailedError: there is no replica, or one did not answer within `timeout_s`.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

    try:
        answers = serve.get_app_handle(app_name).broadcast("drain", limit_s).results(timeout_s=timeout_s)
    except DeploymentUnavailableError as error:  # its own text is a repr
        raise DrainFailedError("no replica is left") from error
    except (RayServeException, RayError, TimeoutError) as error:
        raise DrainFailedError(root_cause(str(error)) or type(error).__name__) from error
    return sum(answers)
