"""`dflash serve` before anything runs: options and machine; and what it makes of Serve's messages."""

import contextlib
import io
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import haproxy
from cluster.cli.deployment_watch import StartFailedError, root_cause
from cluster.cli.local_ray import check_port_free, descendants
from cluster.cli.main import app
from cluster.cli.ray_notes import RayNotes
from cluster.cli.serve import wait_until_healthy
from cluster.config import parse_config
from cluster.config_check import check_local_cpus


def serve(*arguments: str):
    return CliRunner().invoke(app, ["serve", *arguments])


def test_missing_config_is_named(tmp_path: Path) -> None:
    result = serve(str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert "none.yaml: 1 problem\n  cannot read the config file: No such file or directory" in result.stderr


def test_wrong_config_lists_its_problems(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {source: a/b}\nengine: {max_num_seq: 3}\n")
    result = serve(str(file))
    assert result.exit_code == 2
    assert 'engine.max_num_seq: unknown key; did you mean "max_num_seqs"?' in result.stderr
    assert "Traceback" not in result.output


def test_port_in_use_is_said_before_anything_starts(smollm2_config_file: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        result = serve(str(smollm2_config_file), "--port", str(port))
    assert result.exit_code == 2
    assert result.stderr.strip() == (
        f"error: http.port: 127.0.0.1:{port} is in use; stop what listens there, or choose another with --port"
    )


def test_dashboard_needs_an_own_ray(smollm2_config_file: Path) -> None:
    result = serve(str(smollm2_config_file), "--dashboard", "--address", "auto")
    assert (result.exit_code, result.stderr.strip()) == (
        2,
        "error: --dashboard: applies to a Ray started here; leave it out with --address",
    )


def test_port_out_of_range(smollm2_config_file: Path) -> None:
    result = serve(str(smollm2_config_file), "--port", "70000")
    assert result.exit_code == 2
    assert "--port" in result.output


@pytest.mark.parametrize(
    ("host", "message"),
    [("no.such.host.invalid", "http.host: cannot resolve"), ("192.0.2.1", "http.host: cannot listen on 192.0.2.1:")],
)
def test_unusable_hosts(host: str, message: str, free_port: int) -> None:
    with pytest.raises(ValueError, match=message):
        check_port_free(host, free_port)


def test_free_port_stays_free(free_port: int) -> None:
    check_port_free("127.0.0.1", free_port)
    check_port_free("127.0.0.1", free_port)


@pytest.mark.parametrize(
    ("deployment", "tensor_parallel_size", "num_cpus", "fits"),
    [
        ({}, 1, 1, True),
        ({"replicas": 2}, 1, 2, True),
        ({"replicas": 2}, 2, 2, False),
        ({"replicas": 2, "cpus": 0.5}, 2, 2, True),
        ({"autoscaling": {"min_replicas": 0, "max_replicas": 8}}, 2, 2, True),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 8}}, 1, 2, False),
    ],
)
def test_cpus_that_the_machine_lacks(
    deployment: dict[str, object], tensor_parallel_size: int, num_cpus: int, fits: bool
) -> None:
    data = {
        "model": {"source": "a/b"},
        "deployment": deployment,
        "engine": {"tensor_parallel_size": tensor_parallel_size},
    }
    config = parse_config(data, base_dir=Path("/"))
    if fits:
        check_local_cpus(config, num_cpus)
    else:
        with pytest.raises(ValueError, match=r"this machine has 2; lower deployment\.cpus"):
            check_local_cpus(config, num_cpus)


SERVE_MESSAGE = """The deployment failed to start 1 times in a row. This may be due to a problem with its \
constructor or initial health check failing. See controller logs for details. Error:
\x1b[36mray::ServeReplica:dflash:ModelServer.initialize_and_get_metadata()\x1b[39m (pid=1, ip=10.0.0.1, actor_id=0)
  File "/lib/python3.11/concurrent/futures/_base.py", line 449, in result
    return self.__get_result()
ValueError: inner

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "replica.py", line 1, in initialize
    raise RuntimeError(traceback.format_exc()) from None
{error}
"""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("ValueError: max_draft_len: 20 is above 15", "max_draft_len: 20 is above 15"),
        (
            "torch.OutOfMemoryError: CUDA out of memory.\nTried to allocate 2 GiB.",
            "torch.OutOfMemoryError: CUDA out of memory.\nTried to allocate 2 GiB.",
        ),
        ("workers.errors.EngineDeadError: rank 1 ended", "workers.errors.EngineDeadError: rank 1 ended"),
    ],
)
def test_root_cause_is_the_last_exception(error: str, cause: str) -> None:
    assert root_cause(SERVE_MESSAGE.format(error=error)) == cause


def test_message_without_traceback_is_kept() -> None:
    assert root_cause(" no resources\n") == "no resources"


def test_descendants_are_found_and_only_they() -> None:
    script = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE);"
        "print(p.pid, flush=True); input(); p.communicate(b'x')"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    assert {child.pid, grandchild} <= set(descendants(os.getpid()))
    assert descendants(child.pid) == [grandchild]
    child.communicate("\n")
    assert not {child.pid, grandchild} & set(descendants(os.getpid()))


def test_health_is_awaited_and_its_last_answer_told(free_port: int) -> None:
    with pytest.raises(StartFailedError, match=r"did not become healthy in 0\.3 s: .*refused"):
        wait_until_healthy(f"http://127.0.0.1:{free_port}/health", 0.3)

    answers = iter([503, 503, 200])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(next(answers))
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Tests read their own output."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        wait_until_healthy(f"http://127.0.0.1:{server.server_address[1]}/health", 10)
        server.shutdown()
        thread.join()
    assert next(answers, None) is None


def test_ray_s_notes_are_kept_except_those_that_only_say_that_something_died() -> None:
    out = io.StringIO()
    notes = RayNotes(out)
    with contextlib.redirect_stdout(notes):
        print(
            "\x1b[33m(raylet)\x1b[0m A worker died or was killed while executing a task by an unexpected system error. "
            "To troubleshoot the problem, check the logs for the dead worker."
        )
        print("(raylet) Task ServeController.listen_for_change failed. There are infinite retries remaining, so ...")
        print("(raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM)")
        print(
            "our own line that says: A worker died or was killed while executing a task by an unexpected system error"
        )
        print("half", end="")
    assert out.getvalue().splitlines() == [
        "(raylet) 2 Workers (tasks / actors) killed due to memory pressure (OOM)",
        "our own line that says: A worker died or was killed while executing a task by an unexpected system error",
    ]
    notes.write(" a line\n")
    assert out.getvalue().endswith("\nhalf a line\n")


def test_haproxy_gets_files_and_ports_of_its_own_and_the_user_s_values_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (haproxy.environment(tmp_path, num_cpus=2) for _ in range(2))
    ports = [names[f"RAY_SERVE_HAPROXY_{kind}_PORT"] for names in (first, second) for kind in ("METRICS", "STATS")]
    assert len(set(ports)) == 4
    assert {Path(value).parent for value in first.values() if value.startswith("/")} == {tmp_path.parent, tmp_path}
    from ray.serve._private import constants

    assert [name for name in first if not hasattr(constants, name)] == []  # names that Serve no longer reads do nothing
    # A plain dict: whatever `apply` sets must not reach the Ray clusters of later tests.
    monkeypatch.setattr(os, "environ", {"RAY_SERVE_HAPROXY_STATS_PORT": "1"})
    haproxy.apply(first)
    assert os.environ == first | {"RAY_SERVE_HAPROXY_STATS_PORT": "1"}


def test_a_missing_haproxy_is_said_before_anything_starts(
    tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(tmp_path / "none"))
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {{source: a/b}}\nhttp: {{proxy: haproxy, port: {free_port}}}\n")
    result = serve(str(file))
    assert result.exit_code == 2
    assert "error: http.proxy: there is no HAProxy on this machine" in result.stderr
    assert result.stderr.rstrip().endswith("use python")
