"""Host time of a decode step without a model: scheduling, plan, upload, results, tokens into sequences.

    python benchmarks/host_overhead.py OUT.json [--rows 1 8 64 128] [--draft-len 15] [--emitted 7] [--cold] [--profile]

The engine runs as always, on toy shapes; T and D are replaced by writing one packed result row per request, --emitted
tokens each. --device cuda adds what the copies, events and marks of a GPU cost. --cold: ahead of each step every cache
of the processor is filled with something else, as a neighbour on its core or the wait for a GPU may do.
"""

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from command_line import command_line
from gpu_lab import Lab, dummy_config, save, versions
from random_models import QWEN3_8B, QWEN3_8B_DFLASH

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams

_MORE_THAN_CACHES = 128 << 20  # bytes
TINY = dict(hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
TINY |= dict(vocab_size=512, num_hidden_layers=1, max_position_embeddings=16384)


def make_lab(directory: Path, rows: int, draft_len: int, device: str) -> Lab:
    target, drafter = directory / "target", directory / "drafter"
    dflash = {"mask_token_id": 500, "target_layer_ids": [0]}
    for path, raw in (
        (target, QWEN3_8B | TINY | {"eos_token_id": 1, "bos_token_id": 0}),
        (drafter, QWEN3_8B_DFLASH | TINY | {"num_target_layers": 1, "dflash_config": dflash}),
    ):
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(raw))
    config = dummy_config(
        target,
        drafter,
        max_draft_len=draft_len,
        max_model_len=16000,
        max_num_seqs=rows,
        device=device,
        dtype="float32",
        num_threads=1,
        decode_programs="repeated",
    )
    return Lab(config)


@torch.inference_mode()
def without_model(lab: Lab, draft_len: int, emitted: int) -> None:
    """Every decode row emits `emitted` tokens of id 5."""
    programs = lab.rank.runner._decode_programs
    row = [emitted, emitted - 1, draft_len, 0, *[5] * (draft_len + 1)]
    rows = programs.results.numel() // len(row)
    programs.packed(rows, draft_len).copy_(torch.tensor(row, dtype=torch.int32).expand(rows, -1))
    for pair in programs._pairs.values():
        pair.run_target = lambda: None
        pair.run_draft = dict.fromkeys(pair.run_draft, lambda: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--draft-len", type=int, default=15)
    parser.add_argument("--emitted", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    record: dict[str, Any] = {"command": command_line(), "versions": versions(), "rows": []}
    for rows in args.rows:
        with tempfile.TemporaryDirectory() as scratch:
            lab = make_lab(Path(scratch), rows, args.draft_len, args.device)
        core = lab.core
        params = SamplingParams(temperature=0.0, max_tokens=15000, ignore_eos=True)
        for index in range(rows):
            core.add_request(EngineRequest(request_id=f"r{index}", prompt_token_ids=(3,) * 20, params=params))
        while core.stats().num_running < rows or core.stats().num_waiting:
            core.step()
        without_model(lab, args.draft_len, args.emitted)
        for _ in range(20):
            core.step()
        profiler = cProfile.Profile()
        if args.profile:
            profiler.enable()
        times = []
        other = torch.ones(_MORE_THAN_CACHES // 8, dtype=torch.int64)
        for _ in range(args.steps):
            if args.cold:
                other += 1
            started = time.perf_counter()
            core.step()
            times.append(time.perf_counter() - started)
        profiler.disable()
        times.sort()
        row = {"rows": rows, "median_us": round(1e6 * times[len(times) // 2], 1)}
        row |= {
            "p10_us": round(1e6 * times[len(times) // 10], 1),
            "p90_us": round(1e6 * times[9 * len(times) // 10], 1),
        }
        record["rows"].append(row)
        print("ROW", json.dumps(row), flush=True)
        if args.profile:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(22)
        save(args.out, record)


if __name__ == "__main__":
    main()
