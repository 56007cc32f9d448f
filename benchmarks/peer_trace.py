"""Where vLLM's decode steps go on a GPU: the tables of `gpu_trace.py`, of the engine that `peer_vllm.py` measures.

    python benchmarks/peer_trace.py OUT.json --target DIR --drafter DIR --draft-lens 15 7 --concurrency 128 32 16

Qwen3-8B's shapes, checkpoints by random_models.py, synthetic acceptance; needs vllm. One engine per draft length. For
each concurrency: the median time between its outputs, the GPU's clock and power meanwhile, the kernels of a few steps,
and how many different tokens came out.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_load import random_prompt
from peer_vllm import SETTINGS, VllmEngine
from trace_table import GpuMonitor, device_events, reckon


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[15])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[128, 32, 16])
    parser.add_argument("--acceptance-length", type=float, default=6.5)
    parser.add_argument("--max-model-len", type=int, default=33024)
    parser.add_argument("--kv-gib", type=float, default=40.0)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--warm-s", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    args.workload, args.memory_share = "q8", 0.6
    return args


def decode(engine: VllmEngine, monitor: GpuMonitor, args: argparse.Namespace, concurrency: int, traces: Path) -> dict:
    """Decode steps of so many requests, first without the profiler, then a few with it."""
    names = [f"{concurrency}-{index}" for index in range(concurrency)]
    for seed, name in enumerate(names):
        engine.add(name, random_prompt(args.prompt_tokens, seed, high=150000), 4096, True)
    seen: set[str] = set()
    while len(seen) < concurrency:
        seen |= {name for name, count, _ in engine.step() if count}
    engine.seen.clear()
    began, times = time.perf_counter(), []
    while time.perf_counter() < began + args.warm_s:
        counts = [count for _, count, _ in engine.step()]
        if len(counts) == concurrency:
            times.append(time.perf_counter())
    gpu = monitor.since(began + args.warm_s / 2)
    gaps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
    before = set(traces.glob("*.json"))
    engine.profile(True)
    for _ in range(args.steps + 12):
        engine.step()
    engine.profile(False)
    engine.abort(names)
    found: dict[str, Any] = {"kernels": []}
    for _ in range(200):
        written = [path for path in traces.glob("*.json") if path not in before and "async_llm" not in path.name]
        if written:
            found = reckon(device_events(written[0]))
            break
        time.sleep(0.05)
    gap = statistics.median(gaps) if gaps else None
    tokens = dict(tokens=engine.seen.total(), different_tokens=len(engine.seen))
    return dict(concurrency=concurrency, gpu=gpu, gap_ms=gap, steps=args.steps, **tokens, **found)


def main() -> None:
    args = parse()
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    rows: list[dict[str, Any]] = []
    monitor = GpuMonitor()
    with tempfile.TemporaryDirectory() as directory:
        for draft_len in args.draft_lens:
            traces = Path(directory) / str(draft_len)
            engine = VllmEngine(
                args,
                draft_len,
                profiler_config=dict(
                    profiler="torch",
                    torch_profiler_dir=str(traces),
                    torch_profiler_with_stack=False,
                    torch_profiler_use_gzip=False,
                    torch_profiler_dump_cuda_time_total=False,
                    ignore_frontend=True,
                    max_iterations=args.steps,
                ),
            )
            for concurrency in args.concurrency:
                rows.append(dict(draft_len=draft_len) | decode(engine, monitor, args, concurrency, traces))
                args.out.write_text(json.dumps(rows) + "\n")
                print("ROW", json.dumps({k: v for k, v in rows[-1].items() if k != "kernels"}), flush=True)
                for kernel in rows[-1]["kernels"][:24]:
                    print("   ", json.dumps(kernel), flush=True)
            engine.close()
    monitor.close()


if __name__ == "__main__":
    main()
