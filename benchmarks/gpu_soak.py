"""Thousands of requests of mixed lengths, some aborted at random, on one GPU: no error, no leak, books in order.

    python benchmarks/gpu_soak.py OUT.json smol --smollm2 MODEL --drafter DIR [--requests 10000] [--concurrency 64]
    python benchmarks/gpu_soak.py OUT.json q8

Models and needs: see gpu_engine.py. Requests differ in prompt and output length, sampling, draft length (the schedule
changes while they run) and end: by length, by abort, or while their first token is on its way. A call that makes the
host wait for the device is an error; --logprobs allows it, as log-probabilities are read that way, and asks for some.
Exits 1 unless every block is free or cached at the end, the engine's checks pass, and the second half took no more GPU
memory than the first; a run of under 400 steps says nothing of that. For `compute-sanitizer`, where it is installed, it
is to be run without reports of failed driver calls, as flash-attn's compiler probes for functions that a driver may not
have; errors of memory are reported:

    compute-sanitizer --report-api-errors no --error-exitcode 9 python benchmarks/gpu_soak.py OUT.json smol .. \\
        --requests 12 --concurrency 3 --draft-lens 0 15 --max-model-len 320 --programs repeated
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from command_line import command_line
from gpu_engine import q8_config, smol_config
from gpu_lab import Lab, save, show_progress, versions

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams


def request_of(rng: random.Random, number: int, vocab: int, longest: int, logprobs: bool) -> EngineRequest:
    prompt = [rng.randrange(10, vocab - 10) for _ in range(min(rng.choice((1, 7, 40, 150, longest)), longest // 3))]
    params: dict[str, Any] = dict(max_tokens=rng.randrange(1, longest // 3), seed=number, detokenize=False)
    params |= dict(ignore_eos=rng.random() < 0.5, min_tokens=min(rng.choice((0, 0, 3)), params["max_tokens"]))
    kind = rng.random()
    if kind < 0.5:
        params |= dict(temperature=0.0)
    elif kind < 0.75:
        params |= dict(temperature=0.8)
    elif kind < 0.97 or not logprobs:
        params |= dict(temperature=0.9, top_p=0.9, top_k=rng.choice((0, 40)))
    else:
        params |= dict(temperature=0.0, logprobs=2)
    return EngineRequest(request_id=f"r{number}", prompt_token_ids=tuple(prompt), params=SamplingParams(**params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", choices=("smol", "q8"))
    parser.add_argument("--smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--requests", type=int, default=10000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[0, 3, 7, 15])
    parser.add_argument("--max-model-len", type=int, default=640)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--abort-share", type=float, default=0.2)
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--programs", choices=("graphs", "repeated", "eager"))
    parser.add_argument("--limit-s", type=float, default=400.0)
    args = parser.parse_args()
    show_progress()
    at_once, args.concurrency = args.concurrency, [args.concurrency]
    args.batched_tokens, args.dtype, args.acceptance_length = 4096, "bfloat16", 6.5
    args.prompt_tokens, args.tokens = args.max_model_len // 3, args.max_model_len // 3
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        config = smol_config(args) if args.model == "smol" else q8_config(args, Path(scratch))
        lab = Lab(config)
    core, cuda = lab.core, args.device == "cuda"
    ended: dict[str, int] = {}
    lengths: dict[str, int] = {}
    doomed: dict[str, int] = {}
    reserved: list[int] = []
    sent = tokens = steps = 0
    if cuda and not args.logprobs:
        torch.cuda.set_sync_debug_mode("error")
    started = time.perf_counter()
    while (sent < args.requests and time.perf_counter() - started < args.limit_s) or core.has_work():
        while sent < args.requests and len(lengths) < at_once and time.perf_counter() - started < args.limit_s:
            request = request_of(rng, sent, config.target.vocab_size, args.max_model_len, args.logprobs)
            core.add_request(request)
            lengths[request.request_id] = 0
            if rng.random() < args.abort_share:
                doomed[request.request_id] = rng.randrange(0, 40)
            sent += 1
        if steps % 50 == 49 and config.drafter is not None:
            lab.set_draft_len(rng.choice(args.draft_lens))
        for name in [n for n, least in doomed.items() if lengths[n] >= least]:
            core.abort(name)
            del doomed[name]
        for delta in core.step():
            tokens += len(delta.token_ids)
            lengths[delta.request_id] += len(delta.token_ids)
            if delta.finish_reason is not None:
                ended[delta.finish_reason] = ended.get(delta.finish_reason, 0) + 1
                del lengths[delta.request_id]
                doomed.pop(delta.request_id, None)
        steps += 1
        if steps % 200 == 0 and cuda:
            reserved.append(torch.cuda.memory_reserved())
    seconds = time.perf_counter() - started
    if cuda:
        torch.cuda.set_sync_debug_mode("default")
    core.check_integrity()
    stats = core.stats()
    half = len(reserved) // 2
    growth = max(reserved[half:]) - max(reserved[:half]) if half else None
    record = {
        "command": command_line(),
        "versions": versions(),
        "requests": sent,
        "ended": ended,
        "tokens": tokens,
        "steps": steps,
        "seconds": round(seconds, 1),
        "blocks": {"free": stats.free_blocks, "cached": stats.cached_blocks, "total": stats.total_blocks},
        "memory_growth_in_second_half_bytes": growth,
        "preemptions": core.counters().preemptions,
        "synchronising_calls_are_errors": cuda and not args.logprobs,
    }
    record["ok"] = (
        stats.free_blocks + stats.cached_blocks == stats.total_blocks
        and sum(ended.values()) == sent
        and "error" not in ended
        and (growth is None or growth <= 0)
    )
    print(json.dumps(record, indent=1))
    save(args.out, record)
    sys.exit(0 if record["ok"] else 1)


if __name__ == "__main__":
    main()
