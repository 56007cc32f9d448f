"""The engine against vLLM on one GPU: the same weights, prompts and lengths, one after the other in one run.

    python benchmarks/gpu_vs_vllm.py OUT.json --peer PEER.py --workloads smol q8 --draft-lens 0 15 \\
        --smollm2 MODEL --drafter DIR --prompts PROMPTS.json

PEER.py drives vLLM and is run as
    PEER.py smol OUT TARGET_DIR DRAFTER_DIR PROMPTS K       PEER.py q8 OUT CONFIG_DIR DRAFTER_DIR K ACCEPTANCE_LENGTH
and writes a list of {tag, conc, out_tokens, s, tok_s, tau}. It needs vllm (0.26.0) and what that needs; --peer-path is
put ahead of its PYTHONPATH. The engine's own needs and MODEL: see gpu_engine.py.

smol: SmolLM2-135M, its trained drafter, greedy, up to 256 tokens; each set's first 12 prompts one by one, then 8, 32,
128 and 256 prompts at once. q8: shapes of Qwen3-8B, random weights, synthetic acceptance; 256 tokens in, 512 out (256
from 32 requests on), 1 to 128 at once. Medians of --repeats for the engine, of --peer-repeats whole runs for vLLM.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command_line import command_line
from gpu_engine import q8_config, smol_config
from gpu_lab import Lab, save, versions, write_qwen3_8b

from engine.weights.source import fetch

HEADER = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)
FOOTER = "<|im_end|>\n<|im_start|>assistant\n"
Rows = dict[tuple[str, int, int], list[dict[str, float]]]  # (workload, K, concurrency) -> one entry per repeat


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--peer-path", default="")
    parser.add_argument("--workloads", nargs="+", choices=("smol", "q8"), default=["smol", "q8"])
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[0, 15])
    parser.add_argument("--acceptance-length", type=float, default=6.5)
    parser.add_argument("--smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--peer-repeats", type=int, default=1)
    parser.add_argument("--peer-timeout", type=float, default=420.0, help="seconds of one run of the peer")
    parser.add_argument("--most", type=int, default=256, help="leave out what has more requests at once")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--skip", choices=("ours", "peer"))
    parser.add_argument("--side", choices=("smol", "q8"), help=argparse.SUPPRESS)  # this program's own child
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------- our side, a process


def our_side(args: argparse.Namespace) -> None:
    """Measures one workload and writes rows as the peer does, `repeat` added."""
    args.max_model_len = 2048 if args.side == "smol" else 4096
    levels = (1, 8, 32, 128, 256) if args.side == "smol" else (1, 4, 8, 16, 32, 128)
    args.concurrency = [c for c in levels if c <= args.most]
    args.prompt_tokens, args.tokens = 256, 512
    args.batched_tokens, args.dtype, args.device, args.programs = 8192, "bfloat16", "cuda", None
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        config = smol_config(args) if args.side == "smol" else q8_config(args, Path(scratch))
        lab = Lab(config)
        jobs = list(smol_jobs(args, config.model_dir) if args.side == "smol" else q8_jobs(args))
        for repeat in range(args.repeats + 1):  # the first one warms up
            for draft_len in args.draft_lens:
                if max(args.draft_lens):
                    lab.set_draft_len(draft_len)
                for tag, concurrency, batches, num_tokens, ignore_eos in jobs:
                    chosen = batches if repeat else batches[:2]
                    runs = [lab.run(batch, num_tokens, ignore_eos=ignore_eos) for batch in chosen]
                    tokens, seconds = sum(r.num_tokens for r in runs), sum(r.seconds for r in runs)
                    lengths = [r.acceptance_length for r in runs if r.acceptance_length is not None]
                    if repeat:
                        row = dict(tag=tag, k=draft_len, conc=concurrency, out_tokens=tokens, s=round(seconds, 3))
                        row |= dict(tok_s=round(tokens / seconds, 1), tau=statistics.mean(lengths) if lengths else None)
                        row |= {n: v for n, v in runs[0].record().items() if n.endswith("_ms") or "_ms_" in n}
                        rows.append(row)
                        print("OURS", json.dumps(row), flush=True)
                        args.out.write_text(json.dumps(rows))
        lab.close()


Job = tuple[str, int, list[list[list[int]]], int, bool]  # tag, concurrency, batches of prompts, tokens, ignore_eos


def smol_jobs(args: argparse.Namespace, model_dir: str) -> Iterator[Job]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    bank = json.loads(args.prompts.read_text())
    bank = bank.get("eval", bank)
    sets = {
        name: [tokenizer(HEADER + text + FOOTER, add_special_tokens=False)["input_ids"] for text in texts]
        for name, texts in bank.items()
    }
    for name, prompts in sets.items():
        yield name, 1, [[prompt] for prompt in prompts[:12]], 256, False
    everything = [prompt for prompts in sets.values() for prompt in prompts] * 8
    for concurrency in args.concurrency[1:]:
        yield "all", concurrency, [everything[:concurrency]], 256, False


def q8_jobs(args: argparse.Namespace) -> Iterator[Job]:
    generator = random.Random(0)
    for concurrency in args.concurrency:
        prompts = [[generator.randrange(1000, 150000) for _ in range(256)] for _ in range(concurrency)]
        yield "random", concurrency, [prompts], 512 if concurrency < 32 else 256, True


# ----------------------------------------------------------------------------------------------------------- both sides


def run_ours(args: argparse.Namespace, workload: str, scratch: Path) -> Rows:
    out = scratch / f"ours-{workload}.json"
    command = [sys.executable, __file__, str(out), "--side", workload, "--repeats", str(args.repeats)]
    command += ["--draft-lens", *map(str, args.draft_lens), "--acceptance-length", str(args.acceptance_length)]
    command += ["--most", str(args.most), "--block-size", str(args.block_size)]
    if workload == "smol":
        command += ["--smollm2", args.smollm2, "--drafter", args.drafter, "--prompts", str(args.prompts)]
    subprocess.run(command, check=True)
    found: Rows = {}
    for row in json.loads(out.read_text()):
        tag = f"{workload} {row['tag']}" if row["conc"] == 1 and workload == "smol" else workload
        found.setdefault((tag, row["k"], row["conc"]), []).append(row)
    return found


def run_peer(args: argparse.Namespace, workload: str, draft_len: int, scratch: Path) -> Rows:
    out = scratch / f"peer-{workload}-{draft_len}.json"
    if workload == "smol":
        bank = json.loads(args.prompts.read_text())
        prompts = scratch / "prompts.json"
        prompts.write_text(json.dumps({"eval": bank.get("eval", bank)}))
        rest = [str(fetch(args.smollm2)), args.drafter, str(prompts), str(draft_len)]
    else:
        target, drafter = write_qwen3_8b(scratch / "models", drafter_weights=draft_len > 0)
        rest = [str(target), str(drafter), str(draft_len), str(args.acceptance_length)]
    path = os.pathsep.join(p for p in (args.peer_path, os.environ.get("PYTHONPATH", "")) if p)
    try:
        done = subprocess.run(
            [sys.executable, str(args.peer), workload, str(out), *rest],
            env=dict(os.environ, PYTHONPATH=path),
            timeout=args.peer_timeout,
            check=False,
        )
        print(f"peer {workload} K={draft_len}: exit {done.returncode}", flush=True)
    except subprocess.TimeoutExpired:
        print(f"peer {workload} K={draft_len}: no end within {args.peer_timeout} s", flush=True)
    found: Rows = {}
    for row in json.loads(out.read_text()) if out.is_file() else []:
        if row["tag"] == "warm":
            continue
        name = row["tag"].split()[-1]
        tag = f"smol {name}" if workload == "smol" and row["conc"] == 1 else workload
        found.setdefault((tag, draft_len, row["conc"]), []).append(row)
    return found


def main() -> None:
    args = parse()
    if args.side:
        our_side(args)
        return
    record: dict[str, Any] = {"command": command_line(), "versions": versions(), "rows": []}
    ours: Rows = {}
    peer: Rows = {}

    def add(to: Rows, found: Rows) -> None:
        """Takes in what one run gave; the file holds it from here on, whatever becomes of the next run."""
        for key, rows in found.items():
            to.setdefault(key, []).extend(rows)
        record["rows"] = compare(ours, peer)
        save(args.out, record)

    with tempfile.TemporaryDirectory() as scratch:
        for workload in args.workloads:
            if args.skip != "ours":
                add(ours, run_ours(args, workload, Path(scratch)))
            for draft_len in args.draft_lens:
                for _ in range(0 if args.skip == "peer" else args.peer_repeats):
                    add(peer, run_peer(args, workload, draft_len, Path(scratch)))
    for row in record["rows"]:
        print("ROW", json.dumps(row), flush=True)


def compare(ours: Rows, peer: Rows) -> list[dict[str, Any]]:
    """One row per (workload, K, concurrency) that either side measured; ratio: ours over the peer's."""
    rows = []
    for key in dict.fromkeys([*ours, *peer]):
        row: dict[str, Any] = dict(zip(("workload", "draft_len", "concurrency"), key, strict=True))
        for name, found in (("ours", ours.get(key)), ("vllm", peer.get(key))):
            if found:
                speeds = [f["tok_s"] for f in found]
                lengths = [f["tau"] for f in found if f.get("tau")]
                row[name] = {"tokens_per_s": statistics.median(speeds), "all": speeds}
                row[name]["acceptance_length"] = round(statistics.median(lengths), 3) if lengths else None
                for field in ("first_token_ms", "decode_step_ms", "host_ms_per_step"):
                    if found[0].get(field) is not None:
                        row[name][field] = statistics.median([f[field] for f in found])
        if "ours" in row and "vllm" in row:
            row["ratio"] = round(row["ours"]["tokens_per_s"] / row["vllm"]["tokens_per_s"], 3)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
