"""A Ray cluster of this command's own, started on this machine and ended with it, and the port check before that."""

import concurrent.futures
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

from cluster.cli.console import stderr
from engine.parallel.process_identity import ProcessIdentity

# Serve moves requests and answers through actor calls; its object store needs no more than Ray's minimum and some room.
_OBJECT_STORE_BYTES = 200 * 1024 * 1024
_PROXY_START_S = 30
PROXY_MIDDLEWARES = "cluster.proxy_errors.middlewares"  # a function that Serve's proxies call
# What Ray does by the clock costs the same with and without requests, a quarter of a core by default, which on a small
# machine is the engine's. Read by Ray's processes when they start; what the user has set stays.
_PATIENT_RAY = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # 0.1 by default; a dead replica is replaced that much later
    "RAY_task_events_report_interval_ms": "0",  # of every actor call, for a dashboard
    "RAY_event_stats": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # 5000 by default; a node's load, for a dashboard
}
_REAP_S = 1.0
_GRACE_S = 1.0


def available_cpus() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_port_free(host: str, port: int) -> None:
    """Bind and release the address.

    Raises:
        ValueError: it is in use, not permitted, or not an address of this machine; the message says what to do.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(f"http.host: cannot resolve {host!r}: {error.strerror}") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                text = f"http.port: {host}:{port} is in use; stop what listens there, or choose another with --port"
            elif error.errno == errno.EACCES:
                text = f"http.port: no permission to listen on port {port}; choose one above 1023 with --port"
            else:
                text = f"http.host: cannot listen on {host}:{port}: {error.strerror}"
            raise ValueError(text) from error


def start(*, num_cpus: int, dashboard: bool, verbose: bool) -> None:
    """Start a Ray cluster on this machine and connect to it. Its processes die with this one, however it dies."""
    # Serve starts a proxy anew, with all that takes, when it has not answered three times for so long: 5 s by default.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(_PROXY_START_S))
    os.environ.setdefault("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", PROXY_MIDDLEWARES)
    if not dashboard:
        for name, value in _PATIENT_RAY.items():
            os.environ.setdefault(name, value)
    # `local` never joins a cluster that happens to run here, whatever RAY_ADDRESS says.
    _init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=dashboard,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
    )
    if not verbose:
        _end_log_monitor()


def check_gpus(needed: int) -> None:
    """Whether the connected cluster has so many GPUs: a placement group that asks for more waits without an end.

    Raises:
        ValueError: it has not.
    """
    if not needed:
        return
    import ray

    found = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    if found < needed:
        raise ValueError(
            f"engine.device: the replicas need {needed} GPU(s) in all, and Ray found {found} on this machine; lower "
            "deployment.replicas or engine.tensor_parallel_size, or see whether `nvidia-smi` and CUDA_VISIBLE_DEVICES "
            "show the GPUs"
        )


def _end_log_monitor() -> None:
    """It follows every log file for a driver that shows them, ten times a second."""
    from ray._private import worker

    node = worker._global_node
    assert node is not None, "Ray was started here"
    node.kill_log_monitor(check_alive=False)


def connect(address: str, *, verbose: bool) -> None:
    """Connect to a running Ray cluster.

    Raises:
        ValueError: there is none at the address.
    """
    try:
        _init(address=address, log_to_driver=verbose, logging_level=logging.INFO if verbose else logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(f"--address: cannot connect to Ray at {address!r}: {error}") from error


def _init(**options: Any) -> None:
    """`ray.init` in a thread of its own, to its end even if a signal handler raises in the meantime.

    In the main thread it would put its own handler on SIGTERM, which leaves processes of a cluster half started; and an
    exception that breaks into it crashes the interpreter later. The thread lives as long as this process: Ray's
    processes ask the kernel to end them with their parent, which to the kernel is the thread that started them.
    """
    import ray

    outcome: Future[object] = Future()

    def run() -> None:
        try:
            outcome.set_result(ray.init(**options))
        except BaseException as error:
            outcome.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=run, name="ray-parent", daemon=True).start()
    try:
        outcome.result()
    except BaseException:
        concurrent.futures.wait([outcome])
        raise


def serve_runs() -> bool:
    """Whether the connected cluster runs Ray Serve already."""
    import ray

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def shutdown() -> None:
    """`ray.shutdown` of a cluster that `start` made, and the end of what that leaves.

    Ray's per-node agents end with their node only once they have found it, which takes them a minute when it is gone
    before they were up.
    """
    import ray

    ours: list[ProcessIdentity] = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            ours.append(ProcessIdentity.of(pid))
    ray.shutdown()
    deadline_s = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline_s and any(identity.is_alive() for identity in ours):
        time.sleep(0.05)
    for identity in ours:
        if identity.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity.pid, signal.SIGKILL)


def end_at_once() -> NoReturn:
    """Leave this process now, ending every process it started (a local Ray is one tree below it)."""
    ours = descendants(os.getpid())
    for pid in ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # Direct children are ours to reap: what waits for its parent's end looks for the entry in the process table.
    deadline_s = time.monotonic() + _REAP_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline_s:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
    stderr().print("ended without waiting", style="bold red")
    os._exit(130)


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, from /proc; none where there is no /proc (Ray's own watchers end its processes there)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state parent ...": the name may hold spaces and brackets, so count from its last bracket.
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended while we looked
        children.setdefault(parent, []).append(int(entry.parent.name))
    found, pending = [], [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found
