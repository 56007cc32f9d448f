"""Whatever a simulated device answers says that it is simulated, and nobody gets one by accident."""

from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import MODEL, ApiServer, running
from typer.testing import CliRunner

from cluster.app import build
from cluster.cli.main import app
from cluster.config import ConfigError, load_config
from tests.conftest import REPO_ROOT

CONFIG_FILE = REPO_ROOT / "configs" / "simulated.yaml"


@pytest.fixture(scope="module")
def simulated(tokenizer) -> Iterator[ApiServer]:
    with running(ApiServer(tokenizer, fabrication="simulated")) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": "the"}),
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "the"}]}),
    ],
)
def test_bodies_chunks_and_headers_say_so(simulated: ApiServer, path: str, body: dict[str, Any]) -> None:
    reply = simulated.http.post(path, json=body)
    assert reply.headers["x-dflash-simulated"] == "1"
    assert reply.json()["system_fingerprint"] == "simulated"
    reply = simulated.http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    assert reply.headers["x-dflash-simulated"] == "1"
    chunks = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 3
    assert all('"system_fingerprint":"simulated"' in chunk for chunk in chunks)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/nothing"])
def test_every_other_answer_has_the_header(simulated: ApiServer, path: str) -> None:
    assert simulated.http.get(path).headers["x-dflash-simulated"] == "1"


def test_errors_have_the_header_and_strict_clients_can_read_it_all(simulated: ApiServer) -> None:
    assert simulated.http.post("/v1/completions", json={}).headers["x-dflash-simulated"] == "1"
    completion = simulated.client().completions.create(model=MODEL, prompt="the")
    assert completion.system_fingerprint == "simulated"


def test_a_real_device_says_nothing(server: ApiServer) -> None:
    reply = server.http.post("/v1/completions", json={"model": MODEL, "prompt": "the"})
    assert "x-dflash-simulated" not in reply.headers
    assert "system_fingerprint" not in reply.json()


def test_serve_refuses_it_without_the_flag() -> None:
    result = CliRunner().invoke(app, ["serve", str(CONFIG_FILE)])
    assert result.exit_code == 2
    assert "simulated answers every request with random tokens" in result.stderr
    assert "--allow-simulated" in result.stderr


@pytest.mark.parametrize("allow", [True, "true"])
def test_the_builder_wants_it_said(allow: object) -> None:
    config = load_config(CONFIG_FILE)
    for args in (CONFIG_FILE, config, {"config": CONFIG_FILE}, {**config.to_plain(), "allow_simulated": "false"}):
        with pytest.raises(ConfigError, match="allow_simulated: true"):
            build(args)
    build({"config": CONFIG_FILE, "allow_simulated": allow})
    build({**config.to_plain(), "allow_simulated": allow})
    with pytest.raises(ConfigError, match="must be true or false, got 1"):
        build({"config": CONFIG_FILE, "allow_simulated": 1})


def test_synthetic_acceptance_is_served_only_when_said_and_marked(tokenizer) -> None:
    with running(ApiServer(tokenizer, fabrication="synthetic")) as server:
        reply = server.http.post("/v1/completions", json={"model": MODEL, "prompt": "the"})
        assert reply.headers["x-dflash-synthetic"] == "1"
        assert reply.json()["system_fingerprint"] == "synthetic"
    plain = load_config(REPO_ROOT / "configs" / "smollm2-135m.yaml").to_plain()
    plain["engine"]["synthetic_acceptance_length"] = 3.5
    with pytest.raises(
        ConfigError, match=r"accepted by decree, so answers mean nothing; if that is meant, add allow_s"
    ):
        build(plain)
    build({**plain, "allow_simulated": True})
    del plain["speculative_config"], plain["engine"]["draft_len_choices"]
    with pytest.raises(ConfigError, match=r"engine.synthetic_acceptance_length: has no effect without speculative_con"):
        build(plain)
