"""Facts of a checkpoint directory that need no tensor to be read: its dtype, size and identity."""

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


def checkpoint_dtype(directory: Path) -> str | None:
    """The dtype `config.json` names ("bfloat16"), None if it names none."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    dtype = config.get("dtype", config.get("torch_dtype"))
    return None if dtype is None else str(dtype).removeprefix("torch.")


def count_parameters(directory: Path) -> int:
    """Elements of all tensors of the directory's safetensors files.

    Raises:
        ValueError: a file that is not in safetensors format.
    """
    total = 0
    for path in weight_files(directory):
        header = json.loads(_header(path))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total


def tensor_names(directory: Path) -> frozenset[str] | None:
    """Names of the tensors in the directory's safetensors files; None without a file.

    Raises:
        ValueError: a file that is not in safetensors format.
    """
    paths = [path for path in weight_files(directory) if path.is_file()]
    if not paths:
        return None
    return frozenset(name for path in paths for name in json.loads(_header(path)) if name != "__metadata__")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files a loader reads, by name: those of the index when there is one."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [directory / name for name in sorted(set(weight_map.values()))]
    return sorted(directory.glob("*.safetensors"))


def checkpoint_identity(directory: Path, *, weights: bool = True) -> str:
    """A hex digest that changes when the checkpoint does, without reading the weights.

    weights: False for an engine that reads none of them. Covers config.json, and of every weight file name, size,
    header and modification time; for a file of the Hugging Face cache, whose name there is a hash of its content, that
    name instead of the time.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in weight_files(directory) if weights else ():
        status = path.stat()
        blob = path.resolve()
        stamp = blob.name if blob.parent.name == "blobs" else str(status.st_mtime_ns)
        digest.update(f"\0{path.name}\0{status.st_size}\0{stamp}\0".encode())
        digest.update(_header(path))
    return digest.hexdigest()


def _header(path: Path) -> bytes:
    """The JSON in front of a file's tensors, checked to describe exactly what follows it."""
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        header = stream.read(length) if 0 < length <= _MAX_HEADER_BYTES else b""
    try:
        tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        data_len = max((entry["data_offsets"][1] for entry in tensors), default=0)
    except (ValueError, AttributeError, TypeError, LookupError):
        data_len = -1
    if len(header) != length or path.stat().st_size != 8 + length + data_len:
        raise ValueError(f"{path} is not a safetensors file, or it is cut short; fetch it again")
    return header
