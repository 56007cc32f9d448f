"""Greedy output of the float32 engine against stored `transformers` tokens: full sets and a pairwise covering array.

    python benchmarks/lossless.py REFERENCE.json OUT.json --model DIR --drafter DIR [--part full|pairs|all] [--limit N]

full:  all cases x all tokens at K = 0 and K = 15.
pairs: 15 runs of 10 prompts x 64 tokens that cover every pair of values of K 1/3/7/15, prefix hit none/partial/full,
       chunk 16/512, batch 1/8, preemption no/yes, pipeline depth 0/1, tensor parallel size 1/2.

Runs that OUT.json holds already, of the same drafter, are not repeated, and --limit makes at most that many new ones:
the whole can be made in pieces. --share I/N makes every N-th run from the I-th on, for N processes side by side with a
file each; --join FILE ... then puts their runs into OUT.json. A run with preemption gets smaller and smaller caches
until it preempts.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from command_line import command_line
from covering_array import covering_array

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.weights.cache import file_sha256

CACHE_SHARES = (2.0, 1.5, 1.2, 1.0)  # of the blocks that the longest request needs, with preemption
FACTORS = {
    "K": (1, 3, 7, 15),
    "prefix_hit": ("none", "partial", "full"),
    "chunk": (16, 512),
    "batch": (1, 8),
    "preemption": (False, True),
    "pipeline_depth": (0, 1),
    "tensor_parallel_size": (1, 2),
}


def feasible(run: dict) -> bool:
    """One request alone in the pool is never preempted."""
    return not (run.get("batch") == 1 and run.get("preemption") is True)


def make_engine(args, *, draft_len: int, run: dict, num_tokens: int, longest: int, cache_share: float) -> LLM:
    spec = DFlashDecodingConfig(max_draft_len=draft_len, speculative_model=args.drafter) if draft_len else None
    blocks_of_one = -(-(longest + num_tokens + 16) // 16) + 2
    batch = run.get("batch", 8)
    return LLM(
        args.model,
        speculative_config=spec,
        dtype="float32",
        threads=max(1, args.threads // run.get("tensor_parallel_size", 1)),
        max_model_len=(blocks_of_one - 3) * 16,
        max_num_seqs=batch,
        max_num_batched_tokens=max(run.get("chunk", 512), batch * (draft_len + 1)),
        num_blocks=max(blocks_of_one, round(cache_share * blocks_of_one)) if run.get("preemption") else 600,
        enable_prefix_caching=run.get("prefix_hit", "none") != "none",
        pipeline_depth=run.get("pipeline_depth", 0),
        tensor_parallel_size=run.get("tensor_parallel_size", 1),
        debug_checks=True,
    )


def compare(args, cases: list[dict], run: dict, num_tokens: int) -> dict:
    """One row; a run with preemption is made again with a smaller cache until it did preempt."""
    for cache_share in CACHE_SHARES:
        row = measure(args, cases, run, num_tokens, cache_share)
        if row["preemptions"] or not run.get("preemption") or row["different"]:
            return row
    raise SystemExit(f"{run}: nothing was preempted with a cache for {CACHE_SHARES[-1]} requests; it proves nothing")


def measure(args, cases: list[dict], run: dict, num_tokens: int, cache_share: float) -> dict:
    longest = max(len(c["prompt_token_ids"]) for c in cases)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, detokenize=False)
    prompts = [c["prompt_token_ids"] for c in cases]
    started = time.perf_counter()
    with make_engine(
        args, draft_len=run["K"], run=run, num_tokens=num_tokens, longest=longest, cache_share=cache_share
    ) as llm:
        if run.get("prefix_hit") == "full":
            llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
        elif run.get("prefix_hit") == "partial":
            llm.generate([p[: len(p) // 2] for p in prompts], SamplingParams(temperature=0.0, max_tokens=1))
        outputs = llm.generate(prompts, params)
        counters, stats = llm.core.counters(), llm.core.stats()
        llm.core.check_integrity()
    wrong = [
        i
        for i, (c, o) in enumerate(zip(cases, outputs, strict=True))
        if list(o.outputs[0].token_ids) != c["token_ids"][:num_tokens]
    ]
    row = {
        **run,
        "prompts": len(cases),
        "tokens": sum(len(o.outputs[0].token_ids) for o in outputs),
        "different": wrong,
        "cached_prompt_tokens": sum(o.metrics.num_cached_tokens for o in outputs),
        "preemptions": counters.preemptions,
        "acceptance_length": round(1 + counters.num_accepted_tokens / max(1, counters.num_drafts), 3),
        "seconds": round(time.perf_counter() - started, 1),
        "free_blocks_at_end": stats.free_blocks,
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("reference", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="make at most so many new runs")
    parser.add_argument("--part", choices=("full", "pairs", "all"), default="all")
    parser.add_argument(
        "--share", type=share, default=(0, 1), metavar="I/N", help="of N processes side by side, I from 0"
    )
    parser.add_argument("--join", type=Path, nargs="+", default=[], metavar="FILE", help="take over the runs of these")
    args = parser.parse_args()
    cases = json.loads(args.reference.read_text())["cases"]
    jobs: list[tuple[str, list[dict], dict, int]] = []
    if args.part in ("full", "all"):
        jobs += [("full", cases, {"K": k, "batch": 8}, 128) for k in (0, 15)]
    if args.part in ("pairs", "all"):
        jobs += [("pairs", cases[::6][:10], run, 64) for run in covering_array(FACTORS, feasible=feasible)]
    record = {
        "command": command_line(),
        "versions": {"torch": torch.__version__},
        "drafter_sha256": file_sha256(Path(args.drafter) / "model.safetensors"),
        "runs": [],
        "different": 0,
    }
    for file in [args.out] * args.out.exists() + args.join:
        earlier = json.loads(file.read_text())
        for key in ("versions", "drafter_sha256"):
            if earlier.get(key) != record[key]:
                sys.exit(f"{file}: holds runs of another {key}: {earlier.get(key)}; give another file")
        record = {**earlier, "runs": record["runs"] + [row for row in earlier["runs"] if row not in record["runs"]]}
    if args.join:
        save(args.out, record)
    first, step = args.share
    jobs = jobs[first::step]
    left = [job for job in jobs if not any(is_row_of(row, job[0], job[2]) for row in record["runs"])]
    for part, chosen, run, num_tokens in left[: args.limit]:
        record["runs"].append({"part": part, **compare(args, chosen, run, num_tokens)})
        save(args.out, record)
    print(
        f"{len(jobs) - len(left)} runs were there, {len(left[: args.limit])} made, "
        f"{len(left[len(left[: args.limit]) :])} left; {record['different']} outputs differ"
    )
    sys.exit(1 if record["different"] else 0)


def share(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError(f"{text}: want I/N with 0 <= I < N")
    return index, count


def save(out: Path, record: dict) -> None:
    record["different"] = sum(len(row["different"]) for row in record["runs"])
    out.write_text(json.dumps(record, indent=1))


def is_row_of(row: dict, part: str, run: dict) -> bool:
    return row["part"] == part and all(row.get(name) == value for name, value in run.items())


if __name__ == "__main__":
    main()
