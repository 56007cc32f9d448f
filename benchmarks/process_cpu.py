"""The processes below one and their CPU seconds, by what they do; from /proc, so Linux alone.

CPU time says what a part costs whatever else the machine does meanwhile, which wall time does not.
"""

import os
from collections import Counter
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# What a command line holds -> what its process is called in results. The first match counts.
_ROLES = (
    ("GpuWorker", "rank"),
    ("ServeReplica", "replica"),
    ("ProxyActor", "proxy"),
    ("haproxy", "proxy"),
    ("ServeController", "controller"),
    ("raylet/raylet", "raylet"),
    ("gcs_server", "gcs"),
    ("dflash serve", "command"),
    ("cluster.cli.main", "command"),
)


def _processes() -> dict[int, tuple[int, float, str]]:
    """pid -> parent, user and system seconds so far, command line."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue  # it ended while we looked
        found[int(stat.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S, command)
    return found


def _of_tree(root: int) -> dict[int, tuple[int, float, str]]:
    """`root` and every process below it."""
    every = _processes()
    found = {}
    for pid, process in every.items():
        above = pid
        while above != root and above in every:
            above = every[above][0]
        if above == root:
            found[pid] = process
    return found


def cpu_seconds(root: int) -> dict[str, float]:
    """User and system seconds so far of `root` and of every process below it, summed by role."""
    total: Counter[str] = Counter()
    for _, seconds, command in _of_tree(root).values():
        total[next((role for mark, role in _ROLES if mark in command), "other of Ray")] += seconds
    return dict(total)


def below(root: int, mark: str = "") -> list[int]:
    """Processes below `root` whose command line holds `mark`."""
    return [pid for pid, (_, _, command) in _of_tree(root).items() if pid != root and mark in command]


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Seconds between two looks, by role."""
    return {role: after[role] - before.get(role, 0.0) for role in after}
