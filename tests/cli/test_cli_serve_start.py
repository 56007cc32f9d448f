"""What `dflash serve` does on the way to a server, with Ray and Serve scripted."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import serve as ray_serve
from ray.experimental import internal_kv

import cluster.app
from cluster import death_notes
from cluster.cli import local_ray
from cluster.cli.serve import _Server
from cluster.config import parse_config


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
