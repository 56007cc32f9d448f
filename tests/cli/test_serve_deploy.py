"""The README's serve.yaml with Ray's own commands: `serve deploy`, a changed live value, `serve shutdown`."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.cli.local_ray import descendants
from tests.conftest import find_free_port
from tests.toy import make_drafter, make_target

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def environment(repo_root: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(repo_root), "RAY_ADDRESS": ""}


@pytest.fixture(scope="module")
def dashboard(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a one-node cluster's dashboard, which `serve deploy` talks to. Its processes end by their pids."""
    port, ray_port, client_port = find_free_port(), find_free_port(), find_free_port()
    options = ["--head", "--block", f"--port={ray_port}", f"--ray-client-server-port={client_port}", "--num-cpus=2"]
    options += [f"--dashboard-port={port}", "--object-store-memory=104857600", "--disable-usage-stats"]
    head = subprocess.Popen(
        [BIN / "ray", "start", *options],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    wait_for(f"{address}/api/version", 60)
    yield address
    ours = [head.pid, *descendants(head.pid)]
    head.send_signal(signal.SIGTERM)
    try:
        head.wait(30)
    finally:
        for pid in ours:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def wait_for(url: str, limit_s: float) -> bytes:
    deadline_s = time.monotonic() + limit_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                return response.read()
        except OSError:  # HTTPError too
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.25)


def serve(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [BIN / "serve", *arguments], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def readme_s_serve_yaml(repo_root: Path) -> dict:
    text = (repo_root / "README.md").read_text()
    block = text.split("# serve.yaml\n")[1].split("```")[0]
    return yaml.safe_load(block)


def test_deploy_answer_reload_and_shut_down(
    repo_root: Path, environment: dict[str, str], dashboard: str, tmp_path: Path
) -> None:
    target = make_target(tmp_path / "target", kind="qwen3")
    make_drafter(tmp_path / "drafter", target)
    port = find_free_port()
    deployed = readme_s_serve_yaml(repo_root)
    deployed["http_options"]["port"] = port
    deployed["applications"][0]["args"]["config"] = str(tmp_path / "toy.yaml")

    config = {
        "model": {"source": str(target), "served_name": "toy", "max_model_len": 128},
        "speculative_config": {
            "decoding_type": "DFlash",
            "speculative_model": str(tmp_path / "drafter"),
            "max_draft_len": 3,
        },
        "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 64, "threads": 1, "kv_cache": {"blocks": 64}},
        "deployment": {"queue_limit": 5, "drain_s": 1},
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(config))

    def deploy() -> None:
        (tmp_path / "serve.yaml").write_text(yaml.safe_dump(deployed))
        serve(environment, "deploy", "-a", dashboard, str(tmp_path / "serve.yaml"))

    deploy()
    url = f"http://127.0.0.1:{port}"
    wait_for(f"{url}/health", 90)
    status, answer = ask(url, n=1)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
    replica = replica_of(url)

    assert ask(url, n=4)[0] == 200  # two of them wait
    live = {"queue_limit": 0, "drain_s": 1, "draft_len_schedule": None}
    deployed["applications"][0]["deployments"] = [{"name": "ModelServer", "user_config": live}]
    deploy()
    deadline_s = time.monotonic() + 30
    while ask(url, n=4)[0] == 200:
        assert time.monotonic() < deadline_s, "the new queue_limit is not in force"
        time.sleep(0.5)
    assert ask(url, n=2)[0] == 200
    assert replica_of(url) == replica  # a live value restarts nothing

    serve(environment, "shutdown", "-y", "-a", dashboard)
    deadline_s = time.monotonic() + 30
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
        except OSError:
            return
        assert time.monotonic() < deadline_s, "it still answers"
        time.sleep(0.5)


def ask(url: str, *, n: int) -> tuple[int, dict]:
    body = {"model": "toy", "messages": [{"role": "user", "content": "fox"}], "max_tokens": 8, "temperature": 0, "n": n}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body | {"ignore_eos": True}).encode())
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def replica_of(url: str) -> str:
    return wait_for(f"{url}/metrics", 10).decode().split('replica="')[1].split('"')[0]
