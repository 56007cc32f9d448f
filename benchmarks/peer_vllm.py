"""vLLM (0.26.0) under the load of engine_load.py: one engine per draft length, started one after the other.

    python benchmarks/peer_vllm.py OUT.json smol --target DIR --drafter DIR --prompts PROMPTS.json --draft-lens 15 0
    python benchmarks/peer_vllm.py OUT.json q8 --target DIR --drafter DIR --draft-lens 15 0

Needs vllm and what it needs, not this engine. smol: SmolLM2 and its trained drafter, greedy. q8: Qwen3-8B's shapes, the
checkpoints of random_models.py, synthetic acceptance.
Asynchronous scheduling is demanded, and CUDA graphs of whole decode steps up to --concurrency requests: an engine
without either is not measured. DIR needs a tokenizer for smol. Rows are written as they come, with a row about each
start: {"part": "start", "draft_len", "seconds", "async_scheduling", "cudagraph_mode", "graph_sizes", ..}. The drafter
runs blocks of K + 1 rows there, whatever it was trained with: `block_width` of every row.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine_load import WISHES, Load, add_load_arguments, random_bank, smol_bank

SETTINGS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its kernels are compiled at first use, which the machine may not be able to
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("workload", choices=("smol", "q8"))
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, help="smol: sets of user messages")
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[15, 0])
    parser.add_argument("--acceptance-length", type=float, default=6.5)
    parser.add_argument("--memory-share", type=float, default=0.6)
    parser.add_argument("--kv-gib", type=float, help="of its KV cache, which then is not measured")
    add_load_arguments(parser)
    return parser.parse_args()


class VllmEngine:
    """`engine_load.Engine` over vLLM's engine: its core runs in a process of its own, as under `LLM.generate`."""

    def __init__(self, args: argparse.Namespace, draft_len: int, **more: Any) -> None:
        """more: of vLLM's engine."""
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._sampling = lambda max_tokens, ignore_eos: SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        most = max(args.concurrency)
        options: dict[str, Any] = dict(
            model=args.target,
            dtype="bfloat16",
            max_model_len=args.max_model_len,
            max_num_seqs=most,
            gpu_memory_utilization=args.memory_share,
            enable_prefix_caching=False,
            async_scheduling=True,
            disable_log_stats=False,  # the counters of get_metrics
            attention_backend="FLASH_ATTN",
            # The default ends at 512 tokens, which leaves a decode step of many requests and long drafts without one.
            # Prompts use them too, so that few requests and no drafts get no shorter list.
            compilation_config={"max_cudagraph_capture_size": max(2048, most * (draft_len + 1))},
        )
        if args.kv_gib:
            options["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
        if args.workload == "q8":
            options |= dict(skip_tokenizer_init=True)
        if draft_len:
            speculative = dict(method="dflash", model=args.drafter, num_speculative_tokens=draft_len)
            if args.workload == "q8":
                speculative |= dict(
                    rejection_sample_method="synthetic", synthetic_acceptance_length=args.acceptance_length
                )
            options["speculative_config"] = speculative
        self._llm = LLM(**options | more)
        self.seen: Counter[int] = Counter()  # token ids that came out
        self._engine = self._llm.llm_engine
        self.facts = self._facts(most * (draft_len + 1))

    def _facts(self, most_tokens: int) -> dict[str, Any]:
        """What the run must have been made with. Raises RuntimeError where it was not."""
        config = self._engine.vllm_config
        mode = config.compilation_config.cudagraph_mode
        sizes = list(config.compilation_config.cudagraph_capture_sizes or ())
        facts = dict(
            async_scheduling=config.scheduler_config.async_scheduling,
            cudagraph_mode=getattr(mode, "name", str(mode)),
            graph_sizes=[len(sizes), max(sizes, default=0)],
            batched_tokens=config.scheduler_config.max_num_batched_tokens,
            model_runner_v2=bool(getattr(config, "use_v2_model_runner", False)),
        )
        if not facts["async_scheduling"] or not mode.has_full_cudagraphs() or max(sizes, default=0) < most_tokens:
            raise RuntimeError(f"vLLM does not run as it should: {facts}")
        return facts

    def add(self, name: str, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None:
        self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling(max_tokens, ignore_eos))

    def step(self) -> Iterable[tuple[str, int, bool]]:
        outputs = self._engine.step()
        for output in outputs:
            for part in output.outputs:
                self.seen.update(part.token_ids)
        return [(o.request_id, sum(len(part.token_ids) for part in o.outputs), o.finished) for o in outputs]

    def counters(self) -> dict[str, Any]:
        """Its own counts of drafts, to hold against what came out."""
        found = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith("vllm:spec_decode_num_"):
                found[metric.name.removeprefix("vllm:spec_decode_")] = getattr(
                    metric, "value", getattr(metric, "values", None)
                )
        return found

    def profile(self, on: bool) -> None:
        """Starts or ends vLLM's profiler."""
        (self._llm.start_profile if on else self._llm.stop_profile)()

    def abort(self, names: list[str]) -> None:
        self._engine.abort_request(names)

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        del self._llm, self._engine
        gc.collect()


def main() -> None:
    args = parse()
    os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})
    rows: list[dict[str, Any]] = []

    def say(row: dict[str, Any]) -> None:
        draft_len = row.get("draft_len")
        if draft_len is not None:
            row["block_width"] = draft_len + 1 if draft_len else 0
        rows.append(row)
        print("PEER", json.dumps(row), flush=True)
        args.out.write_text(json.dumps(rows) + "\n")

    import torch
    import vllm  # noqa: F401  # before the clock of the first start

    say(dict(part="versions", vllm=version("vllm"), torch=torch.__version__, python=platform.python_version()))
    if args.workload == "smol":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.target)
        banks = [smol_bank(args.prompts, tokenizer, wish) for wish in WISHES]
        load = Load(args=args, workload="smol", bank=banks[0], more_banks=banks)
    else:
        load = Load(args=args, workload="q8", bank=random_bank())
    failed = False
    for draft_len in args.draft_lens:
        began = time.perf_counter()
        try:
            engine = VllmEngine(args, draft_len)
            say(dict(part="start", draft_len=draft_len, seconds=round(time.perf_counter() - began, 1)) | engine.facts)
            load.run(engine, draft_len, say)
            say(dict(part="tokens", draft_len=draft_len, total=engine.seen.total(), different=len(engine.seen)))
            say(dict(part="counters", draft_len=draft_len, **engine.counters()))
            engine.close()
        except Exception as error:  # the next draft length may have more luck, and the rows so far are kept
            failed = True
            traceback.print_exc()
            say(dict(part="error", draft_len=draft_len, error=f"{type(error).__name__}: {error}"[:500]))
            break  # its processes may hold the GPU's memory: the caller starts the rest afresh
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
