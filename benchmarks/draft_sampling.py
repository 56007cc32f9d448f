"""Acceptance of the ways to choose drafts for sampled requests, with exact match and with rejection sampling.

    python benchmarks/draft_sampling.py PROMPTS.json OUT.json --model DIR --drafter DIR [--num-prompts 8] [--tokens 48]

Every way decodes the same prompts with the same seeds at each temperature; no filters. The acceptance length counts
the target's own token; `accepted_at` is the share of drafts at a position that were accepted, of those at risk there.
The interval is that of the mean over steps, 95 %, from the variance between requests. Nothing here is a time: the
cost of a way is one sampling of K rows instead of an argmax, and the gather of whole rows for rejection sampling.
"""

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
from command_line import command_line
from transformers import AutoTokenizer

from engine import LLM, DFlashDecodingConfig, SamplingParams

WAYS = (
    ("exact match", False, "greedy"),
    ("exact match", False, "coupled"),
    ("rejection sampling", True, "greedy"),
    ("rejection sampling", True, "probabilistic"),
)


def measure(llm: LLM, prompts: list[list[int]], temperature: float, num_tokens: int) -> dict[str, object]:
    params = [
        SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False, seed=i)
        for i in range(len(prompts))
    ]
    before = {(c.batch_bucket, c.draft_len): c for c in llm.core.counters().cells}
    outputs = llm.generate(prompts, params)
    at_risk, accepted = [0] * llm.config.max_draft_len, [0] * llm.config.max_draft_len
    for cell in llm.core.counters().cells:
        old = before.get((cell.batch_bucket, cell.draft_len))
        for totals, now, then in (
            (at_risk, cell.at_risk, old.at_risk if old else ()),
            (accepted, cell.accepted, old.accepted if old else ()),
        ):
            for index, count in enumerate(now):
                totals[index] += count - (then[index] if index < len(then) else 0)
    stats = [output.metrics.speculative_decoding for output in outputs]
    lengths = [s.mean_acceptance_length for s in stats]
    steps = sum(s.num_spec_steps for s in stats)
    return {
        "acceptance_length": round(1 + sum(s.num_accepted_draft_tokens for s in stats) / steps, 3),
        "interval": round(1.96 * statistics.stdev(lengths) / math.sqrt(len(lengths)), 3),
        "steps": steps,
        "accepted_at": [round(a / r, 3) if r else None for a, r in zip(accepted, at_risk, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--sets", nargs="+", default=["gsm8k", "humaneval"])
    parser.add_argument("--num-prompts", type=int, default=8, help="of each set")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--draft-len", type=int, default=7)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--verification", choices=["exact match", "rejection sampling"], help="default: both")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    bank = json.loads(args.prompts.read_text())
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": m}], add_generation_prompt=True, return_dict=False)
        for name in args.sets
        for m in bank[name][: args.num_prompts]
    ]
    rows = []
    for verification, rejection, sampling in WAYS:
        if args.verification not in (None, verification):
            continue
        spec = DFlashDecodingConfig(
            max_draft_len=args.draft_len, speculative_model=args.drafter, use_rejection_sampling=rejection
        )
        with LLM(
            args.model,
            speculative_config=spec,
            draft_sampling=sampling,
            dtype=args.dtype,
            threads=args.threads,
            max_model_len=1024,
            max_num_seqs=len(prompts),
            kv_cache_memory_bytes=512 * 2**20,
        ) as llm:
            for temperature in args.temperatures:
                row = {"verification": verification, "draft_sampling": sampling, "temperature": temperature}
                rows.append(row | measure(llm, prompts, temperature, args.tokens))
                print(json.dumps(rows[-1]), flush=True)
                args.out.write_text(json.dumps(record(args, rows), indent=1) + "\n")


def record(args: argparse.Namespace, rows: list[dict[str, object]]) -> dict[str, object]:
    """What is known so far."""
    return {
        "command": command_line(),
        "prompts": {"sets": args.sets, "of_each": args.num_prompts, "tokens": args.tokens},
        "draft_len": args.draft_len,
        "dtype": args.dtype,
        "torch": torch.__version__,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
