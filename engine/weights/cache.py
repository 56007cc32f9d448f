"""The cache of prepared models: where it lies, and how an entry is made once, whole or not at all.

An entry is a directory. It is built in a staging directory beside it (same file system), flushed to disk and renamed
into place while an advisory lock is held, so an entry that exists is complete, whoever dies when.
"""

import errno
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)
_HASH_CHUNK_BYTES = 1 << 20


def cache_root() -> Path:
    """`$DFLASH_CACHE`, else `$XDG_CACHE_HOME/dflash-serve`, else `~/.cache/dflash-serve`."""
    explicit = os.environ.get("DFLASH_CACHE")
    if explicit:
        return Path(explicit).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg).expanduser() if xdg else Path.home() / ".cache"
    return base.absolute() / "dflash-serve"


def entry_name(label: str, *key: object) -> str:
    """A readable directory name that is unique for `key`."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")[:80]
    digest = hashlib.sha256("\0".join(str(part) for part in key).encode()).hexdigest()
    return f"{readable}-{digest[:16]}"


def has_entry(name: str) -> bool:
    """Whether `build_once` has built this entry."""
    return (cache_root() / "models" / name).is_dir()


def build_once(name: str, build: Callable[[Path], None], *, root: Path | None = None) -> Path:
    """Return the cache entry `name`, calling `build(staging directory)` if it does not exist yet.

    Concurrent callers, in any number of processes, build it once: the others wait. Whatever an interrupted builder left
    is removed by the next one, under the lock.

    Raises:
        ValueError: the cache directory cannot be written, or is full.
    """
    models = (root or cache_root()) / "models"
    entry = models / name
    if entry.is_dir():
        return entry
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{name}.lock"):
            if entry.is_dir():
                return entry
            for stale in models.glob(f".{name}.staging-*"):
                logger.info("removing %s, left by an interrupted run", stale)
                shutil.rmtree(stale, ignore_errors=True)  # an orphaned download may still be writing; next time then
            staging = Path(tempfile.mkdtemp(prefix=f".{name}.staging-", dir=models))
            try:
                build(staging)
                staging.chmod(0o755)
                _flush_tree(staging)
                staging.rename(entry)
                _flush(models)
            finally:
                shutil.rmtree(staging, ignore_errors=True)  # gone already after the rename
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        raise ValueError(
            f"the model cache {models} cannot be written ({error.strerror}): make room or make it writable, or set "
            "DFLASH_CACHE to another directory"
        ) from error
    return entry


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive advisory lock. The file stays: unlinking it would let two holders in."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is preparing this model; waiting for it (%s)", path)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _flush_tree(directory: Path) -> None:
    for parent, _, files in os.walk(directory):
        for file in files:
            _flush(Path(parent) / file)
        _flush(Path(parent))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
