"""Acceptance of the ways to choose drafts for sampled requests, with exact match and with rejection sampling, and of
widths of the drafter's block.

    python benchmarks/draft_sampling.py PROMPTS.json OUT.json --model DIR --drafter DIR [--num-prompts 8] [--tokens 48]
    python benchmarks/draft_sampling.py PROMPTS.json OUT.json --model DIR --drafter DIR --temperatures 0 \
        --verification "exact match" --drafts greedy --draft-lens 3 5 7 --block-widths trained drafts

Every way decodes the same prompts with the same seeds at each temperature; no filters. The acceptance length counts
the target's own token; `accepted_at` is the share of drafts at a position that were accepted, of those at risk there.
The interval is that of the mean over steps, 95 %, from the variance between requests. `over_trained`, of a narrower
block: tokens per step over those of the same prompts at the trained width, and the 95 % interval of resampled prompts,
which both share; in all and of each set. Nothing here is a time: the
cost of a way is one sampling of K rows instead of an argmax, and the gather of whole rows for rejection sampling.
"""

import argparse
import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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


Counts = list[tuple[int, int]]  # of each prompt: steps with drafts, tokens they gave


def measure(
    llm: LLM, prompts: list[list[int]], temperature: float, num_tokens: int
) -> tuple[dict[str, object], Counts]:
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
    counts = [(s.num_spec_steps, s.num_spec_steps + s.num_accepted_draft_tokens) for s in stats]
    row = {
        "acceptance_length": round(per_step(counts), 3),
        "interval": round(1.96 * statistics.stdev(lengths) / math.sqrt(len(lengths)), 3),
        "steps": sum(steps for steps, _ in counts),
        "accepted_at": [round(a / r, 3) if r else None for a, r in zip(accepted, at_risk, strict=True)],
    }
    return row, counts


def per_step(counts: Sequence[tuple[int, int]]) -> float:
    return sum(tokens for _, tokens in counts) / sum(steps for steps, _ in counts)


def over(mine: Counts, trained: Counts, *, rounds: int = 2000) -> list[float]:
    """[ratio, low, high] of tokens per step."""
    both, rng = list(zip(mine, trained, strict=True)), random.Random(0)
    drawn = [zip(*rng.choices(both, k=len(both)), strict=True) for _ in range(rounds)]
    ratios = sorted(per_step(a) / per_step(b) for a, b in drawn)
    found = (per_step(mine) / per_step(trained), ratios[int(0.025 * rounds)], ratios[int(0.975 * rounds)])
    return [round(value, 4) for value in found]


def over_trained(mine: Counts, trained: Counts, sets: Sequence[str]) -> dict[str, object]:
    """sets: the set of each prompt."""
    found: dict[str, object] = {"all": over(mine, trained)}
    for name in dict.fromkeys(sets):
        kept = [place for place, own in enumerate(sets) if own == name]
        pair = [mine[place] for place in kept], [trained[place] for place in kept]
        lengths = [round(per_step(counts), 3) for counts in pair]
        found[name] = {"acceptance_length": lengths[0], "trained": lengths[1], "over_trained": over(*pair)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--sets", nargs="+", default=["gsm8k", "humaneval"])
    parser.add_argument("--num-prompts", type=int, default=8, help="of each set")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[7])
    parser.add_argument(
        "--block-widths",
        nargs="+",
        choices=("trained", "drafts"),
        default=["trained"],
        help="rows of the drafter's block: what it was trained with, K + 1",
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--verification", choices=["exact match", "rejection sampling"], help="default: both")
    parser.add_argument("--drafts", choices=["greedy", "coupled", "probabilistic"], help="default: all")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    bank = json.loads(args.prompts.read_text())
    sets = [name for name in args.sets for _ in bank[name][: args.num_prompts]]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": m}], add_generation_prompt=True, return_dict=False)
        for name in args.sets
        for m in bank[name][: args.num_prompts]
    ]
    rows: list[dict[str, Any]] = []
    of_trained: dict[tuple[object, ...], Counts] = {}
    ways = [way for way in WAYS if args.verification in (None, way[0]) and args.drafts in (None, way[2])]
    for (verification, rejection, sampling), draft_len, width in itertools.product(
        ways, args.draft_lens, args.block_widths
    ):
        spec = DFlashDecodingConfig(
            max_draft_len=draft_len, speculative_model=args.drafter, use_rejection_sampling=rejection
        )
        with LLM(
            args.model,
            speculative_config=spec,
            draft_sampling=sampling,
            draft_block_width=None if width == "trained" else draft_len + 1,
            dtype=args.dtype,
            threads=args.threads,
            max_model_len=1024,
            max_num_seqs=len(prompts),
            kv_cache_memory_bytes=512 * 2**20,
        ) as llm:
            for temperature in args.temperatures:
                row: dict[str, Any] = {"verification": verification, "draft_sampling": sampling}
                row |= {"temperature": temperature, "draft_len": draft_len, "block_width": llm.config.block_width}
                found, counts = measure(llm, prompts, temperature, args.tokens)
                rows.append(row | found)
                key = verification, sampling, temperature, draft_len
                if width == "trained":
                    of_trained[key] = counts
                elif key in of_trained:
                    rows[-1]["over_trained"] = over_trained(counts, of_trained[key], sets)
                print(json.dumps(rows[-1]), flush=True)
                args.out.write_text(json.dumps(record(args, rows), indent=1) + "\n")


def record(args: argparse.Namespace, rows: list[dict[str, object]]) -> dict[str, object]:
    """What is known so far."""
    return {
        "command": command_line(),
        "prompts": {"sets": args.sets, "of_each": args.num_prompts, "tokens": args.tokens},
        "dtype": args.dtype,
        "torch": torch.__version__,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
