"""CPU seconds of the processes below one, by what they do; from /proc, so Linux alone.

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


def cpu_seconds(root: int) -> dict[str, float]:
    """User and system seconds so far of `root` and of every process below it, summed by role."""
    stats = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue  # it ended while we looked
        stats[int(stat.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S, command)
    total: Counter[str] = Counter()
    for pid, (_, seconds, command) in stats.items():
        above = pid
        while above != root and above in stats:
            above = stats[above][0]
        if above == root:
            total[next((role for mark, role in _ROLES if mark in command), "other of Ray")] += seconds
    return dict(total)


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Seconds between two looks, by role."""
    return {role: after[role] - before.get(role, 0.0) for role in after}
