"""What each decoding option costs per decode step, at batch 1 and 16, on the CPU or on a GPU.

    python benchmarks/sampling_cost.py OUT.json --model DIR --drafter DIR [--draft-len 5] [--rounds 3] [--device cuda]

Options of a request run on one engine, those of a deployment (how drafts are chosen and verified, the gate, missing
filters) on engines of their own beside it, in interleaved rounds. A step counts once every request of the batch
decodes. Right before an option's steps as many are made by greedy decoding on the first engine, so that a slow minute
of the machine hits both: the figure of an option is the median of all its steps, its cost the difference to the median
of those greedy ones (and its share of it). End-of-sequence is ignored and nothing is detokenised. Drafts are made and
verified at the given length in every step, whatever of them is accepted. The prompt's log-probabilities are measured by
the time of a whole prefill. The file is written after every round.

Probabilistic drafts on CUDA need FlashInfer, whose kernel is compiled on first use. Where it is missing their rows are
left out and the record says why; which path verifies the drafts of an engine stands beside its name.
"""

import argparse
import contextlib
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from command_line import command_line

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.bad_words import bad_word_token_ids
from engine.request import EngineRequest

PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2}
TOKEN_RULES = {
    "logit_bias": {100 + i: (-1.0) ** i for i in range(100)},
    "allowed_token_ids": list(range(1, 1024)),
    "bad_words": [f"{a}{b}" for a, b in itertools.product("abcd", "efgh")],
}
DRAW = {"temperature": 0.8}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": DRAW,
    "temperature, top_k 50": DRAW | {"top_k": 50},
    "temperature, top_p 0.9": DRAW | {"top_p": 0.9},
    "temperature, min_p 0.05": DRAW | {"min_p": 0.05},
    "repetition penalty": {"repetition_penalty": 1.1},
    "presence and frequency penalty": {"presence_penalty": 0.3, "frequency_penalty": 0.2},
    "all penalties": PENALTIES,
    "100 logit biases": {"logit_bias": TOKEN_RULES["logit_bias"]},
    "1023 allowed ids": {"allowed_token_ids": TOKEN_RULES["allowed_token_ids"]},
    "16 bad words": {"bad_words": TOKEN_RULES["bad_words"]},
    "min_tokens": {"min_tokens": 10_000},
    "5 logprobs": {"logprobs": 5},
    "penalties, biases, ids and words": PENALTIES | TOKEN_RULES,
}
Cell = tuple[int, str, str]  # batch, deployment, option
MIXED = "mixed batch"  # a row of each of the options above, in turn


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """An engine beside the first one. spec: fields of DFlashDecodingConfig; options: rows that run on it."""

    options: tuple[str, ...]
    spec: dict[str, Any] = field(default_factory=dict)
    draft_sampling: str | None = None


DEPLOYMENTS = {
    "coupled drafts": Deployment(options=(*OPTIONS, MIXED), spec={"enable_penalty": True}, draft_sampling="coupled"),
    "greedy drafts": Deployment(options=("temperature", "temperature, top_p 0.9"), draft_sampling="greedy"),
    "rejection sampling, greedy drafts": Deployment(
        options=("greedy", "temperature", "temperature, top_k 50", "temperature, top_p 0.9"),
        spec={"use_rejection_sampling": True},
        draft_sampling="greedy",
    ),
    "rejection sampling, probabilistic drafts": Deployment(
        options=("greedy", "temperature", "temperature, top_k 50", "temperature, top_p 0.9"),
        spec={"use_rejection_sampling": True},
        draft_sampling="probabilistic",
    ),
    "gate": Deployment(
        options=("greedy", "temperature"),
        spec={"acceptance_rate_window_size": 64, "acceptance_rate_threshold": 0.0},  # never below: it goes on counting
    ),
    "no_topk_no_topp": Deployment(
        options=("temperature", "temperature, min_p 0.05"), spec={"advanced_sampling_mode": "no_topk_no_topp"}
    ),
}


class Steps:
    """Drives an engine's core and measures its steps."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._numbers = itertools.count()

    def decode(self, options: list[dict[str, Any]], *, batch: int, prompt_len: int, num_steps: int) -> list[float]:
        """Seconds of num_steps steps in which all rows decode; options: of the rows, in turn."""
        waiting = {self._add(own, prompt_len) for own, _ in zip(itertools.cycle(options), range(batch), strict=False)}
        active, core = list(waiting), self._llm.core
        while waiting:
            waiting -= {delta.request_id for delta in core.step() if delta.token_ids}
        times = []
        for _ in range(num_steps):
            started = time.perf_counter()
            core.step()
            times.append(time.perf_counter() - started)
        self._abort(active)
        return times

    def prefill(self, options: dict[str, Any], prompt_len: int) -> float:
        """Seconds to the first token of one prompt."""
        started = time.perf_counter()
        request_id = self._add(options, prompt_len)
        while not any(delta.token_ids for delta in self._llm.core.step()):
            pass
        elapsed_s = time.perf_counter() - started
        self._abort([request_id])
        return elapsed_s

    def _add(self, options: dict[str, Any], prompt_len: int) -> str:
        number = next(self._numbers)
        generator = torch.Generator().manual_seed(number)
        vocab_size = self._llm.config.target.vocab_size
        prompt = torch.randint(0, vocab_size, (prompt_len,), generator=generator).tolist()
        own = {"temperature": 0.0, "seed": number, "max_tokens": None, "ignore_eos": True} | options
        params = SamplingParams(detokenize=False, **own)
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=tuple(prompt),
            params=params,
            bad_word_ids=bad_word_token_ids(self._llm.tokenizer, params.bad_words or ()),
        )
        self._llm.core.add_request(request)
        return request.request_id

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._llm.core.abort(request_id)
        while self._llm.core.has_work():
            self._llm.core.step()


def build(args: argparse.Namespace, deployment: Deployment) -> LLM:
    largest = max(args.batches)
    # Rows that all accept everything must not reach the end of the context.
    max_model_len = max(args.prompt_len + (args.steps + 4) * (args.draft_len + 1), args.prefill_len + 8)
    spec = DFlashDecodingConfig(max_draft_len=args.draft_len, speculative_model=args.drafter, **deployment.spec)
    return LLM(
        args.model,
        speculative_config=spec,
        draft_sampling=deployment.draft_sampling,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        draft_len_choices=[0, args.draft_len],
        max_num_seqs=largest,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(512, largest * (args.draft_len + 1)),
        num_blocks=(largest + 1) * -(-(max_model_len + 3 * args.draft_len + 16) // 16),
        enable_prefix_caching=False,
    )


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None] = lambda record: None) -> dict[str, Any]:
    """The record of all deployments' rows. args: those of `add_arguments`, and model, drafter and device.

    keep: called with the record so far after every round.
    """
    with contextlib.ExitStack() as stack:
        engines: dict[str, Steps] = {}
        verified_by, left_out = {}, {}
        for name, deployment in DEPLOYMENTS.items():
            try:
                llm = stack.enter_context(build(args, deployment))
            except ValueError as error:  # FlashInfer is missing
                if deployment.draft_sampling != "probabilistic":
                    raise
                left_out[name] = str(error)
                continue
            engines[name] = Steps(llm)
            verified_by[name] = verification_of(llm)
        first = next(iter(engines.values()))
        cells = [(batch, name, option) for batch in args.batches for name in engines for option in options_of(name)]
        times: dict[Cell, list[float]] = {cell: [] for cell in cells}
        greedy: dict[Cell, list[float]] = {cell: [] for cell in cells}
        prefills: dict[str, list[float]] = {"without": [], "prompt_logprobs 0": [], "prompt_logprobs 5": []}
        for round_index in range(args.rounds + 1):
            # The first round warms caches and allocators.
            num_steps = args.steps if round_index else min(2, args.steps)
            for cell in cells:
                batch, name, option = cell
                sizes = {"batch": batch, "prompt_len": args.prompt_len, "num_steps": num_steps}
                rows = list(OPTIONS.values()) if option == MIXED else [OPTIONS[option]]
                beside, found = first.decode([OPTIONS["greedy"]], **sizes), engines[name].decode(rows, **sizes)
                if round_index:
                    times[cell] += found
                    greedy[cell] += beside
                took = f"{statistics.median(found) * 1e3:.2f} ms, greedy {statistics.median(beside) * 1e3:.2f} ms"
                print(f"round {round_index} batch {batch} {name}: {option}: {took}", file=sys.stderr, flush=True)
            for name, values in prefills.items():
                options = {} if name == "without" else {"prompt_logprobs": int(name.split()[1])}
                elapsed_s = first.prefill(options, args.prefill_len)
                if round_index:
                    values.append(elapsed_s)
            if round_index == 0:
                continue
            record = {
                "verified_drafts_per_row": args.draft_len,
                "drafts_of_sampled_rows_verified_by": verified_by,
                "left_out": left_out,
                "rounds": round_index,
                "steps": {f"batch {batch}": rows_of(batch, times, greedy) for batch in args.batches},
                "prefill_ms": {name: round(statistics.median(values) * 1e3, 2) for name, values in prefills.items()},
                "prefill_len": args.prefill_len,
            }
            keep(record)
    return record


def options_of(name: str) -> tuple[str, ...]:
    return DEPLOYMENTS[name].options


def verification_of(llm: LLM) -> str:
    """Which code decides about the drafts of sampled rows."""
    if not llm.config.use_rejection_sampling:
        return "exact match"
    if llm.config.draft_sampling == "probabilistic" and llm.config.device == "cuda":
        return "flashinfer.sampling.chain_speculative_sampling"
    return "engine.sampling.rejection"


def rows_of(
    batch: int, times: dict[Cell, list[float]], greedy: dict[Cell, list[float]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Per deployment and option: the median step, and what it costs over the greedy steps made beside it."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for cell, values in times.items():
        at, name, option = cell
        if at == batch:
            value, base = (statistics.median(some) * 1e3 for some in (values, greedy[cell]))
            rows.setdefault(name, {})[option] = {
                "step_ms": round(value, 3),
                "cost_ms": round(value - base, 3),
                "share_of_greedy": round((value - base) / base, 3),
            }
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `measure` needs beside model, drafter and device."""
    parser.add_argument("--draft-len", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompt-len", type=int, default=8)
    parser.add_argument(
        "--prefill-len", type=int, default=128, help="of the prompt whose log-probabilities are asked for"
    )


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured on."""
    found = {"cpu": platform.processor() or platform.machine(), "threads": args.threads}
    if args.device == "cuda":
        return found | {"gpu": torch.cuda.get_device_name(0)}
    return found | {"capability": torch.backends.cpu.get_cpu_capability()}


def _write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    add_arguments(parser)
    args = parser.parse_args()
    header = {"command": command_line(), "machine": machine(args), "versions": {"torch": torch.__version__}}
    record = measure(args, lambda so_far: _write(args.out, header | so_far))
    print(json.dumps({"steps": record["steps"], "prefill_ms": record["prefill_ms"]}, indent=1))


if __name__ == "__main__":
    main()
