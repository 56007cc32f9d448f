"""What all commands share towards the person at the terminal: consoles and the one way to fail."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

# Exit statuses: 1, the work failed; 2, it was asked for wrongly (as click does for bad options).
FAILED = 1
BAD_USAGE = 2


def stdout() -> Console:
    """Console for results. Made per call, so that a redirected stdout is followed."""
    return Console(highlight=False, soft_wrap=True)


def stderr() -> Console:
    """Console for progress and errors."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str, *, status: int = FAILED) -> NoReturn:
    """Print `error: message` and leave with `status`; no traceback, since the message says what to do."""
    stderr().print(f"error: {message}", style="bold red", markup=False)
    raise typer.Exit(status)


@contextlib.contextmanager
def user_errors(*kinds: type[Exception], status: int = BAD_USAGE) -> Iterator[None]:
    """Turn exceptions that speak to the user into `fail`."""
    try:
        yield
    except kinds as error:
        fail(str(error), status=status)


def check_output_file(option: str, path: Path | None) -> None:
    """`fail`, before the work, where the file that an option names could not be written after it."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        fail(f"{option}: no such directory: {path.absolute().parent}", status=BAD_USAGE)
    if path.is_dir():
        fail(f"{option}: {path} is a directory; name a file", status=BAD_USAGE)
