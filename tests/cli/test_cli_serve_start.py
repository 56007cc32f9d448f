"""What `dflash serve` does on the way to a server, with Ray and Serve scripted."""

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray import serve as ray_serve
from ray.experimental import internal_kv

import cluster.app
from cluster import death_notes
from cluster.cli import local_ray
from cluster.cli.deployment_watch import AppState, StartFailedError, look
from cluster.cli.serve import _Server
from cluster.config import parse_config
from cluster.config_check import num_gpus_needed


def server(*, proxy: str, address: str | None) -> _Server:
    config = parse_config({"model": {"source": "a/b"}, "http": {"proxy": proxy}}, base_dir=Path("/"))
    return _Server(config, address=address, dashboard=False, verbose=False)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """The cluster's key-value store."""
    values: dict[bytes, bytes] = {}
    calls = {
        "put": lambda key, value, *, overwrite, namespace: values.update({key: value}),
        "get": lambda key, *, namespace: values.get(key),
        "del": lambda key, *, namespace: values.pop(key),
        "list": lambda prefix, *, namespace: [key for key in values if key.startswith(prefix)],
    }
    for name, call in calls.items():
        monkeypatch.setattr(internal_kv, f"_internal_kv_{name}", call)
    return values


def test_deaths_before_the_start_are_not_told_as_new(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_many(targets: list[object], **options: object) -> None:
        death_notes.leave("dflash", 0, "a new one")

    monkeypatch.setattr(cluster.app, "build", lambda arguments: None)
    monkeypatch.setattr(ray_serve, "RunTarget", SimpleNamespace)
    monkeypatch.setattr(ray_serve, "run_many", run_many)
    death_notes.leave("dflash", 1, "of a run last week")
    death_notes.leave("other", 0, "of another application")
    server(proxy="python", address="auto")._deploy()
    assert death_notes.take("dflash") == ["a new one"]
    assert death_notes.take("other") == ["of another application"]


@pytest.mark.parametrize(
    ("proxy", "address", "serve_runs", "said"),
    [
        ("haproxy", "auto", False, "http.proxy: haproxy has no effect with --address"),
        ("haproxy", "auto", True, "it keeps the address, port and proxy it was started with"),
        ("haproxy", None, False, None),
        ("python", "auto", False, None),
    ],
)
def test_a_proxy_that_will_not_be_used_is_said(
    proxy: str,
    address: str | None,
    serve_runs: bool,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[object] = []
    monkeypatch.setattr(local_ray, "serve_runs", lambda: serve_runs)
    monkeypatch.setattr(ray_serve, "start", lambda **options: started.append(options))
    server(proxy=proxy, address=address)._start_serve()
    err = capsys.readouterr().err
    assert (said in err) if said else not err
    assert len(started) == (not serve_runs)


@pytest.mark.parametrize(("replicas", "tensor_parallel_size", "needed"), [(1, 1, 1), (2, 4, 8)])
def test_gpus_that_ray_does_not_see_end_the_start(
    replicas: int, tensor_parallel_size: int, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, float] = {"CPU": 8.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: found)
    plain = {
        "model": {"source": "a/b"},
        "engine": {"device": "cuda", "tensor_parallel_size": tensor_parallel_size},
        "deployment": {"replicas": replicas},
    }
    assert num_gpus_needed(parse_config(plain, base_dir=Path("/"))) == needed
    with pytest.raises(ValueError, match=rf"^engine.device: the replicas need {needed} GPU\(s\) in all, .* found 0 on"):
        local_ray.check_gpus(needed)
    found["GPU"] = float(needed)
    local_ray.check_gpus(needed)
    on_cpu = parse_config({"model": {"source": "a/b"}}, base_dir=Path("/"))
    assert num_gpus_needed(on_cpu) == 0


def test_a_replica_that_finds_no_room_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Deployment 'ModelServer' has 1 replicas that have taken more than 30s to be scheduled."
    deployment = SimpleNamespace(message=text, status="UPDATING", replica_states={"STARTING": 1})
    application = SimpleNamespace(status="DEPLOYING", message="", deployments={"ModelServer": deployment})
    monkeypatch.setattr(ray_serve, "status", lambda: SimpleNamespace(applications={"dflash": application}))
    state = look("dflash")
    assert (state.running, state.failure, state.waiting) == (False, None, text)
    shown: list[str | None] = []
    starting = server(proxy="python", address="auto")
    proxy = Future[None]()
    starting._show_start(state, shown.append, proxy)
    starting._show_start(state, shown.append, proxy)
    assert shown == ["starting the engine (1 starting)"] * 2
    assert " ".join(capsys.readouterr().err.split()) == text


def test_the_engine_may_start_while_the_proxy_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def start(**options: object) -> None:
        has_begun.set()
        assert may_end.wait(10)

    monkeypatch.setattr(local_ray, "serve_runs", has_begun.is_set)
    monkeypatch.setattr(ray_serve, "start", start)
    started = server(proxy="python", address=None)
    proxy = started._start_serve()
    assert not proxy.done()
    may_end.set()
    started._wait_for_proxy(proxy)
    assert proxy.done()


@pytest.mark.parametrize("has_controller", [False, True])
def test_a_proxy_that_does_not_start_is_the_failure(has_controller: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun = threading.Event()

    def start(**options: object) -> None:
        if has_controller:
            has_begun.set()
            time.sleep(0.3)
        raise TimeoutError("HTTP proxies not available after 60s.")

    deploying = AppState(running=False, status="DEPLOYING", replicas="1 starting", failure=None)

    def run() -> None:
        proxy = started._start_serve()
        assert has_controller
        while True:  # what the wait for the engine does, which may take minutes
            started._show_start(deploying, lambda text: None, proxy)
            time.sleep(0.01)

    monkeypatch.setattr(local_ray, "serve_runs", has_begun.is_set)
    monkeypatch.setattr(ray_serve, "start", start)
    started = server(proxy="haproxy", address=None)
    with pytest.raises(StartFailedError, match="Ray Serve's haproxy proxy did not start: HTTP proxies not available"):
        run()
