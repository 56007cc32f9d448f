"""The command line of this process as a benchmark's record keeps it."""

import sys
from collections.abc import Sequence
from pathlib import Path


def command_line(argv: Sequence[str] | None = None) -> str:
    """`python` and every argument, each path reduced to its last part: a record names no machine's directories.

    A Hub id (owner/name) and a URL are no paths and stay. argv: sys.argv by default.
    """
    return " ".join(["python", *[_without_directories(word) for word in (sys.argv if argv is None else argv)]])


def _without_directories(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    path = Path(value)
    is_path = "/" in value and "://" not in value and (value.startswith(("/", ".", "~")) or path.exists())
    return option + equals + (path.name if is_path else value)
