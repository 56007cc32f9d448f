"""Measures a step table for the simulated device and `dflash simulate`: seconds of a step by batch, K and context.

    python benchmarks/step_table.py configs/sim/steps/h200-8b.yaml q8
    python benchmarks/step_table.py configs/sim/steps/h200-smollm2-135m.yaml smol --smollm2 MODEL --drafter DIR
    python benchmarks/step_table.py configs/sim/steps/cpu2-smollm2-135m.yaml smol --smollm2 MODEL --drafter DIR \\
        --device cpu --accelerator cpu2 --rows 16 --contexts 64 256 --max-model-len 768 --batched-tokens 512

Models and what must be installed: as for `gpu_engine.py`. Steps are an engine's own, decode-only, of every batch bucket
at every K; each pair is measured twice (--repeats) and the smallest mean counts. The entries hold at the larger
context; what a token of context costs follows from both. Prompt tokens: from steps that read one prompt.
"""

import argparse
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from command_line import command_line
from gpu_engine import q8_config, smol_config
from gpu_lab import Lab, show_progress, versions

from engine.speculative.counters import batch_bucket
from engine.speculative.measure import measure_step_times
from engine.step_table import load_step_table

NAMES = {
    "smol": "SmolLM2-135M-Instruct, {dtype}, with its DFlash drafter",
    "q8": "the shapes of Qwen3-8B (36 layers, 8 KV heads of 128), {dtype}, with a DFlash drafter of 5 layers",
}
PROMPTS = (0.25, 1.0)  # of the token budget, for what a prompt token costs
PROMPT_REPEATS = 3

Times = dict[tuple[int, int], float]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", choices=("smol", "q8"))
    parser.add_argument("--smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--rows", type=int, default=128, help="the largest batch")
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[0, 1, 2, 3, 5, 7, 11, 15])
    parser.add_argument("--draft-block-width", type=int, help="rows of the drafter's block; default: as trained")
    parser.add_argument("--contexts", type=int, nargs=2, default=[128, 1024], help="prompt tokens of a row")
    parser.add_argument("--accelerator", help="name in the table; default: the file's up to the first -")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2, help="measurements of each pair")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--programs", choices=("graphs", "repeated", "eager"))
    arguments = parser.parse_args()
    # what the configs of gpu_engine.py also ask for
    arguments.concurrency = [arguments.rows]
    arguments.prompt_tokens, arguments.tokens = max(arguments.contexts), 256
    arguments.acceptance_length = None
    return arguments


def measure(lab: Lab, context: int, repeats: int) -> Times:
    """Seconds of every pair at a context, the smallest of several means."""
    found: Times = {}
    for _ in range(repeats):
        for entry in measure_step_times(lab.config, lab.rank.runner, budget_s=math.inf, context=context):
            pair = entry.batch_bucket, entry.draft_len
            found[pair] = min(entry.seconds, found.get(pair, math.inf))
    return found


def prompt_seconds(lab: Lab, tokens: int) -> float:
    """Device time of one step that reads a prompt, the least of several."""
    lab.set_draft_len(0)
    spent = []
    for repeat in range(PROMPT_REPEATS):
        before = lab.core.counters()
        lab.run([[(7 * n + repeat) % 1000 + 1 for n in range(tokens)]], 1)
        after = lab.core.counters()
        assert after.num_steps - before.num_steps == 1, "the prompt fits into one step"
        spent.append(after.device_time_s - before.device_time_s)
    return min(spent)


def table(args: argparse.Namespace, lab: Lab) -> dict[str, Any]:
    """The file's keys."""
    near, far = sorted(args.contexts)
    times = {context: measure(lab, context, args.repeats) for context in (near, far)}
    longest = min(args.batched_tokens, args.max_model_len - 2)
    prompts = [int(share * longest) for share in PROMPTS]
    token_s, base_s = np.polyfit(prompts, [prompt_seconds(lab, tokens) for tokens in prompts], 1)
    rows = sorted({batch_bucket(n, args.rows) for n in range(1, args.rows + 1)})
    pairs = [(bucket, draft_len) for bucket in rows for draft_len in args.draft_lens]
    missing = [pair for pair in pairs if not all(pair in found for found in times.values())]
    if missing:
        raise SystemExit(f"(rows, K) {missing} do not fit; raise --batched-tokens or lower --rows")
    # one slope for all: least squares over the pairs' differences
    weights = np.array([bucket * (far - near) for bucket, _ in pairs])
    gains = np.array([times[far][pair] - times[near][pair] for pair in pairs])
    slope = max(float(weights @ gains / (weights @ weights)), 0.0)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    shown = ", ".join(f"{name} {number}" for name, number in versions().items() if name in ("torch", "triton"))
    return {
        "accelerator": args.accelerator or args.out.stem.split("-")[0],
        "model": NAMES[args.model].format(dtype=args.dtype)
        + ("" if args.draft_block_width is None else f" run in blocks of {args.draft_block_width}"),
        "source": f"Measured on {device} with {shown}, contexts of {near} and {far} tokens: {command_line()}",
        "measured": rows,
        "reference_context": far,
        "context_token_s": float(f"{slope:.3e}"),
        "prefill_base_s": round(max(float(base_s), 1e-6), 6),
        "prefill_token_s": float(f"{max(float(token_s), 0.0):.3e}"),
        "draft_lens": list(args.draft_lens),
        "seconds": {bucket: [round(times[far][bucket, k], 6) for k in args.draft_lens] for bucket in rows},
    }


def main() -> None:
    args = parse()
    show_progress()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        width = dict(draft_block_width=args.draft_block_width)
        lab = Lab(smol_config(args, **width) if args.model == "smol" else q8_config(args, Path(scratch), **width))
        values = table(args, lab)
        lab.close()
    args.out.write_text(_yaml(values), encoding="utf-8")
    load_step_table(args.out)
    print(args.out.read_text(), f"# {time.monotonic() - began:.0f} s", flush=True)


def _yaml(values: dict[str, Any]) -> str:
    """Lists on one line, floats with a dot before an exponent."""
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=124)


if __name__ == "__main__":
    main()
