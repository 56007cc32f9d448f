"""`dflash serve` and a real Ray: a start failure ends with its cause, nothing of a local Ray outlives a hard end."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli.deployment_watch import AppState, StartFailedError, look, wait_until_running
from cluster.cli.local_ray import descendants, serve_runs


@pytest.fixture(scope="module")
def ray_serve(ray_cluster: None, free_port_of_module: int) -> Iterator[int]:
    from ray import serve

    assert not serve_runs()
    serve.start(http_options={"host": "127.0.0.1", "port": free_port_of_module}, logging_config={"log_level": "ERROR"})
    assert serve_runs()
    yield free_port_of_module
    serve.shutdown()


def deploy(name: str, failure: str | None) -> None:
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Toy:
        def __init__(self, failure: str | None) -> None:
            if failure is not None:
                raise ValueError(failure)

    target = serve.RunTarget(target=Toy.bind(failure), name=name, route_prefix=f"/{name}")
    serve.run_many([target], wait_for_applications_running=False)


def test_an_application_that_starts_is_reported_running(ray_serve: int) -> None:
    from ray import serve

    states: list[AppState] = []
    deploy("good", None)
    wait_until_running("good", states.append)
    assert states[-1].running
    assert states[-1].replicas == "1 running"
    serve.delete("good")
    assert look("good") == AppState(running=False, status="NOT_STARTED", replicas="", failure=None)


def test_a_failing_constructor_ends_the_wait_with_its_cause(ray_serve: int) -> None:
    from ray import serve

    begin_s = time.monotonic()
    deploy("bad", "model.dtype: float8 is not known")
    with pytest.raises(StartFailedError) as caught:
        wait_until_running("bad", lambda state: None)
    assert str(caught.value) == "model.dtype: float8 is not known"
    assert time.monotonic() - begin_s < 30  # the first failure ends it, not Serve's last retry
    serve.delete("bad")


def pids_that_it_says(script: str, repo_root: Path, *, status: int) -> set[int]:
    """Of the processes that a program started. It ends with this status."""
    child = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(repo_root)},
    )
    assert child.returncode == status, child.stderr
    started = {int(pid) for pid in child.stdout.split()}
    assert started
    return started


def test_nothing_outlives_a_hard_end(repo_root: Path) -> None:
    script = (
        "import os, time; from cluster.cli import local_ray;"
        "local_ray.start(num_cpus=1, dashboard=False, verbose=False);"
        "import ray; time.sleep(1); assert ray.nodes()[0]['Alive'];"  # it stays once it has started
        "print(*local_ray.descendants(os.getpid()), flush=True); local_ray.end_at_once()"
    )
    started = pids_that_it_says(script, repo_root, status=130)
    deadline_s = time.monotonic() + 10
    while alive := {pid for pid in started if _runs(pid)}:
        assert time.monotonic() < deadline_s, alive
        time.sleep(0.1)
    assert not started & set(descendants(os.getpid()))


def test_a_signal_while_ray_starts_leaves_nothing(repo_root: Path) -> None:
    script = """
import os, signal, threading
from cluster.cli import local_ray

class Stop(BaseException):
    pass

def on_signal(number, frame):
    raise Stop

signal.signal(signal.SIGTERM, on_signal)
import ray  # seconds; the signal is to arrive after it
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
try:
    local_ray.start(num_cpus=1, dashboard=False, verbose=False)
except Stop:
    print(*local_ray.descendants(os.getpid()), flush=True)
    local_ray.shutdown()
"""
    started = pids_that_it_says(script, repo_root, status=0)
    deadline_s = time.monotonic() + 20
    while alive := {pid for pid in started if _runs(pid)}:
        assert time.monotonic() < deadline_s, alive
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    """Whether a process exists and is not just waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
