"""Where the engine's steps go on a GPU: every kernel of a few decode steps and of a prompt, and what lies between.

    python benchmarks/gpu_trace.py OUT.json --concurrency 16 32 128 --prompts 4096 --seconds 75

The shapes of Qwen3-8B and its drafter with random weights and synthetic acceptance, through the whole engine, its
recorded programs included. For each concurrency, all ahead of the first trace: milliseconds of a step between its marks
on the device and on the wall, and of the host's work for it: mean, median and the three longest; of the mean: launching
the recorded programs, and Python's collections of garbage; right behind, microseconds of a loop that is always the
same, as others may slow the host's core. With --rounds all of these again, one after the other: the median
round counts. Then a table of the kernels of --steps steps. For each prompt length, alone: milliseconds to its first
token with and without drafts, and the same table.

`trace_table.py` tells what the tables hold, `peer_trace.py` makes them of vLLM.
"""

import argparse
import gc
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
from gpu_lab import Lab, Run, counted_waits, save, show_progress, versions
from torch.profiler import ProfilerActivity, profile
from trace_table import GpuMonitor, device_events, reckon

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

# The kernels with which the decode rows' target and what follows its verdict begin (context and drafts).
PHASES = {"_take_upload_kernel": "target", "_commit_kernel": "drafter"}
MEASURED_STEPS = 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 32, 128])
    parser.add_argument("--prompts", type=int, nargs="*", default=[4096], help="lengths of lone prompts")
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[15], help="decode steps at each")
    parser.add_argument("--prompt-tokens", type=int, default=400, help="ahead of the decode steps")
    parser.add_argument("--rounds", type=int, default=1, help="of the times of decode steps")
    parser.add_argument("--warm-s", type=float, default=0.5, help="of decode steps ahead of what is measured")
    parser.add_argument("--tokens", type=int, default=1024, help="room for the answers")
    parser.add_argument("--steps", type=int, default=3, help="under the profiler")
    parser.add_argument("--acceptance-length", type=float, default=6.5)
    parser.add_argument("--max-model-len", type=int, default=8704)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", type=Path, help="checkpoints as random_models.py writes them, which it does here")
    parser.add_argument("--programs", choices=("graphs", "repeated", "eager"))
    parser.add_argument("--seconds", type=float, default=75.0, help="nothing new is begun after so long")
    args = parser.parse_args()
    args.measured_lens, args.draft_lens = args.draft_lens, [0, *args.draft_lens]
    return args


class Replays:
    """Seconds that the host spent on launching recorded programs, of engines made after it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        original = torch.cuda.CUDAGraph.replay

        def replay(graph: torch.cuda.CUDAGraph) -> None:
            started = time.perf_counter()
            original(graph)
            self.seconds += time.perf_counter() - started

        torch.cuda.CUDAGraph.replay = replay


def fixed_loop_us() -> float:
    """How fast the host's core is now."""
    taken_s = []
    for _ in range(25):
        started, made = time.perf_counter(), {}
        for number in range(200):
            made[number] = (number, number)
        taken_s.append(time.perf_counter() - started)
    return 1e6 * statistics.median(taken_s)


class Collections:
    """Seconds that Python's garbage collector ran, from its making on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.seconds += now - self._began

    def close(self) -> None:
        gc.callbacks.remove(self._note)


class Driver:
    """Requests of one engine."""

    def __init__(self, lab: Lab, device: str, replays: Replays | None = None) -> None:
        self.lab, self.device, self.replays, self._count = lab, device, replays, 0
        self.monitor = GpuMonitor()

    @property
    def launches_s(self) -> float:
        return self.replays.seconds if self.replays else 0.0

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
    return reckon(device_events(path), PHASES)


def decoding(driver: Driver, args: argparse.Namespace, concurrency: int, draft_len: int, vocab: int) -> list[str]:
    """The names of requests that all decode, for `warm_s` seconds already."""
    driver.lab.set_draft_len(draft_len)
    names = driver.add(random_prompts(concurrency, args.prompt_tokens, vocab), args.tokens)
    driver.until_all_decode(names)
    begun = time.perf_counter()
    while time.perf_counter() < begun + args.warm_s:
        driver.lab.core.step()
    return names


def timed(driver: Driver, args: argparse.Namespace, concurrency: int, draft_len: int, vocab: int) -> dict[str, Any]:
    """Milliseconds of decode steps, measured before any profiler ran: it makes every later launch dearer."""
    core, runner = driver.lab.core, driver.lab.rank.runner
    begun = time.perf_counter()
    names = decoding(driver, args, concurrency, draft_len, vocab)
    device_s: list[float] = []
    original = runner.collect

    def collect() -> Any:
        result = original()
        device_s.append(result.duration_s)
        return result

    runner.collect = collect
    waited, collections = Run(seconds=0.0, num_tokens=0), Collections()
    walls_s: list[float] = []
    hosts_s: list[float] = []
    launches_s = driver.launches_s
    with counted_waits(waited):
        for _ in range(MEASURED_STEPS):
            started, waits_s = time.perf_counter(), waited.wait_s
            core.step()
            walls_s.append(time.perf_counter() - started)
            hosts_s.append(walls_s[-1] - (waited.wait_s - waits_s))
    collections.close()
    loop_us = fixed_loop_us()
    launches_s = driver.launches_s - launches_s
    gpu = driver.monitor.since(begun + args.warm_s / 2)
    runner.collect = original
    driver.end(names)
    return {
        "concurrency": concurrency,
        "draft_len": draft_len,
        "gpu": gpu,
        "step_device_ms": round(1e3 * statistics.median(device_s), 4),
        "step_wall_ms": round(1e3 * statistics.fmean(walls_s), 4),
        "host_ms": round(1e3 * statistics.fmean(hosts_s), 4),
        "host_median_ms": round(1e3 * statistics.median(hosts_s), 4),
        "host_longest_ms": [round(1e3 * s, 3) for s in sorted(hosts_s)[:-4:-1]],
        "host_launches_ms": round(1e3 * launches_s / MEASURED_STEPS, 4),
        "host_collections_ms": round(1e3 * collections.seconds / MEASURED_STEPS, 4),
        "fixed_loop_us": round(loop_us, 2),
    }


def median_round(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The round in the middle by the host's median work, with that and the fixed loop's time of all, in order."""
    by_work = sorted(rounds, key=lambda row: row["host_median_ms"])
    row = dict(by_work[(len(by_work) - 1) // 2])
    return row | {f"all_{name}": [r[name] for r in rounds] for name in ("host_median_ms", "fixed_loop_us")}


def traced(
    driver: Driver, args: argparse.Namespace, concurrency: int, draft_len: int, vocab: int, scratch: Path
) -> dict[str, Any]:
    """The table of decode steps' kernels."""
    names = decoding(driver, args, concurrency, draft_len, vocab)

    def steps() -> None:
        for _ in range(args.steps):
            driver.lab.core.step()

    found = table(steps, driver.sync, scratch)
    driver.end(names)
    return {"steps": args.steps} | found


def lone_prompt(driver: Driver, args: argparse.Namespace, length: int, vocab: int, scratch: Path) -> dict[str, Any]:
    prompt = random_prompts(1, length, vocab)[0]
    row: dict[str, Any] = {"prompt": length, "first_token_ms": {}}
    for draft_len in (0, max(args.measured_lens)):
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
        config = q8_config(args, args.models or scratch, weights=args.models is not None)
        replays = Replays()
        lab = Lab(config)
        record["start_s"] = round(lab.start_s, 1)
        driver, vocab = Driver(lab, args.device, replays), config.target.vocab_size
        cases = [(c, k) for c in reversed(args.concurrency) for k in args.measured_lens]
        rounds = [{case: timed(driver, args, *case, vocab) for case in cases} for _ in range(args.rounds)]
        times = {case: median_round([found[case] for found in rounds]) for case in cases}
        for row in times.values():
            print("TIMED", json.dumps(row), flush=True)
        # Where the time does not last for a table, the row has none.
        record["rows"] = [*times.values()]
        save(args.out, record)
        parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            (f"kernels of {c} requests, K = {k}", lambda c=c, k=k: traced(driver, args, c, k, vocab, scratch))
            for c, k in cases
        ]
        parts += [(f"prompt of {n}", lambda n=n: lone_prompt(driver, args, n, vocab, scratch)) for n in args.prompts]
        for number, (name, part) in enumerate(parts):
            if time.perf_counter() - began > args.seconds:
                record["left_out"].append(name)
                continue
            try:
                row = part()
            except Exception:
                record["left_out"].append(f"{name}: {traceback.format_exc()[-1500:]}")
                print(record["left_out"][-1], flush=True)
                continue
            if number < len(cases):
                row = record["rows"][number] = record["rows"][number] | row
            else:
                record["rows"].append(row)
            print("ROW", json.dumps({k: v for k, v in row.items() if k not in ("kernels", "longest_gaps")}), flush=True)
            for kernel in row["kernels"][:24]:
                print("   ", json.dumps(kernel), flush=True)
            save(args.out, record)
        driver.monitor.close()
        lab.close()
    record["seconds"] = round(time.perf_counter() - began, 1)
    save(args.out, record)


if __name__ == "__main__":
    main()
