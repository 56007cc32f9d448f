"""What a prompt adds to a decode step on one GPU, and what prompts that come together take: as rows of decode programs,
and without that way (in programs of their own, or several in one forward that is not recorded).

    python benchmarks/gpu_mixed_step.py OUT.json [--rows 4 16 32] [--together 2 4 8 16] [--draft-lens 7 15]
        [--prompt-tokens 256] [--smollm2 MODEL --drafter DIR]

The shapes of Qwen3-8B and its drafter with random weights and synthetic acceptance, or SmolLM2. R requests decode; a
prompt joins one of their steps --samples times each way, in turn. Milliseconds of the device from the step's first work
to its last, the prompt's context and drafts included, and of the steps without a prompt between them; medians.
--together: so many prompts of --together-tokens at once while nothing decodes; milliseconds until all have their first
token. Exits 1 where rows are not the faster way, 3 where a way was not taken, as where no program has so many rows.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from command_line import command_line
from gpu_engine import q8_config, random_prompts, smol_config
from gpu_lab import Lab, save, show_progress, versions
from gpu_trace import Driver

from engine.step import StepPlan

WAYS = {"rows": True, "behind": False}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="*", default=[4, 16, 32])
    parser.add_argument("--together", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--together-tokens", type=int, default=64, help="of each of these prompts")
    parser.add_argument("--smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[7, 15])
    parser.add_argument("--prompt-tokens", type=int, default=256, help="of the prompt that joins")
    parser.add_argument("--context", type=int, default=400, help="tokens of the prompts that decode")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--acceptance-length", type=float, default=3.5)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--programs", choices=("graphs", "repeated"))
    args = parser.parse_args()
    args.dtype = "bfloat16"
    args.concurrency, args.tokens = [args.max_num_seqs], args.max_model_len - args.context - 64
    return args


class Steps:
    """Plans of an engine, and the milliseconds that each took its device."""

    def __init__(self, lab: Lab, device: str) -> None:
        self._runner, self._cuda = lab.rank.runner, device == "cuda"
        self._launch = self._runner.launch
        self._marks: list[tuple[StepPlan, Any, Any]] = []
        self._runner.launch = self.launch

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def launch(self, plan: StepPlan) -> None:
        start = self.mark()
        self._launch(plan)
        self._marks.append((plan, start, self.mark()))

    def take(self) -> list[tuple[StepPlan, float]]:
        """Those since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        marks, self._marks = self._marks, []
        return [(plan, a.elapsed_time(b) if self._cuda else 1e3 * (b - a)) for plan, a, b in marks]

    def close(self) -> None:
        """Steps are no longer marked."""
        self._runner.launch = self._launch


def measure(driver: Driver, args: argparse.Namespace, rows: int, draft_len: int) -> dict[str, Any]:
    core, programs = driver.lab.core, driver.lab.rank.runner._decode_programs
    steps = Steps(driver.lab, args.device)
    driver.lab.set_draft_len(draft_len)
    vocab = driver.lab.config.target.vocab_size
    names = driver.add(random_prompts(rows, args.context, vocab), args.tokens)
    driver.until_all_decode(names)
    prompts = random_prompts(2 * args.samples + 2, args.prompt_tokens, vocab)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    alone: list[float] = []
    for number, prompt in enumerate(prompts):
        way = list(WAYS)[number % 2]
        programs.mixes = WAYS[way]
        for _ in range(3):
            core.step()
        steps.take()
        before = programs.num_mixed
        driver.add([prompt], 1)
        for _ in range(3):
            core.step()
        taken = programs.num_mixed > before
        for plan, ms in steps.take():
            tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
            if len(plan.decode_slots) != rows or number < 2:
                continue
            if tokens == args.prompt_tokens and taken == WAYS[way]:
                found[way].append(ms)
            elif not tokens:
                alone.append(ms)
    programs.mixes = True
    driver.end(names)
    steps.close()
    row: dict[str, Any] = {"rows": rows, "draft_len": draft_len, "prompt_tokens": args.prompt_tokens}
    row["decode_ms"] = round(statistics.median(alone), 4)
    for way, times in found.items():
        row[f"{way}_ms"] = round(statistics.median(times), 4) if times else None
        row[f"{way}_all_ms"] = [round(ms, 3) for ms in times]
    return row


def measure_together(driver: Driver, args: argparse.Namespace, count: int, draft_len: int) -> dict[str, Any]:
    programs = driver.lab.rank.runner._decode_programs
    driver.lab.set_draft_len(draft_len)
    vocab = driver.lab.config.target.vocab_size
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(2 * args.samples + 2):
        way = list(WAYS)[number % 2]
        programs.mixes = WAYS[way]
        prompts = random_prompts(count, args.together_tokens, vocab)
        driver.sync()
        before, started = programs.num_mixed, time.perf_counter()
        names = driver.add(prompts, 2)
        driver.until_all_decode(names)
        spent_ms = 1e3 * (time.perf_counter() - started)
        driver.end(names)
        if number >= 2 and (programs.num_mixed > before) == WAYS[way]:
            found[way].append(spent_ms)
    programs.mixes = True
    row: dict[str, Any] = {"together": count, "draft_len": draft_len, "prompt_tokens": args.together_tokens}
    for way, times in found.items():
        row[f"{way}_ms"] = round(statistics.median(times), 4) if times else None
        row[f"{way}_all_ms"] = [round(ms, 3) for ms in times]
    return row


def main() -> None:
    args = parse()
    show_progress()
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        lab = Lab(smol_config(args) if args.smollm2 else q8_config(args, Path(scratch)))
        record: dict[str, Any] = {"command": command_line(), "versions": versions(), "start_s": round(lab.start_s, 1)}
        record["rows"] = []
        driver = Driver(lab, args.device)
        for draft_len in args.draft_lens:
            for row in itertools.chain(
                (measure_together(driver, args, count, draft_len) for count in args.together),
                (measure(driver, args, count, draft_len) for count in args.rows),
            ):
                record["rows"].append(row)
                print("ROW", json.dumps({k: v for k, v in row.items() if not k.endswith("_all_ms")}), flush=True)
                save(args.out, record)
        driver.monitor.close()
        lab.core.check_integrity()
        lab.close()
    if any(row[f"{way}_ms"] is None for row in record["rows"] for way in WAYS):
        sys.exit(3)
    sys.exit(0 if all(row["rows_ms"] < row["behind_ms"] for row in record["rows"]) else 1)


if __name__ == "__main__":
    main()
