"""Decoding speed of the engine on a CPU, side by side with `transformers.generate`, in one process.

    python benchmarks/engine_cpu.py PROMPTS.json OUT.json --model DIR --drafter DIR [--dtype bfloat16] [--repeats 3]
        [--parts transformers alone eight]

Measures tokens/s (medians of --repeats, rounds interleaved so that a slow minute of the machine hits every row alike,
every second one backwards): transformers at batch 1 and its static batch of 8, the engine without drafts at 1 and 8
concurrent requests, DFlash at concurrency 1 for each K on each prompt set, DFlash at 8 under the schedule. Ratios are
medians of those of the rounds. Greedy, end-of-sequence ignored, so that all rows decode the same number of tokens.
--parts: transformers (its rows), alone (one request), eight (plain and scheduled), eight-drafting (K > 0 at eight).
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from command_line import command_line
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine import LLM, DFlashDecodingConfig, SamplingParams

PARTS = ("transformers", "alone", "eight", "eight-drafting")
SETS = ("gsm8k", "humaneval")


def render(tokenizer, messages: list[str]) -> list[list[int]]:
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": m}], add_generation_prompt=True, return_dict=False)
        for m in messages
    ]


def hf_generate(model, tokenizer, prompts: list[list[int]], num_tokens: int) -> int:
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    model.generate(
        **padded,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    return num_tokens * len(prompts)


def engine_generate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> int:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    return sum(len(o.outputs[0].token_ids) for o in llm.generate(prompts, params))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("prompts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[1, 2, 3, 5, 7, 15])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS, help="of the rows of one request")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    bank = json.loads(args.prompts.read_text())
    sets = {name: render(tokenizer, bank[name][: args.num_prompts]) for name in args.sets}
    batch = render(tokenizer, bank["gsm8k"][:4] + bank["humaneval"][:4])

    options = dict(dtype=args.dtype, threads=args.threads, max_model_len=1024, max_num_batched_tokens=512)
    options |= dict(enable_prefix_caching=False, kv_cache_memory_bytes=512 * 2**20)
    model = None
    if "transformers" in args.parts:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    plain = LLM(args.model, max_num_seqs=8, **options)
    longest = max(args.draft_lens)
    dflash = LLM(
        args.model,
        speculative_config=DFlashDecodingConfig(max_draft_len=longest, speculative_model=args.drafter),
        max_num_seqs=8,
        draft_len_choices=sorted({0, *args.draft_lens}),
        **options,
    )
    version = 0

    def with_k(k: int, prompts: list[list[int]]) -> int:
        nonlocal version
        version += 1
        dflash.core.apply_schedule((1, version), {8: k} if k else {1: longest, 8: 0})
        return engine_generate(dflash, prompts, args.tokens)

    def one_by_one(run: Callable[[list[list[int]]], int], prompts: list[list[int]]) -> int:
        return sum(run([p]) for p in prompts)

    rows: dict[str, Callable[[], int]] = {}
    for name, prompts in sets.items():
        if "transformers" in args.parts:
            rows[f"transformers c=1 {name}"] = lambda p=prompts: one_by_one(
                lambda q: hf_generate(model, tokenizer, q, args.tokens), p[:2]
            )
        if "alone" in args.parts:
            rows[f"plain c=1 {name}"] = lambda p=prompts: one_by_one(
                lambda q: engine_generate(plain, q, args.tokens), p
            )
            for k in args.draft_lens:
                rows[f"dflash c=1 K={k} {name}"] = lambda p=prompts, k=k: one_by_one(lambda q: with_k(k, q), p)
    if "transformers" in args.parts:
        rows["transformers static batch 8"] = lambda: hf_generate(model, tokenizer, batch, args.tokens)
    if "eight" in args.parts:
        rows["plain c=8"] = lambda: engine_generate(plain, batch, args.tokens)
        rows["dflash c=8 scheduled K=0"] = lambda: with_k(0, batch)
    if "eight-drafting" in args.parts:
        for k in args.draft_lens[:3]:
            rows[f"dflash c=8 K={k}"] = lambda k=k: with_k(k, batch)

    speeds: dict[str, list[float]] = {name: [] for name in rows}
    lengths: dict[str, float] = {}
    for round_index in range(args.repeats + 1):
        for name, run in list(rows.items())[:: -1 if round_index % 2 else 1]:
            before = dflash.core.counters()
            started = time.perf_counter()
            tokens = run()
            speed = tokens / (time.perf_counter() - started)
            after = dflash.core.counters()
            drafts = after.num_drafts - before.num_drafts
            if drafts:
                lengths[name] = 1 + (after.num_accepted_tokens - before.num_accepted_tokens) / drafts
            if round_index:  # the first round warms caches and allocators
                speeds[name].append(speed)
            print(f"round {round_index} {name}: {speed:.1f} tokens/s", file=sys.stderr, flush=True)
    medians = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
    ratios = {}

    def compare(name: str, row: str, base: str) -> None:
        if speeds.get(row) and speeds.get(base):
            ratios[name] = statistics.median([a / b for a, b in zip(speeds[row], speeds[base], strict=True)])

    for name in sets:
        compare(f"plain / transformers, c=1, {name}", f"plain c=1 {name}", f"transformers c=1 {name}")
        if "alone" in args.parts:
            best = max(args.draft_lens, key=lambda k: medians[f"dflash c=1 K={k} {name}"])
            compare(f"dflash / plain, c=1, {name}, best K={best}", f"dflash c=1 K={best} {name}", f"plain c=1 {name}")
    compare("plain c=8 / transformers static batch 8", "plain c=8", "transformers static batch 8")
    compare("dflash scheduled c=8 / plain c=8", "dflash c=8 scheduled K=0", "plain c=8")
    record = {
        "command": command_line(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": args.threads,
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens_per_s": medians,
        "all_tokens_per_s": {n: [round(v, 2) for v in vs] for n, vs in speeds.items()},
        "acceptance_length": {n: round(v, 3) for n, v in lengths.items()},
        "ratios": {n: round(v, 3) for n, v in ratios.items()},
    }
    args.out.write_text(json.dumps(record, indent=1))
    print(json.dumps({"tokens_per_s": medians, "ratios": record["ratios"]}, indent=1))
    plain.close()
    dflash.close()


if __name__ == "__main__":
    main()
