"""What each sampling option costs per decode step on a CPU, at batch 1 and 16.

    python benchmarks/sampling_cost.py OUT.json --model DIR [--drafter DIR --draft-len 5] [--rounds 3]

Every option runs on the same engine in interleaved rounds, so that a slow minute of the machine hits every row alike. A
step counts once every request of the batch decodes; the figure of an option is the median of all its steps, its cost
the difference to the row "greedy" (and its share of it). End-of-sequence is ignored and nothing is detokenised. Drafts
are made and verified at the given length in every step, whatever of them is accepted. The prompt's log-probabilities
are measured by the time of a whole prefill.
"""

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
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


class Steps:
    """Drives an engine's core and measures its steps."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._numbers = itertools.count()

    def decode(self, options: dict[str, Any], *, batch: int, prompt_len: int, num_steps: int) -> list[float]:
        """Seconds of num_steps steps in which all rows decode."""
        waiting = {self._add(options, prompt_len) for _ in range(batch)}
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--draft-len", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompt-len", type=int, default=128)
    args = parser.parse_args()
    largest = max(args.batches)
    spec = None
    if args.drafter is not None:
        spec = DFlashDecodingConfig(max_draft_len=args.draft_len, speculative_model=args.drafter, enable_penalty=True)
    # Rows that all accept everything must not reach the end of the context.
    max_model_len = args.prompt_len + (args.steps + 4) * (args.draft_len + 1)
    with LLM(
        args.model,
        speculative_config=spec,
        dtype=args.dtype,
        threads=args.threads,
        max_num_seqs=largest,
        max_model_len=max_model_len,
        max_num_batched_tokens=max(512, largest * (args.draft_len + 1)),
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
    ) as llm:
        steps = Steps(llm)
        cells = list(itertools.product(args.batches, OPTIONS))
        times: dict[tuple[int, str], list[float]] = {cell: [] for cell in cells}
        prefills: dict[str, list[float]] = {"without": [], "prompt_logprobs 0": [], "prompt_logprobs 5": []}
        for round_index in range(args.rounds + 1):
            for batch, name in cells:
                found = steps.decode(OPTIONS[name], batch=batch, prompt_len=args.prompt_len, num_steps=args.steps)
                if round_index:  # the first round warms caches and allocators
                    times[batch, name] += found
                print(
                    f"round {round_index} batch {batch} {name}: {statistics.median(found) * 1e3:.2f} ms",
                    file=sys.stderr,
                    flush=True,
                )
            for name, values in prefills.items():
                options = {} if name == "without" else {"prompt_logprobs": int(name.split()[1])}
                elapsed_s = steps.prefill(options, args.prompt_len)
                if round_index:
                    values.append(elapsed_s)
    record = {
        "command": command_line(),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": args.threads,
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "versions": {"torch": torch.__version__},
        "verified_drafts_per_row": 0 if spec is None else args.draft_len,
        "steps": {f"batch {batch}": rows_of(batch, times) for batch in args.batches},
        "prefill_ms": {name: round(statistics.median(values) * 1e3, 2) for name, values in prefills.items()},
        "prompt_len": args.prompt_len,
    }
    args.out.write_text(json.dumps(record, indent=1))
    print(json.dumps({"steps": record["steps"], "prefill_ms": record["prefill_ms"]}, indent=1))


def rows_of(batch: int, times: dict[tuple[int, str], list[float]]) -> dict[str, dict[str, float]]:
    """Per option: the median step, and what it costs over greedy decoding."""
    medians = {name: statistics.median(values) * 1e3 for (at, name), values in times.items() if at == batch}
    base = medians["greedy"]
    return {
        name: {
            "step_ms": round(value, 3),
            "cost_ms": round(value - base, 3),
            "share_of_greedy": round((value - base) / base, 3),
        }
        for name, value in medians.items()
    }


if __name__ == "__main__":
    main()
