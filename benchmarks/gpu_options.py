"""Every decoding option on a GPU, inside the recorded programs: same tokens, right distributions, and what each costs.

    PYTHONPATH=. python benchmarks/gpu_options.py OUT.json --smollm2 MODEL --drafter DIR --reference REFERENCE.json

MODEL: a model directory or a .gguf file (see gpu_engine.py). REFERENCE: tests/data/greedy_smollm2_f32.json, for its
prompts. `--device cpu --programs repeated` runs the same programs uncaptured.

tokens     float32, seeded: with drafts, in recorded programs, every option alone, all in one batch, and a schedule that
           changes under way give the tokens and log-probabilities of an engine without drafts that runs eagerly. A
           difference counts unless the two tokens' scores, by transformers' logits, are closer than --tie. Then the
           gate (it trips, is silent, is reset), a deployment without filters, and no call that waits for the device.
rejection  a toy vocabulary: the joint distribution of the first tokens under rejection sampling against exact
           probabilities (chi-square; total variation is kept), and how many first drafts were accepted against the sum
           over steps of p(draft), or of min(p, q). Greedy rows of the same batch give the greedy text. One-hot drafts
           by the engine's own code; probabilistic ones by FlashInfer and by the engine's own code.
cost       benchmarks/sampling_cost.py on this device, at --cost-draft-len.

Every row names the path that ran. Probabilistic drafts need FlashInfer on CUDA: without it their rows say so and are no
failures unless --need-flashinfer is given. Exits 1 on a failure, after everything has run.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sampling_cost
import torch
from command_line import command_line
from gpu_correct import TOLERANCE, no_sync
from gpu_lab import save, show_progress, versions
from rejection_judge import judged
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.bad_words import bad_word_token_ids
from engine.runner import decode_programs, draft_program, prompt_programs
from engine.sampling.noise import gumbel_noise
from engine.sampling.rejection import verified_tokens
from engine.weights.source import fetch
from tests.engine.rules_oracle import changed_logits
from tests.reference.joint_tokens import JointTokens
from tests.reference.toy import fit_drafter
from tests.toy import make_drafter, make_target

DRAW = {"temperature": 0.8}
CASES: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperature": [DRAW, {"temperature": 1.3}],
    "top_k": [DRAW | {"top_k": 20}, DRAW | {"top_k": 1}],
    "top_p": [DRAW | {"top_p": 0.9}, DRAW | {"top_p": 0.5}],
    "min_p": [DRAW | {"min_p": 0.05}],
    "all filters": [DRAW | {"top_k": 40, "top_p": 0.95, "min_p": 0.02}],
    "repetition penalty": [DRAW | {"repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.2}],
    "presence and frequency": [{"temperature": 0.0, "presence_penalty": 0.8, "frequency_penalty": 0.5}],
    "logit_bias": [DRAW | {"logit_bias": {i: (-4.0, 4.0)[i % 2] for i in range(200, 300)}}],
    "allowed ids": [DRAW | {"allowed_token_ids": list(range(1, 1024))}],
    "bad words": [{"temperature": 0.0, "bad_words": ["the", "a", "of", "is", " to", "and the"]}],
    "min_tokens and stop ids": [DRAW | {"ignore_eos": False, "min_tokens": 12, "stop_token_ids": list(range(5, 90))}],
    "logprobs": [{"temperature": 0.0, "logprobs": 3}, DRAW | {"logprobs": 0}],
    "prompt logprobs": [DRAW | {"prompt_logprobs": 2}],
}
CASES["mixed batch"] = [rows[0] for rows in CASES.values()]
# These run their D eagerly, behind a recorded T; everything else replays both.
EAGER = {
    "repetition_penalty",
    "presence_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprobs",
}
TOY_CASES: dict[str, dict[str, Any]] = {
    "temperature 1, top_k 6": {"temperature": 1.0, "top_k": 6},
    "temperature 0.7, top_k 8, top_p 0.9": {"temperature": 0.7, "top_k": 8, "top_p": 0.9},
    "temperature 1.5, top_k 5, min_p 0.2": {"temperature": 1.5, "top_k": 5, "min_p": 0.2},
}
TOY_LEN = 3
TOY_PROMPT = [17, 4, 90, 33, 21, 56, 3, 200, 11, 62]
Add = Callable[[str, Callable[[], dict[str, Any]]], None]


def build(args: argparse.Namespace, model: str, drafter: str | None, spec: dict[str, Any], **options: Any) -> LLM:
    K = args.draft_len
    config = None
    settings: dict[str, Any] = dict(decode_programs="eager")
    if drafter is not None:
        config = DFlashDecodingConfig(max_draft_len=K, speculative_model=drafter, **spec)
        settings = dict(decode_programs=args.programs, draft_len_choices=[0, K // 2, K])
    settings |= dict(dtype="float32", device=args.device, max_num_seqs=args.rows, threads=args.threads)
    settings |= dict(max_model_len=640, max_num_batched_tokens=2048, num_blocks=args.rows * 48 + 1)
    return LLM(model, speculative_config=config, enable_prefix_caching=False, **(settings | options))


class TokenCheck:
    """Compares an engine with the outputs of the plain one, case by case."""

    def __init__(self, args: argparse.Namespace, model: Path, texts: list[list[int]]) -> None:
        self._args, self._model, self._texts = args, model, texts
        self._transformers: Any = None
        base = {"max_tokens": args.tokens, "ignore_eos": True, "detokenize": False}
        self._params = {
            name: [
                SamplingParams(seed=1000 + i, **(base | own))
                for i, own in zip(range(len(texts)), itertools.cycle(rows), strict=False)
            ]
            for name, rows in CASES.items()
        }
        with build(args, str(model), None, {}) as plain:
            self._truth = {
                name: [_result_of(o) for o in plain.generate(texts, params)] for name, params in self._params.items()
            }

    def run(self, llm: LLM, name: str, count: int, *, drafts: bool = True) -> dict[str, Any]:
        """One row. drafts: whether the engine is meant to make any."""
        ran, before = _count_programs(llm), llm.core.counters()
        found = [_result_of(o) for o in llm.generate(self._texts[:count], self._params[name][:count])]
        after = llm.core.counters()
        ties, different, largest = [], [], 0.0
        for i, ((truth, logprobs), (own, own_logprobs)) in enumerate(zip(self._truth[name], found, strict=False)):
            if own == truth:
                largest = max([largest, *[abs(a - b) for a, b in zip(logprobs, own_logprobs, strict=True)]])
                continue
            pairs = zip(truth, own, strict=False)
            at = next((j for j, (a, b) in enumerate(pairs) if a != b), min(len(truth), len(own)))
            gap = self._gap(llm, i, truth, own, at, self._params[name][i])
            (ties if gap is not None and gap <= self._args.tie else different).append({"row": i, "at": at, "gap": gap})
        num_drafts = after.num_drafts - before.num_drafts
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        may_run_eagerly = any(EAGER & own.keys() for own in CASES[name])
        replayed = ran["recorded T"] > 0 and (may_run_eagerly or ran["recorded D"] == ran["recorded T"])
        return {
            "case": name,
            "rows": count,
            "tokens": sum(len(own) for own, _ in found),
            "ties": ties,
            "different": different,
            "largest_logprob_error": largest,
            **ran,
            "drafted_blocks": num_drafts,
            "acceptance_length": round(1 + accepted / max(num_drafts, 1), 3),
            "ok": not different and largest <= TOLERANCE and replayed and (num_drafts > 0) == drafts,
        }

    def _gap(self, llm: LLM, i: int, truth: list[int], own: list[int], at: int, params: SamplingParams) -> float | None:
        """Distance of the two tokens' scores at the first difference; None where one of the texts ended there."""
        if at >= min(len(truth), len(own)):
            return None
        if self._transformers is None:
            model = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
            self._transformers = model.to(self._args.device).eval()
        text = self._texts[i]
        with torch.no_grad():
            ids = torch.tensor([[*text, *truth[:at]]], device=self._args.device)
            raw_V = self._transformers(ids).logits[0, -1].float().cpu()
        words = bad_word_token_ids(llm.tokenizer, params.bad_words or ())
        score_V = changed_logits(raw_V, prompt=text, output=truth[:at], params=params, bad_words=words)
        if params.temperature > 0:
            key = torch.tensor([params.seed]), torch.tensor([len(text) + at])
            score_V = score_V / params.temperature + gumbel_noise(*key, torch.arange(len(score_V)))[0]
        return abs(float(score_V[truth[at]] - score_V[own[at]]))


def _result_of(output: Any) -> tuple[list[int], list[float]]:
    """(tokens, all log-probabilities that were asked for)."""
    entries = [*(output.outputs[0].logprobs or ()), *[e for e in output.prompt_logprobs or () if e is not None]]
    return list(output.outputs[0].token_ids), [x for e in entries for x in (e.logprob, *e.top_logprobs)]


def _count_programs(llm: LLM) -> Counter[str]:
    """Counts from now on how often T and D run in recorded programs."""
    ran: Counter[str] = Counter({"recorded T": 0, "recorded D": 0})
    programs = llm._rank.runner._decode_programs

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any) -> Any:
            ran[name] += 1
            return run(*args)

        return count

    programs.run_target = counted("recorded T", type(programs).run_target.__get__(programs))
    programs.run_draft = counted("recorded D", type(programs).run_draft.__get__(programs))
    return ran


def check_tokens(args: argparse.Namespace, add: Add, model: Path, texts: list[list[int]]) -> None:
    check, count = TokenCheck(args, model, texts), len(texts)
    with build(args, str(model), args.drafter, {"enable_penalty": True}, draft_sampling="coupled") as llm:
        for name, rows in itertools.product(CASES, sorted({1, count})):
            add("tokens, coupled drafts", lambda n=name, r=rows: check.run(llm, n, r))
        add("schedule changes", lambda: _rescheduled(llm, lambda: check.run(llm, "mixed batch", count)))
        add("no waiting call", lambda: _without_waiting(args, lambda: check.run(llm, "mixed batch", count)))
    spec = {"acceptance_rate_window_size": 4, "acceptance_rate_threshold": 1.0}
    spec |= {"advanced_sampling_mode": "no_topk_no_topp"}
    with build(args, str(model), args.drafter, spec, draft_sampling="greedy") as llm:
        for name in ("greedy", "temperature", "min_p"):
            add("tokens, greedy drafts, no_topk_no_topp, gate", lambda n=name: _gated(llm, check, n, count))
        add("refused filters", lambda: _refused(llm))


def _rescheduled(llm: LLM, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`run` while K goes through all lengths, a new one every five steps."""
    step, count, version = llm.core.step, itertools.count(1), llm.core.stats().schedule_version[1]
    choices = llm.config.draft_len_choices[::-1]

    def changing() -> Any:
        number = next(count)
        if number % 5 == 0:
            draft_len = choices[number // 5 % len(choices)]
            llm.core.apply_schedule((1, version + number), {llm.config.max_num_seqs: draft_len})
        return step()

    llm.core.step = changing
    try:
        row = run()
    finally:
        llm.core.step = step
        llm.core.apply_schedule((1, version + 10**6), {llm.config.max_num_seqs: llm.config.max_draft_len})
    return row | {"changes": next(count) // 5}


def _without_waiting(args: argparse.Namespace, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    with no_sync(args):
        return run()


def _gated(llm: LLM, check: TokenCheck, name: str, count: int) -> dict[str, Any]:
    """After a reset drafts are made until the gate trips; from then on none are."""
    llm.core.reset_gate()
    row = check.run(llm, name, count)
    tripped = llm.core.stats().speculation_disabled
    silent = check.run(llm, name, count, drafts=False)["ok"]
    return row | {"tripped": tripped, "silent_afterwards": silent, "ok": row["ok"] and tripped and silent}


def _refused(llm: LLM) -> dict[str, Any]:
    messages = {}
    for name, value in (("top_k", 5), ("top_p", 0.9)):
        try:
            llm.generate([[1, 2, 3]], SamplingParams(temperature=1.0, **{name: value}))
        except ValueError as error:
            messages[name] = str(error)
    return {"messages": messages, "ok": all(messages.get(n, "").startswith(f"{n}:") for n in ("top_k", "top_p"))}


def _own_code(logits_NV: Any, rows: Any, proposals: Any, *, tp: Any, vocab_start: int, **chain: int) -> torch.Tensor:
    """In place of `chain_tokens`: what verifies probabilistic drafts on the CPU."""
    return verified_tokens(logits_NV, rows, proposals, tp, vocab_start)


def check_rejection(args: argparse.Namespace, add: Add, scratch: Path) -> None:
    shape = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    target = make_target(scratch / "target", kind="qwen3", **shape)
    drafter = make_drafter(scratch / "drafter", target, head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    torch.manual_seed(0)
    texts = model.generate(  # with a drafter that has seen what is likely, both branches of the rule are taken
        torch.tensor([TOY_PROMPT]), do_sample=True, top_k=6, max_new_tokens=6, num_return_sequences=16, pad_token_id=0
    )
    fit_drafter(drafter, model, texts.tolist(), text_len=8, steps=40)
    exact = {
        name: JointTokens(model, TOY_PROMPT, SamplingParams(**own), length=TOY_LEN) for name, own in TOY_CASES.items()
    }
    options = dict(max_num_seqs=32, max_model_len=96, num_blocks=300)
    chain = draft_program.chain_tokens
    paths = [("greedy", "own code"), ("probabilistic", "FlashInfer"), ("probabilistic", "own code")]
    for drafts, path in paths if args.device == "cuda" else [paths[0], paths[2]]:
        kind = f"rejection sampling, {drafts} drafts, {path}"
        draft_program.chain_tokens = _own_code if path == "own code" else chain
        spec = {"use_rejection_sampling": True}
        try:
            llm = build(args, str(target), str(drafter), spec, draft_sampling=drafts, **options)
        except ValueError as error:
            add(kind, lambda e=str(error): {"left_out": e, "ok": not args.need_flashinfer})
            continue
        with llm:
            for name in TOY_CASES:
                add(kind, lambda n=name, e=llm: {"case": n, **judged(e, exact[n], args.draws, length=TOY_LEN)})
    draft_program.chain_tokens = chain


def check_cost(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    settings = vars(args) | {"model": str(model), "draft_len": args.cost_draft_len, "dtype": "bfloat16"}
    settings |= {"rounds": args.cost_rounds, "steps": 20, "batches": args.cost_batches}
    settings |= {"prompt_len": 8, "prefill_len": 128}
    record = sampling_cost.measure(argparse.Namespace(**settings))
    return record | {"ok": not (record["left_out"] and args.need_flashinfer)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smollm2", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--reference", type=Path, required=True)
    parts = ["tokens", "rejection", "cost"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--draft-len", type=int, default=7)
    parser.add_argument("--rows", type=int, default=16, help="requests of a batch of part tokens")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--tie", type=float, default=1e-4)
    parser.add_argument("--draws", type=int, default=4000, help="requests of each distribution")
    parser.add_argument("--cost-draft-len", type=int, default=15)
    parser.add_argument("--cost-rounds", type=int, default=3)
    parser.add_argument("--cost-batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--need-flashinfer", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--programs", default=None, choices=("graphs", "repeated", "eager"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    show_progress()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = fetch(args.smollm2)
    texts = [case["prompt_token_ids"] for case in json.loads(args.reference.read_text())["cases"][: args.rows]]
    record: dict[str, Any] = {"command": command_line(), "versions": versions(), "ok": True, "results": []}

    def add(kind: str, check: Callable[[], dict[str, Any]]) -> None:
        started = time.perf_counter()
        try:
            row = {"check": kind, **check()}
        except Exception as error:  # the other checks still say what they have to say
            traceback.print_exc()
            row = {"check": kind, "error": f"{type(error).__name__}: {error}"[:500], "ok": False}
        row["seconds"] = round(time.perf_counter() - started, 1)
        record["results"].append(row)
        record["ok"] &= row["ok"]
        print("ROW", json.dumps(row), flush=True)
        save(args.out, record)

    def part(name: str, run: Callable[[], None]) -> None:
        """An engine that does not start must not take the other parts along."""
        if name in args.parts:
            try:
                run()
            except Exception as error:
                traceback.print_exc()
                message = f"{type(error).__name__}: {error}"[:500]
                add(name, lambda: {"error": message, "ok": False})

    # Few programs: every one is compiled and recorded at each start.
    decode_programs.row_buckets = lambda largest: tuple(sorted({1, largest}))
    prompt_programs._SIZES = (128, 384)
    part("tokens", lambda: check_tokens(args, add, model, texts))
    with tempfile.TemporaryDirectory() as scratch:
        part("rejection", lambda: check_rejection(args, add, Path(scratch)))
    part("cost", lambda: add("cost", lambda: check_cost(args, model)))
    sys.exit(0 if record["ok"] else 1)


if __name__ == "__main__":
    main()
