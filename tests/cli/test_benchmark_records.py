"""A benchmark's record holds its whole command line, but no directory of the machine."""

import runpy
from pathlib import Path


def test_paths_are_reduced_to_their_names(repo_root: Path, tmp_path: Path) -> None:
    command_line = runpy.run_path(str(repo_root / "benchmarks" / "command_line.py"))["command_line"]
    argv = [
        str(repo_root / "benchmarks" / "soak.py"),
        "../out.json",
        f"--model={tmp_path / 'model'}",
        "--drafter",
        "owner/name",
        "--url",
        "http://127.0.0.1:8000",
        "--clients",
        "64",
    ]
    assert command_line(argv) == (
        "python soak.py out.json --model=model --drafter owner/name --url http://127.0.0.1:8000 --clients 64"
    )
