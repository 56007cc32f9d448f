"""What long prompts do to running streams, with and without an inter-token target, on one GPU.

    python benchmarks/gpu_mixed.py OUT.json [--targets-ms 0 40 20]

The shapes of Qwen3-8B with random weights, K = 15, synthetic acceptance 6.5. --streams requests decode; every
--every-s seconds a prompt of --prompt-tokens tokens arrives, which asks for a few tokens. For each target (0: none)
the gaps between the outputs of the streams and the time to the first token of the prompts, --repeats times in turn,
medians. Exits 1 where the 99th percentile of the gaps is more than a tenth above a target.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from command_line import command_line
from engine_load import Job, drive, figures
from gpu_engine import q8_config
from gpu_lab import Lab, save, show_progress, versions
from gpu_vs_vllm import OurEngine

from engine.core import EngineCore


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--targets-ms", type=float, nargs="+", default=[0.0, 40.0, 20.0], help="0: no target")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of a stream")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--every-s", type=float, default=0.35)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--programs", choices=("graphs", "repeated", "eager"))
    return parser.parse_args()


def measure(lab: Lab, args: argparse.Namespace, target_ms: float) -> dict[str, Any]:
    """One run over the lab's device."""
    config = replace(lab.config, inter_token_target_ms=target_ms or None)
    lab.core = EngineCore(config=config, runner=lab.rank.runner)
    lab.set_draft_len(max(config.draft_len_choices))
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(1000, min(config.target.vocab_size, 150000)) for _ in range(length)]

    streams = [Job(prompt=prompt(64), max_tokens=args.tokens, ignore_eos=True) for _ in range(args.streams)]
    late = [
        Job(prompt=prompt(args.prompt_tokens), max_tokens=4, ignore_eos=True, arrival_s=args.every_s * (1 + number))
        for number in range(args.prompts)
    ]
    traces, seconds = drive(OurEngine(lab), [*streams, *late])
    rows = figures(traces[: args.streams], seconds)
    outputs = [trace.outputs for trace in traces[: args.streams]]
    gaps = [b - a for times in outputs for (a, _), (b, _) in itertools.pairwise(times)]
    first = [1e3 * (trace.outputs[0][0] - trace.start_s) for trace in traces[args.streams :]]
    lab.drain()
    lab.core.check_integrity()
    return {
        "gap_p50_ms": rows["gap_p50_ms"],
        "gap_p99_ms": rows["gap_p99_ms"],
        "gap_max_ms": round(1e3 * max(gaps), 2),
        "first_token_ms": round(statistics.median(first), 2),
        "tokens_per_s": rows["tokens_per_s"],
    }


def main() -> None:
    args = parse()
    show_progress()
    shape = {
        "draft_lens": [15],
        "concurrency": [args.streams + 4],
        "batched_tokens": 8192,
        "max_model_len": args.prompt_tokens + 512 + args.tokens,
        "block_size": 16,
        "acceptance_length": 6.5,
    }
    options = argparse.Namespace(**vars(args) | shape)
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(q8_config(options, Path(scratch)))
        record: dict[str, Any] = {"command": command_line(), "versions": versions(), "rows": []}
        measure(lab, args, 0.0)
        runs: dict[float, list[dict[str, Any]]] = {target: [] for target in args.targets_ms}
        for _ in range(args.repeats):
            for target, found in runs.items():
                found.append(measure(lab, args, target))
        for target, found in runs.items():
            row = {name: round(statistics.median(run[name] for run in found), 3) for name in found[0]}
            row |= {"target_ms": target or None, "ok": not target or row["gap_p99_ms"] <= 1.1 * target}
            record["rows"].append(row)
            print("ROW", json.dumps(row), flush=True)
            save(args.out, record)
        lab.close()
    sys.exit(0 if all(row["ok"] for row in record["rows"]) else 1)


if __name__ == "__main__":
    main()
