"""Where the engine's steps go on a GPU: every kernel of a few decode steps and of a prompt, and what lies between.

    python benchmarks/gpu_trace.py OUT.json --concurrency 16 32 128 --prompts 4096 --seconds 75

The shapes of Qwen3-8B and its drafter with random weights and synthetic acceptance, through the whole engine, its
recorded programs included. For each concurrency: milliseconds of a step between its marks on the device, of a step on
the wall, and a table of the kernels of --steps steps. For each prompt length, alone: milliseconds to its first token
with and without drafts, and the same table.

A kernel's `us` is the time by which it moves the end of what has run so far: kernels that are started early and wait
for the one before count nothing twice, and the tables' sums with `idle_us` give the time of the whole stretch.
"""

import argparse
import json
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from command_line import command_line
from gpu_engine import q8_config, random_prompts
from gpu_lab import Lab, save, show_progress, versions
from torch.profiler import ProfilerActivity, profile

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
# The kernels with which the decode rows' target and what follows its verdict begin (context and drafts).
PHASES = {"_target_rows_kernel": "target", "_commit_kernel": "drafter"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 32, 128])
    parser.add_argument("--prompts", type=int, nargs="*", default=[4096], help="lengths of lone prompts")
    parser.add_argument("--draft-len", type=int, default=15)
    parser.add_argument("--prompt-tokens", type=int, default=400, help="ahead of the decode steps")
    parser.add_argument("--steps", type=int, default=3, help="under the profiler")
    parser.add_argument("--acceptance-length", type=float, default=6.5)
    parser.add_argument("--max-model-len", type=int, default=8704)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--programs", choices=("graphs", "repeated", "eager"))
    parser.add_argument("--seconds", type=float, default=75.0, help="nothing new is begun after so long")
    args = parser.parse_args()
    args.draft_lens, args.tokens = [0, args.draft_len], 256
    return args


class Driver:
    """Requests of one engine."""

    def __init__(self, lab: Lab, device: str) -> None:
        self.lab, self.device, self._count = lab, device, 0

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def add(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[str]:
        names = []
        for prompt in prompts:
            self._count += 1
            names.append(f"t{self._count}")
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
            self.lab.core.add_request(
                EngineRequest(request_id=names[-1], prompt_token_ids=tuple(prompt), params=params)
            )
        return names

    def until_all_decode(self, names: Sequence[str]) -> None:
        seen: set[str] = set()
        while len(seen) < len(names):
            seen |= {delta.request_id for delta in self.lab.core.step() if delta.token_ids}

    def end(self, names: Sequence[str]) -> None:
        for name in names:
            self.lab.core.abort(name)
        while self.lab.core.has_work():
            self.lab.core.step()
        self.sync()

    def first_token_ms(self, prompt: Sequence[int]) -> float:
        self.sync()
        started = time.perf_counter()
        names = self.add([prompt], 4)
        self.until_all_decode(names)
        spent = time.perf_counter() - started
        self.end(names)
        return 1e3 * spent


def table(run: Callable[[], object], sync: Callable[[], None], scratch: Path) -> dict[str, Any]:
    """Kernels of what `run` puts on the device, by phase, name and grid, the dearest first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=False) as profiler:
        run()
        sync()
    path = scratch / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in GPU_WORK]
    return reckon(events)


def reckon(events: list[dict[str, Any]]) -> dict[str, Any]:
    """`table` of a trace's events, times in microseconds."""
    events = sorted(events, key=lambda e: (e["ts"], e["ts"] + e["dur"]))
    if not events:
        return {"kernels": []}
    end, idle = events[0]["ts"], 0.0
    gaps: list[tuple[float, str]] = []
    found: dict[tuple[str, str, str], list[float]] = {}
    phases: dict[str, float] = {}
    phase = "start"
    for event in events:
        phase = PHASES.get(event["name"], phase)
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


def decode(driver: Driver, args: argparse.Namespace, concurrency: int, vocab: int, scratch: Path) -> dict[str, Any]:
    core = driver.lab.core
    names = driver.add(random_prompts(concurrency, args.prompt_tokens, vocab), args.tokens)
    driver.until_all_decode(names)
    for _ in range(3):
        core.step()
    device_s: list[float] = []
    original = driver.lab.rank.runner.collect

    def collect() -> Any:
        result = original()
        device_s.append(result.duration_s)
        return result

    driver.lab.rank.runner.collect = collect
    started = time.perf_counter()
    for _ in range(8):
        core.step()
    wall_ms = 1e3 * (time.perf_counter() - started) / 8
    driver.lab.rank.runner.collect = original

    def steps() -> None:
        for _ in range(args.steps):
            core.step()

    row = {
        "concurrency": concurrency,
        "draft_len": args.draft_len,
        "step_device_ms": round(1e3 * statistics.median(device_s), 4),
        "step_wall_ms": round(wall_ms, 4),
        "steps": args.steps,
        **table(steps, driver.sync, scratch),
    }
    driver.end(names)
    return row


def lone_prompt(driver: Driver, args: argparse.Namespace, length: int, vocab: int, scratch: Path) -> dict[str, Any]:
    prompt = random_prompts(1, length, vocab)[0]
    row: dict[str, Any] = {"prompt": length, "first_token_ms": {}}
    for draft_len in (0, args.draft_len):
        driver.lab.set_draft_len(draft_len)
        times = [driver.first_token_ms(prompt) for _ in range(6)][1:]
        row["first_token_ms"][draft_len] = [round(t, 3) for t in times]
    return row | table(lambda: driver.first_token_ms(prompt), driver.sync, scratch)


def main() -> None:
    args = parse()
    began = time.perf_counter()
    show_progress()
    record: dict[str, Any] = {"command": command_line(), "versions": versions(), "rows": [], "left_out": []}
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        scratch = Path(directory)
        config = q8_config(args, scratch)
        lab = Lab(config)
        record["start_s"] = round(lab.start_s, 1)
        driver, vocab = Driver(lab, args.device), config.target.vocab_size
        parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            (f"{c} requests", lambda c=c: decode(driver, args, c, vocab, scratch)) for c in reversed(args.concurrency)
        ]
        parts += [(f"prompt of {n}", lambda n=n: lone_prompt(driver, args, n, vocab, scratch)) for n in args.prompts]
        for name, part in parts:
            if time.perf_counter() - began > args.seconds:
                record["left_out"].append(name)
                continue
            lab.set_draft_len(args.draft_len)
            try:
                row = part()
            except Exception:
                record["left_out"].append(f"{name}: {traceback.format_exc()[-1500:]}")
                print(record["left_out"][-1], flush=True)
                continue
            record["rows"].append(row)
            print("ROW", json.dumps({k: v for k, v in row.items() if k not in ("kernels", "longest_gaps")}), flush=True)
            for kernel in row["kernels"][:24]:
                print("   ", json.dumps(kernel), flush=True)
            save(args.out, record)
        lab.close()
    record["seconds"] = round(time.perf_counter() - began, 1)
    save(args.out, record)


if __name__ == "__main__":
    main()
