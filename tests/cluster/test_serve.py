"""The application under Ray Serve with a scripted engine: requests, live values, and replicas that end."""

import asyncio
import contextlib
import gc
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fake_engine
import httpx
import pytest
from fake_engine import FakeEngine, build_tokenizer

from cluster import death_notes
from cluster.app import application, build, live_values, read_config, without_live_values
from cluster.cli.deployment_watch import DrainFailedError, drain_replicas
from cluster.config import ClusterConfig
from cluster.replica_engine import ReplicaEngine
from workers.errors import EngineClosedError, EngineDeadError

CONFIG = {
    "model": {"source": "org/toy", "served_name": "toy"},
    "engine": {"max_num_seqs": 2},
    "deployment": {"queue_limit": 1, "cpus": 1, "drain_s": 2},
}
TEXT = {"model": "toy", "prompt": "the fox"}


class FakeGroup:
    """Owner of a scripted engine that dies when it is asked to."""

    def __init__(self) -> None:
        self.client = FakeEngine(build_tokenizer(Path(tempfile.mkdtemp())))
        self.client.text = self._answer
        self.client.apply_schedule = self._apply_schedule
        self._death = asyncio.Event()

    def _answer(self, request) -> str:
        if "vanish" in self.client.tokenizer.decode(request.prompt_token_ids):
            os._exit(1)
        if "die" in self.client.tokenizer.decode(request.prompt_token_ids):
            self._death.set()
            raise EngineDeadError("rank 0 exited with code -9")
        return "the quick brown fox"

    async def _apply_schedule(self, version, schedule) -> str:
        return f"{version}: {schedule}"

    async def wait_dead(self) -> str:
        await self._death.wait()
        return "rank 0 exited with code -9"

    async def close(self) -> None:
        self.client.ended = EngineClosedError("the engine was shut down")


async def start_fake(config: ClusterConfig) -> ReplicaEngine:
    group = FakeGroup()
    return ReplicaEngine(
        group=group,
        tokenizer=group.client.tokenizer,
        model_dir=tempfile.mkdtemp(),
        max_model_len=100,
        vocab_size=group.client.tokenizer.vocab_size,
        max_draft_len=fake_engine.MAX_DRAFT_LEN,
        static_schedule={},
    )


@pytest.fixture(scope="module")
def url(ray_cluster: None) -> Iterator[str]:
    import sys

    from ray import cloudpickle, serve

    # Test modules cannot be imported by the replica.
    by_value = [fake_engine, sys.modules[__name__]]
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(application(read_config(CONFIG), start_fake), name="toy", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    for module in by_value:
        cloudpickle.unregister_pickle_by_value(module)


def replica_of(url: str) -> str:
    text = httpx.get(url + "/metrics").text
    return text.split('replica="')[1].split('"')[0]


def test_completion_and_stream(url: str):
    reply = httpx.post(url + "/v1/completions", json=TEXT)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == "the quick brown fox"
    reply = httpx.post(url + "/v1/completions", json=TEXT | {"stream": True}, headers={"X-Request-Id": "abc"})
    assert reply.text.endswith("data: [DONE]\n\n")
    assert reply.headers["x-request-id"] == "abc"
    assert httpx.get(url + "/health").status_code == 200
    assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "toy"


def test_no_collection_walks_through_what_the_replica_has_imported(url: str):
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    (name,) = [name for name in names if name.endswith(replica_of(url))]
    replica = ray.get_actor(name, namespace="serve")
    assert ray.get(replica.__ray_call__.remote(lambda _: gc.get_freeze_count())) > 10_000


def test_refusals_carry_the_envelope(url: str):
    assert httpx.post(url + "/v1/completions", json=TEXT | {"n": 4}).json()["error"]["param"] == "n"
    assert httpx.get(url + "/nothing").json()["error"]["type"] == "invalid_request_error"


def test_a_dead_engine_ends_the_replica_and_a_new_one_serves(url: str):
    before = replica_of(url)
    reply = httpx.post(url + "/v1/completions", json=TEXT | {"prompt": "die"}, timeout=20)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    wait_for_another(url, before)
    assert death_notes.take("toy") == ["rank 0 exited with code -9"]
    assert death_notes.take("toy") == []


def test_a_replica_that_is_gone_with_a_request_is_a_503(url: str):
    before = replica_of(url)
    reply = httpx.post(url + "/v1/completions", json=TEXT | {"prompt": "vanish", "stream": True}, timeout=20)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.json()["error"]["message"].startswith("The replica that worked on this request has ended")
    wait_for_another(url, before)


def wait_for_another(url: str, before: str) -> None:
    """Until a replica other than `before` serves; all that clients read in between is in the envelope."""
    deadline = time.monotonic() + 40
    while True:
        with contextlib.suppress(httpx.HTTPError):  # nobody has answered within the time-out
            reply = httpx.post(url + "/v1/completions", json=TEXT, timeout=5)
            if reply.status_code == 200 and replica_of(url) != before:
                return
            assert reply.status_code == 200 or reply.json()["error"]["code"], reply.text
        assert time.monotonic() < deadline, "no new replica"
        time.sleep(0.5)


class Open:
    """Requests that last beyond any patience: a stream with a first token, a stream and a body without one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._pool = ThreadPoolExecutor(3)
        self.started = threading.Event()
        self.slow_stream = self._pool.submit(self._read, "slow", True)
        self.waiting = [self._pool.submit(self._read, "wait", stream) for stream in (True, False)]
        assert self.started.wait(20)
        while num_admitted(url) < 3:
            time.sleep(0.05)

    def _read(self, prompt: str, stream: bool) -> tuple[int, httpx.Headers, str]:
        body = TEXT | {"prompt": prompt, "stream": stream, "max_tokens": 90}
        with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=60) as reply:
            text = ""
            for part in reply.iter_text():
                text += part
                self.started.set()
            return reply.status_code, reply.headers, text

    def assert_all_were_told(self) -> None:
        """The started stream got an error event and [DONE], the others 503 with Retry-After, all in OpenAI's form."""
        status, _, text = self.slow_stream.result(30)
        *events, error, done, rest = text.split("\n\n")
        assert (status, done, rest) == (200, "data: [DONE]", "")
        assert events
        bodies = [error.removeprefix("data: ")]
        for reply in self.waiting:
            status, headers, text = reply.result(30)
            assert (status, headers["retry-after"]) == (503, "1")
            bodies.append(text)
        for body in bodies:
            assert json.loads(body)["error"]["message"] == (
                "The server is shutting down and ended this request; try again."
            )


def num_admitted(url: str) -> int:
    line = next(line for line in httpx.get(url + "/metrics").text.splitlines() if "choices_admitted{" in line)
    return int(float(line.split()[-1]))


def deploy(name: str, drain_s: float) -> None:
    from ray import serve

    deployment = {"cpus": 1, "queue_limit": 4, "drain_s": drain_s, "route_prefix": f"/{name}"}
    config = read_config(CONFIG | {"deployment": deployment})
    serve.run(application(config, start_long), name=name, route_prefix=f"/{name}")


async def start_long(config: ClusterConfig) -> ReplicaEngine:
    engine = await start_fake(config)
    engine.group.client.text = "the quick brown fox jumps over the lazy dog " * 10
    engine.group.client.step_sizes = fake_engine.fixed_sizes(1)
    return engine


def test_a_drained_replica_tells_everybody(url: str):
    """As `dflash serve` stops: while it drains the route stays, and new requests read 503 instead of 404."""
    deploy("drained", 20)
    requests = Open(f"{url}/drained")
    with ThreadPoolExecutor(1) as pool:
        begin_s = time.monotonic()
        num_cut = pool.submit(drain_replicas, "drained", 1.0, timeout_s=20)
        while (late := httpx.post(f"{url}/drained/v1/completions", json=TEXT)).status_code == 200:
            assert time.monotonic() - begin_s < 5
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        assert late.json()["error"]["message"].startswith("The server is shutting down")
        assert num_cut.result(20) == 3
    assert 1.0 < time.monotonic() - begin_s < 6
    requests.assert_all_were_told()
    assert drain_replicas("drained", 1.0, timeout_s=20) == 3  # joins the one drain


def test_requests_that_outlast_a_stop_by_serve_are_told(url: str):
    """Serve stops a replica without a word to it (`serve delete`, scale-down, a new version)."""
    from ray import serve

    deploy("deleted", 0.5)
    requests = Open(f"{url}/deleted")
    begin_s = time.monotonic()
    serve.delete("deleted")
    assert 4 < time.monotonic() - begin_s < 14  # it notices after three health checks that do not come
    requests.assert_all_were_told()


def test_without_replicas_there_is_nothing_to_drain(ray_cluster: None, url: str):
    with pytest.raises(DrainFailedError, match="nowhere"):
        drain_replicas("nowhere", 1.0, timeout_s=5)


def test_live_values_restart_nothing():
    config = read_config(CONFIG)
    other = read_config(CONFIG | {"deployment": CONFIG["deployment"] | {"queue_limit": 9}})
    assert live_values(config) == {"queue_limit": 1, "drain_s": 2, "draft_len_schedule": None}
    assert live_values(other)["queue_limit"] == 9
    assert without_live_values(config) == without_live_values(other)


def test_serve_accepts_the_builder(tmp_path) -> None:
    """`serve run cluster.app:build config=FILE` calls it through this function, which refuses all but one parameter."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    file = tmp_path / "config.yaml"
    file.write_text("model: {source: owner/model}\n")
    built = call_user_app_builder_with_args_if_necessary(build, {"config": str(file)})
    assert type(built).__name__ == "Application"
