"""Times of GPU work from replays of CUDA graphs, and the facts of the machine that a record keeps."""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from command_line import command_line

READ_BYTES_PER_S = 4.3e12  # of an H200, both directions of a large device-to-device copy


def graph_us(calls: Sequence[Callable[[], object]], *, repeats: int = 7, least_us: float = 300.0) -> float:
    """Median microseconds of one call. `calls` are captured one after another in one graph: give each its own data, so
    that together they exceed the L2 cache."""
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    replays = 1
    while True:
        times = [_elapsed_us(graph, replays) for _ in range(2)]
        if min(times) >= least_us or replays >= 64:
            break
        replays *= 4
    times = [_elapsed_us(graph, replays) for _ in range(repeats)]
    return statistics.median(times) / replays / len(calls)


def _elapsed_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def compile_in_parallel(script: str, arguments: Sequence[str]) -> None:
    """Runs this script once per core but two with --part i/n added, so that Triton's cache holds every kernel."""
    count = max(1, min(14, (os.cpu_count() or 3) - 2))
    workers = [
        subprocess.Popen([sys.executable, script, *arguments, "--part", f"{i}/{count}"], stdout=subprocess.DEVNULL)
        for i in range(count)
    ]
    for worker in workers:
        worker.wait()


def part_of(text: str | None) -> Callable[[int], bool]:
    """Whether item i belongs to part "k/n"; every item to None."""
    if text is None:
        return lambda item: True
    k, n = (int(word) for word in text.split("/"))
    return lambda item: item % n == k


def machine() -> dict[str, object]:
    """GPU, driver and versions."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": installed("triton"),
        "flash_attn_4": installed("flash-attn-4"),
        "python": platform.python_version(),
    }


def write(path: Path | None, results: object, **more: object) -> None:
    """Prints the record, or writes it where a path is given."""
    record = {"command": command_line(), "machine": machine(), **more, "results": results}
    if path is None:
        print(json.dumps(record))
    else:
        path.write_text(json.dumps(record, indent=1) + "\n")
