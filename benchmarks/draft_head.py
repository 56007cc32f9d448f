"""What makes drafting cheaper on a CPU, and what it costs in drafts: a cut head, weights of 8 bits; one request.

    python benchmarks/draft_head.py PROMPTS.json OUT.json --model DIR --drafter FULL --token-counts COUNTS.npy \
        [--head-rows 8192 16384 32768] [--draft-lens 5 15] [--exact]

Makes the cut drafters in a temporary directory, as `dflash cut-head` does. Rows are interleaved round by round, so
that other load on the machine hits all alike; times are medians. Output is checked to be the same with every head. With
--exact the drafter also runs with its weights as they are, not rounded to 8 bits.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from command_line import command_line
from cpu_linear import machine

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.config.model import parse_target_config
from engine.layers.linear import Linear
from engine.training.cut_head import cut_head, target_head
from engine.training.vocabulary import most_frequent, read_counts


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--token-counts", type=Path, required=True)
    parser.add_argument("--head-rows", type=int, nargs="*", default=[8192, 16384, 32768])
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[5, 15])
    parser.add_argument("--sets", nargs="+", default=["gsm8k", "humaneval"])
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def head_times(weight_VH: torch.Tensor, sizes: list[int], row_counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of the 8-bit head by its rows and by the rows of a pass."""
    heads = {}
    for size in sizes:
        heads[size] = Linear(weight_VH.shape[1], size, dtype=torch.bfloat16, out_dtype=torch.float32)
        heads[size].weight.data.copy_(weight_VH[:size])
        heads[size].prepare(int8=True)
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(rounds):
        for size, head in heads.items():
            for rows in row_counts:
                x = torch.randn(rows, weight_VH.shape[1]).bfloat16()
                began = time.perf_counter()
                head.forward(x)
                times.setdefault((size, rows), []).append(1e3 * (time.perf_counter() - began))
    return [
        {
            "head_rows": size,
            "rows": rows,
            "median_ms": round(statistics.median(found), 3),
            "min_ms": round(min(found), 3),
        }
        for (size, rows), found in times.items()
    ]


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    target = parse_target_config(args.model)
    counts = read_counts(args.token_counts, target.vocab_size)
    sizes = [target.vocab_size, *args.head_rows]
    whole = target_head(args.model, target).bfloat16()
    record: dict[str, Any] = {"command": command_line(), "machine": machine(args.threads)}
    record["head_ms"] = head_times(whole, sizes, [1, *args.draft_lens], 20 * args.rounds)
    bank = json.loads(args.prompts.read_text())
    with tempfile.TemporaryDirectory() as directory:
        drafters = {target.vocab_size: args.drafter}
        for size in args.head_rows:
            ids = most_frequent(counts, size, always=target.eos_token_ids)
            drafters[size] = Path(directory) / str(size)
            cut_head(args.model, args.drafter, ids, drafters[size])
        engines = {f"{size} ids, 8 bits": engine(args, path, "int8") for size, path in drafters.items()}
        if args.exact:
            engines[f"{target.vocab_size} ids, bfloat16"] = engine(args, args.drafter, "model")
        record["share_of_counted_tokens"] = {
            size: round(float(np.sort(counts)[-size:].sum() / counts.sum()), 5) for size in sizes
        }
        record["rows"] = decode(args, engines, bank)
        for llm in engines.values():
            llm.close()
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["head_ms"]))
    for row in record["rows"]:
        print(json.dumps(row))


def engine(args: argparse.Namespace, drafter: Path, weights: str) -> LLM:
    longest = max(args.draft_lens)
    return LLM(
        str(args.model),
        speculative_config=DFlashDecodingConfig(max_draft_len=longest, speculative_model=str(drafter)),
        draft_len_choices=sorted({0, *args.draft_lens}),
        dtype="bfloat16",
        drafter_weights=weights,
        threads=args.threads,
        max_num_seqs=1,
        max_model_len=1024,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=128 * 2**20,
    )


def decode(args: argparse.Namespace, engines: dict[str, LLM], bank: dict[str, list[str]]) -> list[dict[str, Any]]:
    """Acceptance, tokens/s and time of a step for every set, K and head. The first round warms up."""
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)
    found: dict[tuple[str, int, str], list[tuple[float, float, float]]] = {}
    texts: dict[tuple[str, int], list[list[int]]] = {}
    version = 0
    for round_index in range(args.rounds + 1):
        for name in args.sets:
            for draft_len in args.draft_lens:
                for head, llm in engines.items():
                    version += 1
                    llm.core.apply_schedule((1, version), {1: draft_len})
                    prompts = [
                        llm.tokenizer.encode_chat([{"role": "user", "content": text}])
                        for text in bank[name][: args.num_prompts]
                    ]
                    before, began = llm.core.counters(), time.perf_counter()
                    written = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
                    seconds, after = time.perf_counter() - began, llm.core.counters()
                    steps = after.num_drafts - before.num_drafts
                    accepted = after.num_accepted_tokens - before.num_accepted_tokens
                    if texts.setdefault((name, draft_len), written) != written:
                        raise SystemExit(f"{name}, K={draft_len}: drafting with {head} changed the output")
                    if round_index:
                        tokens = sum(map(len, written))
                        figures = (tokens / seconds, 1e3 * seconds / steps, 1 + accepted / steps)
                        found.setdefault((name, draft_len, head), []).append(figures)
    return [
        {
            "set": name,
            "draft_len": draft_len,
            "head": head,
            "acceptance_length": round(rounds[0][2], 3),
            "tokens_per_s": round(statistics.median(r[0] for r in rounds), 2),
            "step_ms": round(statistics.median(r[1] for r in rounds), 2),
        }
        for (name, draft_len, head), rounds in found.items()
    ]


if __name__ == "__main__":
    main()
