"""The engine against vLLM on one GPU: the same weights, prompts, lengths and load, one after the other.

    python benchmarks/gpu_vs_vllm.py OUT.json --workloads smol q8 --draft-lens 15 0 7 3 --peer-path SITE \\
        --smollm2 MODEL --drafter DIR --prompts PROMPTS.json

smol: SmolLM2-135M, its trained drafter, greedy, up to 256 tokens. q8: shapes of Qwen3-8B, random weights from one pair
of checkpoints (random_models.py says why; --models keeps them), synthetic acceptance; 256 tokens in, 512 out (256 from
32 requests on). The load's parts and their options: engine_load.py. Rows of part "tokens" tell how many tokens came out
at a K, and how many different ones.

--block-width: rows of this engine's drafter block. trained: what the drafter was trained with (16), all draft lengths
in one engine. drafts: K + 1 at each K, which is what vLLM runs; every K then has an engine, and a process, of its own,
and K = 0 has no drafter, as in vLLM.

--inter-token-target-ms: further rows of the part "poisson" with this engine's option at these values, under the rates
that it was put under without (without any: its own).

vLLM (0.26.0, peer_vllm.py; --peer-path is put ahead of its PYTHONPATH) runs first, in one process with one start per
draft length, then this engine, which is also put under the arrivals that the peer bore. Never both at once. Every row
is kept as it comes in OUT.rows.json; with --resume a later run adds to them, so that the two sides and the draft
lengths can be measured in pieces: OUT.json is made from all rows (vs_report.py), OUT.WORKLOAD.svg shows the speeds.
--peer-rows takes vLLM's rows from the .rows.json of another run, such as one of the other block width.
MODEL and the engine's own needs: see gpu_engine.py. Exits 1 if a process failed or a bar does not hold, else 3 if rows
for a bar lack (so does a run that measures one side alone), else 0.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from command_line import command_line
from engine_load import (
    WISHES,
    Load,
    add_load_arguments,
    load_command,
    random_bank,
    smol_bank,
)
from gpu_engine import q8_config, smol_config
from gpu_lab import Lab, drafting_bytes, read_bandwidth, save, versions, weight_bytes
from random_models import write_qwen3_8b
from vs_report import FAIL, draw, exit_code, peer_rates, report

from engine.core import EngineCore
from engine.kv_cache.block_bytes import bytes_per_block
from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from engine.weights.source import fetch

FOUND_IN_LOG = ("Asynchronous scheduling is", "Capturing CUDA graphs", "Capturing dflash", "Using FlashAttention")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--workloads", nargs="+", choices=("smol", "q8"), default=["smol"])
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[15, 0])
    parser.add_argument("--acceptance-length", type=float, default=6.5)
    parser.add_argument("--smollm2")
    parser.add_argument("--drafter")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--peer-path", default="")
    parser.add_argument(
        "--peer-limit-s", type=float, default=600.0, help="seconds of one workload's process of the peer"
    )
    parser.add_argument("--peer-rows", type=Path, help="OUT.rows.json of another run: its rows of the peer")
    parser.add_argument("--peer-kv-gib", type=float, help="the peer's KV cache; without, it measures what is free")
    parser.add_argument("--ours-limit-s", type=float, default=300.0, help="... and of this engine")
    parser.add_argument("--skip", choices=("ours", "peer"))
    parser.add_argument("--block-width", choices=("trained", "drafts"), default="trained", help="of this engine")
    parser.add_argument("--inter-token-target-ms", type=float, nargs="*", default=[], help="of this engine")
    parser.add_argument(
        "--drafter-weights", choices=("model", "int8"), default="model", help="of this engine; rows say which"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows that OUT.rows.json has")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--programs", choices=("graphs", "repeated", "eager"))
    parser.add_argument(
        "--models", type=Path, help="q8: where the checkpoints lie (18 GB), written if they are not there"
    )
    parser.add_argument("--side", choices=("smol", "q8", "models"), help=argparse.SUPPRESS)  # this program's own child
    add_load_arguments(parser)
    args = parser.parse_args()
    if args.peer_rows and args.skip != "peer":
        parser.error("--peer-rows: needs --skip peer")
    return args


# ------------------------------------------------------------------------------------------------- our side, a process


class OurEngine:
    """`engine_load.Engine` over EngineCore."""

    def __init__(self, lab: Lab) -> None:
        self._core = lab.core
        self.seen: Counter[int] = Counter()  # token ids that came out

    def add(self, name: str, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False)
        self._core.add_request(EngineRequest(request_id=name, prompt_token_ids=tuple(prompt), params=params))

    def step(self) -> Iterable[tuple[str, int, bool]]:
        deltas = self._core.step()
        for delta in deltas:
            self.seen.update(delta.token_ids)
        return [(delta.request_id, len(delta.token_ids), delta.finish_reason is not None) for delta in deltas]


def bytes_of_a_step(lab: Lab) -> dict[str, float]:
    """What a step must read at least, and how fast this GPU reads."""
    runner, config = lab.rank.runner, lab.config
    target, drafter = runner._target_program._model, runner._draft_program._drafter
    found = {
        "weights": weight_bytes(target),
        "kv_per_token": bytes_per_block(replace(config, drafter=None)) / config.block_size,
        "bytes_per_s": read_bandwidth(),
    }
    if drafter is not None:
        found["weights_with_drafts"] = weight_bytes(target) + drafting_bytes(target, drafter)
        found["kv_per_token_with_drafts"] = bytes_per_block(config) / config.block_size
    return found


def arrivals_at_targets(
    lab: Lab, load: Load, draft_len: int, rows: Sequence[dict[str, Any]], say: Callable[[dict[str, Any]], None]
) -> None:
    """Arrivals again, by an engine core for each inter-token target over the same device."""
    args, plain = load.args, lab.core
    lab.drain()
    saturated = [row["requests_per_s"] for row in rows if row["draft_len"] == draft_len and row.get("saturated")]
    for target_ms in args.inter_token_target_ms:
        lab.core = EngineCore(config=replace(lab.config, inter_token_target_ms=target_ms), runner=lab.rank.runner)
        if lab.config.max_draft_len:
            lab.set_draft_len(draft_len)
        place = dict(part="poisson", draft_len=draft_len, inter_token_target_ms=target_ms)
        for rate in args.rates or [args.share * most for most in saturated]:
            say(place | load.arrivals(OurEngine(lab), rate, "given" if args.rates else "own"))
        lab.drain()
        lab.core.check_integrity()
    lab.core = plain


def our_side(args: argparse.Namespace) -> None:
    """Measures one workload at every draft length, in one engine."""
    sizes = dict(prompt_tokens=256, tokens=2 * args.tokens, batched_tokens=8192, dtype="bfloat16")
    shape = argparse.Namespace(**vars(args) | sizes)
    longest = max(args.draft_lens)
    drafter: dict[str, Any] = dict(drafter_weights=args.drafter_weights if longest else "model")
    drafter["draft_block_width"] = longest + 1 if longest and args.block_width == "drafts" else None
    rows: list[dict[str, Any]] = []

    def say(row: dict[str, Any]) -> None:
        if row["draft_len"] is not None:
            row["block_width"] = config.block_width if row["draft_len"] else 0
            row["drafter_weights"] = config.drafter_weights
        rows.append(row)
        print("OURS", json.dumps(row), flush=True)
        args.out.write_text(json.dumps(rows) + "\n")

    if args.side == "smol":
        config = smol_config(shape, **drafter)
    else:
        config = q8_config(shape, args.models, **drafter, weights=True)
    lab = Lab(config)
    start = dict(seconds=round(lab.start_s, 1), widths=args.block_width, draft_lens=args.draft_lens)
    start["weights"] = args.drafter_weights
    say(dict(part="start", draft_len=None, **start, **versions()))
    if args.device == "cuda":
        say(dict(part="floor", draft_len=None, **bytes_of_a_step(lab)))
    if args.side == "smol":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(config.model_dir)
        banks = [smol_bank(args.prompts, tokenizer, wish) for wish in WISHES]
        load = Load(args=args, workload="smol", bank=banks[0], more_banks=banks)
    else:
        load = Load(args=args, workload="q8", bank=random_bank())
    for draft_len in args.draft_lens:
        if longest:
            lab.set_draft_len(draft_len)
        engine = OurEngine(lab)
        load.run(engine, draft_len, say)
        if "poisson" in args.parts:
            arrivals_at_targets(lab, load, draft_len, rows, say)
        say(dict(part="tokens", draft_len=draft_len, total=engine.seen.total(), different=len(engine.seen)))
    lab.close()


# ----------------------------------------------------------------------------------------------------------- both sides


def run_side(command: Sequence[str], out: Path, log: Path, limit_s: float, env: dict[str, str]) -> tuple[list, bool]:
    """(rows it wrote, whether it ended well). Its processes are ended with it."""
    print("RUN", *command, flush=True)
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            code: int | None = child.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what it started and left, too
        child.wait()
    print(f"... {'no end within the limit' if code is None else f'exit {code}'}", flush=True)
    if code != 0:
        print("\n".join(log.read_text(errors="replace").splitlines()[-25:]), flush=True)
    return json.loads(out.read_text()) if out.is_file() else [], code == 0


def run_peer(args: argparse.Namespace, workload: str, scratch: Path, target: str, drafter: str) -> tuple[list, bool]:
    """Started again with the draft lengths that are left, as long as each start measures one more."""
    rows: list[dict[str, Any]] = []
    left, ends = list(args.draft_lens), time.perf_counter() + args.peer_limit_s
    log = args.out.with_suffix(f".peer-{workload}.log")
    path = os.pathsep.join(p for p in (args.peer_path, os.environ.get("PYTHONPATH", "")) if p)
    while left and time.perf_counter() < ends:
        out = scratch / f"peer-{workload}-{len(left)}.json"
        command = [sys.executable, str(Path(__file__).with_name("peer_vllm.py")), str(out), workload]
        command += ["--target", target, "--drafter", drafter, "--draft-lens", *map(str, left)]
        command += ["--acceptance-length", str(args.acceptance_length), *load_command(args)]
        if args.peer_kv_gib:
            command += ["--kv-gib", str(args.peer_kv_gib)]
        if workload == "smol":
            command += ["--prompts", str(args.prompts), "--memory-share", "0.4"]
        found, well = run_side(command, out, log, ends - time.perf_counter(), dict(os.environ, PYTHONPATH=path))
        rows += found
        lines = [line for line in log.read_text(errors="replace").splitlines() if any(w in line for w in FOUND_IN_LOG)]
        rows.append(dict(part="start", draft_len=None, log=sorted({line.split("\r")[0][-160:] for line in lines})[:30]))
        ended = [row["draft_len"] for row in found if row["part"] in ("counters", "error")]
        if well or not ended:
            return rows, well
        left = [k for k in left if k not in ended]
    return rows, not left


def run_ours(args: argparse.Namespace, workload: str, scratch: Path, rates: list[float]) -> Iterator[tuple[list, bool]]:
    """One process for all draft lengths, or one for each where the width follows them: what an engine held of the GPU
    is back once its process has ended."""
    groups = [[k] for k in args.draft_lens] if args.block_width == "drafts" else [args.draft_lens]
    ends = time.perf_counter() + args.ours_limit_s
    for draft_lens in groups:
        left_s = ends - time.perf_counter()
        if left_s <= 0:
            print(f"... no time left for {workload} at K = {draft_lens}", flush=True)
            yield [], False
        else:
            yield run_engine(args, workload, scratch, rates, draft_lens, left_s)


def run_engine(
    args: argparse.Namespace, workload: str, scratch: Path, rates: list[float], draft_lens: list[int], limit_s: float
) -> tuple[list, bool]:
    name = f"ours-{workload}" + (f"-{draft_lens[0]}" if args.block_width == "drafts" else "")
    out = scratch / f"{name}.json"
    command = [sys.executable, __file__, str(out), "--side", workload, "--draft-lens", *map(str, draft_lens)]
    command += ["--block-width", args.block_width, "--drafter-weights", args.drafter_weights]
    command += ["--acceptance-length", str(args.acceptance_length), "--block-size", str(args.block_size)]
    command += ["--device", args.device, "--models", str(args.models or scratch / "models"), *load_command(args)]
    command += ["--rates", *map(str, [*args.rates, *rates])]
    command += ["--inter-token-target-ms", *map(str, args.inter_token_target_ms)]
    if args.programs:
        command += ["--programs", args.programs]
    if workload == "smol":
        command += ["--smollm2", args.smollm2, "--drafter", args.drafter, "--prompts", str(args.prompts)]
    return run_side(command, out, args.out.with_suffix(f".{name}.log"), limit_s, dict(os.environ))


def refuse_two_drafters(rows: Sequence[dict[str, Any]], widths: str, weights: str) -> None:
    """Speeds at one K by two widths or types of weights are two speeds, which no report may hold as one."""
    starts = [row for row in rows if (row["side"], row["part"]) == ("ours", "start")]
    for option, name, usual, wanted in (
        ("--block-width", "widths", "trained", widths),
        ("--drafter-weights", "weights", "model", weights),
    ):
        kept = {row.get(name, usual) for row in starts}
        if kept - {wanted}:
            raise SystemExit(
                f"{option}: OUT.rows.json has rows of {', '.join(sorted(kept))}, asked for is {wanted}; give another "
                "OUT, and --peer-rows for the peer's rows"
            )


def main() -> None:
    args = parse()
    if args.side == "models":
        write_qwen3_8b(args.out, weights=True, device=args.device)
        return
    if args.side:
        our_side(args)
        return
    kept = args.out.with_suffix(".rows.json")
    rows: list[dict[str, Any]] = json.loads(kept.read_text()) if args.resume and kept.is_file() else []
    refuse_two_drafters(rows, args.block_width, args.drafter_weights)
    if args.peer_rows:
        found = [row for row in json.loads(args.peer_rows.read_text()) if row["side"] == "vllm"]
        rows = [row for row in rows if row["side"] != "vllm"] + found
    before = json.loads(args.out.read_text()) if args.resume and args.out.is_file() else {}
    record = {"commands": [*before.get("commands", []), command_line()]}
    asked = [
        (workload, part, draft_len)
        for workload in args.workloads
        for part in args.parts
        for draft_len in args.draft_lens
        if part != "accept" or (workload == "smol" and draft_len)  # it is decreed for q8
    ]
    well = True

    def add(side: str, workload: str, found: list[dict[str, Any]]) -> None:
        """The files hold it from here on, whatever becomes of the next run."""
        rows.extend(dict(side=side, workload=workload) | row for row in found)
        kept.write_text(json.dumps(rows) + "\n")
        record.update(report(rows, asked))
        save(args.out, record)
        for name in {point["workload"] for point in record["curve"]}:
            args.out.with_suffix(f".{name}.svg").write_text(draw(record["curve"], name))

    with tempfile.TemporaryDirectory() as scratch:
        models = args.models or Path(scratch) / "models"
        if "q8" in args.workloads:
            # In a child: this process keeps off the GPU, on which the peer measures what is free.
            command = [sys.executable, __file__, str(models), "--side", "models", "--device", args.device]
            subprocess.run(command, check=True)
        for workload in args.workloads:
            if args.skip != "peer":
                if workload == "smol":
                    target, drafter = str(fetch(args.smollm2)), args.drafter
                else:
                    target, drafter = map(str, write_qwen3_8b(models, weights=False))
                found, ok = run_peer(args, workload, Path(scratch), target, drafter)
                well &= ok
                add("vllm", workload, found)
            if args.skip != "ours":
                rates = peer_rates(rows, workload, args.share)
                for found, ok in run_ours(args, workload, Path(scratch), rates):
                    well &= ok
                    add("ours", workload, found)
    for name in ("best", "first", "context", "poisson", "accept", "bars"):
        for row in record.get(name, []):
            print(name.upper(), json.dumps(row), flush=True)
    sys.exit(exit_code(record.get("bars", [])) if well else FAIL)


if __name__ == "__main__":
    main()
