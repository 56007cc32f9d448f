"""The application under Ray Serve with a scripted engine: requests, live values, and a replica that ends itself."""

import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fake_engine
import httpx
import pytest
from fake_engine import FakeEngine, build_tokenizer

from cluster.app import application, build, live_values, read_config, without_live_values
from cluster.config import ClusterConfig
from cluster.replica_engine import ReplicaEngine
from workers.engine_client import EngineDeadError

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
        pass


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


def test_refusals_carry_the_envelope(url: str):
    assert httpx.post(url + "/v1/completions", json=TEXT | {"n": 4}).json()["error"]["param"] == "n"
    assert httpx.get(url + "/nothing").json()["error"]["type"] == "invalid_request_error"


def test_a_dead_engine_ends_the_replica_and_a_new_one_serves(url: str):
    before = replica_of(url)
    reply = httpx.post(url + "/v1/completions", json=TEXT | {"prompt": "die"}, timeout=20)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    deadline = time.monotonic() + 40
    while True:
        try:
            reply = httpx.post(url + "/v1/completions", json=TEXT, timeout=5)
            if reply.status_code == 200 and replica_of(url) != before:
                break
        except httpx.HTTPError:
            pass  # the proxy may cut a request to the ending replica
        assert time.monotonic() < deadline, "no new replica"
        time.sleep(0.5)


def test_live_values_restart_nothing():
    config = read_config(CONFIG)
    other = read_config(CONFIG | {"deployment": CONFIG["deployment"] | {"queue_limit": 9}})
    assert live_values(config) == {"queue_limit": 1, "draft_len_schedule": None}
    assert live_values(other)["queue_limit"] == 9
    assert without_live_values(config) == without_live_values(other)


def test_serve_accepts_the_builder(tmp_path) -> None:
    """`serve run cluster.app:build config=FILE` calls it through this function, which refuses all but one parameter."""
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    file = tmp_path / "config.yaml"
    file.write_text("model: {source: owner/model}\n")
    built = call_user_app_builder_with_args_if_necessary(build, {"config": str(file)})
    assert type(built).__name__ == "Application"
