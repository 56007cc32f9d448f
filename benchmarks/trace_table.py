"""A profiler's trace of a GPU as a table of its kernels, idle gaps included.

A kernel's `us` is the time by which it moves the end of what has run so far: kernels that are started early and wait
for the one before count nothing twice, and the table's sum with `idle_us` gives the time of the whole stretch.
"""

import contextlib
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def device_events(path: Path) -> list[dict[str, Any]]:
    """What ran on the GPU, of a trace in Chrome's format."""
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") in GPU_WORK]


class GpuMonitor:
    """Samples nvidia-smi ten times a second beside what is measured; without that program it has nothing to say."""

    FIELDS = ("clocks.sm", "power.draw", "temperature.gpu")

    def __init__(self) -> None:
        self._samples: list[tuple[float, list[float]]] = []
        command = ["nvidia-smi", f"--query-gpu={','.join(self.FIELDS)}", "--format=csv,noheader,nounits", "-lms", "100"]
        try:
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            with contextlib.suppress(ValueError):
                self._samples.append((time.perf_counter(), [float(word) for word in line.split(",")]))

    def since(self, started: float) -> dict[str, float]:
        """Medians of MHz, W and degrees from a time of `perf_counter` on."""
        taken = [values for at, values in self._samples if at >= started]
        return {name: statistics.median([v[i] for v in taken]) for i, name in enumerate(self.FIELDS)} if taken else {}

    def close(self) -> None:
        if hasattr(self, "_child"):
            self._child.terminate()


def reckon(events: list[dict[str, Any]], phases_of: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The kernels by phase, name and grid, the dearest first; times in microseconds.

    phases_of: names of kernels with which a phase begins.
    """
    begins = phases_of or {}
    events = sorted(events, key=lambda e: (e["ts"], e["ts"] + e["dur"]))
    if not events:
        return {"kernels": []}
    end, idle = events[0]["ts"], 0.0
    gaps: list[tuple[float, str]] = []
    found: dict[tuple[str, str, str], list[float]] = {}
    phases: dict[str, float] = {}
    phase = "start"
    for event in events:
        phase = begins.get(event["name"], phase)
        start, stop = event["ts"], event["ts"] + event["dur"]
        if start > end:
            idle += start - end
            gaps.append((round(start - end, 1), event["name"][:60]))
        moved = max(0.0, stop - max(start, end))
        end = max(end, stop)
        key = (phase, event["name"], str(event.get("args", {}).get("grid", "")))
        found.setdefault(key, []).append(moved)
        phases[phase] = phases.get(phase, 0.0) + moved
    whole = end - events[0]["ts"]
    rows = [
        {
            "phase": phase,
            "name": name[:140],
            "grid": grid,
            "calls": len(times),
            "us": round(sum(times), 1),
            "each_us": round(sum(times) / len(times), 2),
            "share": round(sum(times) / whole, 4),
        }
        for (phase, name, grid), times in found.items()
    ]
    return {
        "whole_us": round(whole, 1),
        "idle_us": round(idle, 1),
        "phases_us": {phase: round(us, 1) for phase, us in phases.items()},
        "longest_gaps": sorted(gaps, reverse=True)[:12],
        "kernels": sorted(rows, key=lambda row: -row["us"]),
    }
