"""The shipped simulated config under Ray Serve: two ranks, the real loop, socket and HTTP path, and no torch."""

import socket
from collections.abc import Iterator

import httpx
import pytest

from cluster.app import build
from cluster.config import load_config
from tests.conftest import REPO_ROOT


@pytest.fixture(scope="module")
def url(ray_cluster: None) -> Iterator[str]:
    from ray import serve

    plain = load_config(REPO_ROOT / "configs" / "simulated.yaml").to_plain()
    plain["engine"]["tensor_parallel_size"] = 2
    plain["simulation"]["speed"] = 20.0
    plain["allow_simulated"] = True
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
    serve.run(build(plain), name="simulated", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def test_requests_of_a_class_are_answered_alike_and_accepted_as_the_class_says(url: str) -> None:
    body = {"model": "simulated", "prompt": "Hello", "max_tokens": 200}
    replies = {}
    for seed in (0, 0, 1):
        reply = httpx.post(url + "/v1/completions", json={**body, "seed": seed}, timeout=60)
        assert reply.headers["x-dflash-simulated"] == "1"
        data = reply.json()
        assert data["system_fingerprint"] == "simulated"
        assert data["usage"]["completion_tokens"] == 200
        assert len(data["choices"][0]["text"].split()) == 200
        assert replies.setdefault(seed, data["choices"]) == data["choices"]
        replies[seed, "rate"] = data["metrics"]["speculative_decoding"]
    easy, hard = (replies[seed, "rate"]["mean_acceptance_length"] for seed in (0, 1))
    assert easy > 4 > 2 > hard
