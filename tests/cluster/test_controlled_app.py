"""A controlled application under Ray Serve: two simulated replicas, one controller, from first report to last actor."""

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import ray
from typer.testing import CliRunner

from cluster.app import DEPLOYMENT, build
from cluster.cli.main import app as command
from cluster.config import load_config
from cluster.control.controller import NAMESPACE, controller_name, find_controller, remove_controller
from cluster.control.status import ControllerStatus
from tests.conftest import REPO_ROOT

pytestmark = pytest.mark.slow

APP = "controlled"
READINESS_TOKENS = 2  # of each replica's own request at its start


def config(*, margin: float = 0.03) -> dict[str, Any]:
    plain = load_config(REPO_ROOT / "configs" / "simulated.yaml").to_plain()
    plain["engine"]["max_num_seqs"] = 8
    plain["speculative_config"]["draft_len_schedule"] = {8: 15}
    plain["simulation"]["speed"] = 2.0
    plain["deployment"]["replicas"] = 2
    plain["controller"] |= {"enabled": True, "margin": margin}
    plain["allow_simulated"] = True
    return plain


@pytest.fixture(scope="module")
def url(ray_cluster: None) -> Iterator[str]:
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    serve.run(build(config()), name=APP, route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def status() -> ControllerStatus:
    return msgspec.msgpack.decode(ray.get(find_controller(APP, DEPLOYMENT).status.remote()), type=ControllerStatus)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def is_settled() -> bool:
    try:
        now = status()
    except (ValueError, ray.exceptions.RayError):
        return False
    return len(now.replicas) == 2 and all(r.version == r.target > (0, 0) for r in now.replicas)


async def complete(url: str, num: int) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(timeout=120) as client:
        bodies = [{"model": "simulated", "prompt": "Hello", "max_tokens": 100, "seed": 2 * n + 1} for n in range(num)]
        replies = await asyncio.gather(*[client.post(f"{url}/v1/completions", json=body) for body in bodies])
    return [reply.json() for reply in replies]


def scrape_all(url: str, replicas: set[str]) -> dict[str, dict[str, float]]:
    """Replica -> series -> value; the proxy answers from any replica, so it is asked until all were seen."""
    found: dict[str, dict[str, float]] = {}
    deadline = time.monotonic() + 60
    while set(found) != replicas:
        assert time.monotonic() < deadline, (found.keys(), replicas)
        text = httpx.get(f"{url}/metrics").text
        series = re.findall(r'^(\S+?)\{.*replica="([^"]+)"\} (\S+)$', text, re.MULTILINE)
        found[series[0][1]] = {name: float(value) for name, _, value in series}
    return found


def test_the_replicas_series_add_up_to_what_clients_received(url: str) -> None:
    replies = asyncio.run(complete(url, 24))
    until(is_settled)
    series = scrape_all(url, {replica.replica_id for replica in status().replicas}).values()

    def total(name: str) -> float:
        return sum(values[name] for values in series)

    received = sum(reply["usage"]["completion_tokens"] for reply in replies)
    assert received == 24 * 100
    assert total("vllm:generation_tokens_total") == received + 2 * READINESS_TOKENS
    drafts = [reply["metrics"]["speculative_decoding"] for reply in replies]
    assert total("vllm:spec_decode_num_draft_tokens_total") == sum(d["num_draft_tokens"] for d in drafts)
    assert total("vllm:spec_decode_num_accepted_tokens_total") == sum(d["num_accepted_draft_tokens"] for d in drafts)
    assert total("dflash:controller_connected") == 2 and total("dflash:schedule_epoch") == 2 * 1


def test_hard_traffic_shortens_the_drafts_and_operators_are_obeyed(url: str) -> None:
    until(lambda: bool(asyncio.run(complete(url, 16))) and all(r.schedule[8] < 15 for r in status().replicas), 90)
    shown = CliRunner().invoke(command, ["status"])
    assert shown.exit_code == 0, shown.output
    assert f"application {APP}: 2 replica(s), controller epoch 1" in shown.stdout
    reason = CliRunner().invoke(command, ["schedule", "why", "8"])
    assert "batch size up to 8" in reason.stdout and "gains" in reason.stdout
    assert CliRunner().invoke(command, ["schedule", "pin", "8:99"]).exit_code == 2
    assert CliRunner().invoke(command, ["schedule", "pin", "8:5"]).exit_code == 0
    until(lambda: is_settled() and all(r.schedule == {8: 5} for r in status().replicas), 15)
    assert CliRunner().invoke(command, ["schedule", "reset-gate"]).stdout.startswith("gates reset in 2 replica(s)")
    assert CliRunner().invoke(command, ["schedule", "unpin"]).exit_code == 0
    until(lambda: is_settled() and all(r.schedule != {8: 5} for r in status().replicas), 15)


class Crashing:
    """In the controller's place: its constructor ends its process, and Ray starts it again and again."""

    def __init__(self) -> None:
        time.sleep(3.0)
        os._exit(1)


def put_in_the_controllers_place(actor_class: type) -> Any:
    """Ends the controller and takes its name before a replica makes another one."""
    options = {
        "name": controller_name(APP, DEPLOYMENT),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
    }
    deadline = time.monotonic() + 30
    while True:
        assert time.monotonic() < deadline
        remove_controller(APP, DEPLOYMENT)
        try:
            return ray.remote(actor_class).options(**options).remote()
        except ValueError:  # a replica was faster
            time.sleep(0.05)


class Load:
    """Four clients that ask one request after the other, until it is left."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(4)]
        self.statuses: list[int] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stopped.is_set():
                body = {"model": "simulated", "prompt": "Hello", "max_tokens": 40, "seed": 2 * number + 1}
                self.statuses.append(client.post(f"{self._url}/v1/completions", json=body).status_code)


def replica_ids() -> set[str]:
    """Of the replicas that Serve runs now."""
    names = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == "serve"]
    return {name.rsplit("#", 1)[1] for name in names if f"{APP}#{DEPLOYMENT}#" in name}


def is_healthy() -> bool:
    from ray import serve

    application = serve.status().applications[APP]
    return application.status == "RUNNING" and all(d.status == "HEALTHY" for d in application.deployments.values())


def test_nobody_needs_a_controller_whose_constructor_fails_for_a_minute(url: str) -> None:
    until(is_settled)
    before = {r.replica_id: r.version for r in status().replicas}
    epoch = status().epoch
    broken = put_in_the_controllers_place(Crashing)
    began = time.monotonic()
    victim = sorted(before)[0]
    (name,) = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].endswith(victim)]
    ray.kill(ray.get_actor(name, namespace="serve"), no_restart=True)
    # Serve itself calls an application unhealthy while a replica that died is replaced
    until(lambda: victim not in replica_ids() and len(replica_ids()) == 2 and is_healthy())
    with Load(url) as load:
        while time.monotonic() - began < 60:
            assert is_healthy() and len(replica_ids()) == 2
            time.sleep(1.0)
        ray.kill(broken, no_restart=True)
        back = time.monotonic()
        until(lambda: is_settled() and bool(status().hazards), 10)
        took_s = time.monotonic() - back
    assert load.statuses and set(load.statuses) == {200}
    after = status()
    assert after.epoch is not None and epoch is not None and after.epoch > epoch, (epoch, took_s)
    assert {r.replica_id for r in after.replicas} == replica_ids()
    assert all(r.version > before.get(r.replica_id, (0, 0)) for r in after.replicas)


def test_a_redeploy_with_other_args_keeps_the_controller_and_what_it_has_learnt(url: str) -> None:
    from ray import serve

    handle, before = find_controller(APP, DEPLOYMENT), status()
    serve.run(build(config(margin=0.04)), name=APP, route_prefix="/")
    until(
        lambda: is_settled() and not {r.replica_id for r in status().replicas} & {r.replica_id for r in before.replicas}
    )
    after = status()
    assert find_controller(APP, DEPLOYMENT)._actor_id == handle._actor_id
    assert (after.epoch, after.num_changes >= before.num_changes) == (before.epoch, True)
    assert list(after.hazards) == list(before.hazards) == [16]
    assert after.hazards[16] == pytest.approx(before.hazards[16], abs=0.2)
    assert all(r.schedule[8] < 15 for r in after.replicas), "the configured schedule says 15"


def test_no_actor_is_left_half_a_minute_after_the_application(url: str) -> None:
    from ray import serve

    serve.delete(APP)
    until(lambda: not [a for a in ray.util.list_named_actors(all_namespaces=True) if a["namespace"] == NAMESPACE], 30)
