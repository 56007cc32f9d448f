"""What the GPU benchmarks share: model shapes without weights, an engine driven directly, its measurements."""

import faulthandler
import gc
import importlib.metadata
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.config.drafter import parse_drafter_config
from engine.config.engine import EngineConfig
from engine.config.model import parse_target_config
from engine.core import EngineCore
from engine.heap import freeze_heap
from engine.layers.linear import Linear
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.rank import EngineRank
from engine.request import EngineRequest
from engine.runner.clock import StepClock
from engine.sampling_params import SamplingParams


def dummy_config(target_dir: Path, drafter_dir: Path | None, **settings: Any) -> EngineConfig:
    """An engine of random weights: the one use of `load_format="dummy"`. settings: fields of EngineConfig."""
    target = parse_target_config(str(target_dir))
    drafter = None if drafter_dir is None else parse_drafter_config(str(drafter_dir), target=target)
    max_draft_len = 0 if drafter is None else settings.pop("max_draft_len")
    settings.pop("max_draft_len", None)
    max_num_seqs = settings["max_num_seqs"]
    config = EngineConfig(
        **{
            "model_dir": str(target_dir),
            "target": target,
            "drafter_dir": None if drafter_dir is None else str(drafter_dir),
            "drafter": drafter,
            "identity": "dummy",
            "load_format": "dummy",
            "drafter_load_format": "dummy",
            "dtype": "bfloat16",
            "device": "cuda",
            "num_threads": 4,
            "tensor_parallel_size": 1,
            "drafter_tensor_parallel": True,
            "hidden_state_gather": "fused",
            "max_num_batched_tokens": 8192,
            "block_size": 16,
            "num_blocks": 0,
            "enable_prefix_caching": False,
            "pipeline_depth": 1,
            "max_draft_len": max_draft_len,
            "draft_len_choices": tuple(sorted({0, max_draft_len})),
            "draft_len_schedule": ((max_num_seqs, max_draft_len),) if max_draft_len else (),
            "gate_window": 0,
            "gate_threshold": 0.0,
            "decode_programs": "graphs",
            **settings,
        }
    )
    return replace(config, num_blocks=settings.get("num_blocks") or max_num_seqs * config.max_blocks_per_seq + 1)


@dataclass
class Run:
    """One batch of requests from submission to the last token. Times in seconds; decode: after every first token."""

    seconds: float
    num_tokens: int
    first_token_s: list[float] = field(default_factory=list)
    user_tokens_per_s: list[float] = field(default_factory=list)
    num_steps: int = 0
    device_s: float = 0.0
    host_s: float = 0.0
    wait_s: float = 0.0
    decode_step_ms: float | None = None
    acceptance_length: float | None = None

    def record(self) -> dict[str, Any]:
        """Figures for a JSON file; per-step means in milliseconds."""
        steps = max(self.num_steps, 1)
        return {
            "tokens_per_s": round(self.num_tokens / self.seconds, 1),
            "tokens": self.num_tokens,
            "seconds": round(self.seconds, 4),
            "tokens_per_s_per_user": round(statistics.mean(self.user_tokens_per_s), 1)
            if self.user_tokens_per_s
            else None,
            "first_token_ms": round(1e3 * statistics.median(self.first_token_s), 2),
            "last_first_token_ms": round(1e3 * max(self.first_token_s), 2),
            "steps": self.num_steps,
            "decode_step_ms": None if self.decode_step_ms is None else round(self.decode_step_ms, 4),
            "host_ms_per_step": round(1e3 * self.host_s / steps, 4),
            "wait_ms_per_step": round(1e3 * self.wait_s / steps, 4),
            "device_busy": round(self.device_s / self.seconds, 4),
            "acceptance_length": None if self.acceptance_length is None else round(self.acceptance_length, 3),
        }


class Lab:
    """An engine without tokenizer and server: EngineCore driven step by step, every wait and device second counted."""

    def __init__(self, config: EngineConfig) -> None:
        started = time.perf_counter()
        self.rank = EngineRank(config, rank=0, init_method=None)
        self.config = self.rank.config
        self.core = EngineCore(config=self.config, runner=self.rank.runner)
        freeze_heap()  # as a rank's process does
        self.start_s = time.perf_counter() - started
        self._version = 0
        self._requests = 0

    def set_draft_len(self, draft_len: int) -> None:
        """K for every batch size from now on."""
        self._version += 1
        self.core.apply_schedule((1, self._version), {self.config.max_num_seqs: draft_len})

    def drain(self) -> None:
        """Until the device is at rest: a step may be under way behind the last request's end, and is this core's."""
        while self.core.has_work():
            self.core.step()

    def run(self, prompts: list[list[int]], num_tokens: int, *, temperature: float = 0.0, **params: Any) -> Run:
        """All prompts at once, num_tokens each (end-of-sequence ignored unless told otherwise)."""
        settings = dict(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, detokenize=False) | params
        core, runner = self.core, self.rank.runner
        before = core.counters()
        first: dict[str, float] = {}
        ends: dict[str, tuple[float, int]] = {}
        counts: dict[str, int] = {}
        result = Run(seconds=0.0, num_tokens=0)
        with counted_waits(result), counted_device_time(runner, result):
            started = time.perf_counter()
            for prompt in prompts:
                self._requests += 1
                name = f"r{self._requests}"
                counts[name] = 0
                core.add_request(
                    EngineRequest(
                        request_id=name,
                        prompt_token_ids=tuple(prompt),
                        params=SamplingParams(seed=self._requests, **settings),
                    )
                )
            while core.has_work():
                deltas = core.step()
                now = time.perf_counter() - started
                for delta in deltas:
                    name = delta.request_id
                    counts[name] += len(delta.token_ids)
                    first.setdefault(name, now)
                    if delta.finish_reason is not None:
                        ends[name] = (now, counts[name])
            result.seconds = time.perf_counter() - started
        after = core.counters()
        result.num_tokens = sum(counts.values())
        result.first_token_s = list(first.values())
        result.user_tokens_per_s = [(n - 1) / (end - first[name]) for name, (end, n) in ends.items() if n > 1]
        result.num_steps = after.num_steps - before.num_steps
        result.host_s = result.seconds - result.wait_s
        drafts = after.num_drafts - before.num_drafts
        if drafts:
            result.acceptance_length = 1 + (after.num_accepted_tokens - before.num_accepted_tokens) / drafts
        steps = sum(c.decode_steps for c in after.cells) - sum(c.decode_steps for c in before.cells)
        if steps:
            spent = sum(c.decode_time_s for c in after.cells) - sum(c.decode_time_s for c in before.cells)
            result.decode_step_ms = 1e3 * spent / steps
        return result

    def close(self) -> None:
        """Frees the GPU for the next engine."""
        self.rank.close()
        del self.core, self.rank
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def counted_waits(result: Run) -> Iterator[None]:
    """Adds the time that `collect` waits for the device to result.wait_s."""
    original = StepClock.wait

    def wait(clock: StepClock) -> None:
        started = time.perf_counter()
        original(clock)
        result.wait_s += time.perf_counter() - started

    StepClock.wait = wait
    try:
        yield
    finally:
        StepClock.wait = original


@contextmanager
def counted_device_time(runner: Any, result: Run) -> Iterator[None]:
    """Adds every collected step's device seconds to result.device_s."""
    original = runner.collect

    def collect() -> Any:
        step = original()
        result.device_s += step.duration_s
        return step

    runner.collect = collect
    try:
        yield
    finally:
        runner.collect = original


def weight_bytes(*modules: nn.Module | None) -> int:
    """Bytes of all weights that a step reads: everything but the embedding (a tied head is that very tensor)."""
    seen, total = set(), 0
    for module in modules:
        for name, parameter in module.named_parameters() if module is not None else ():
            tied = getattr(getattr(module, "config", None), "tie_word_embeddings", False)
            if (name == "embedding" and not tied) or parameter.data_ptr() in seen or name.startswith("context_"):
                continue
            seen.add(parameter.data_ptr())
            total += parameter.numel() * parameter.element_size()
    return total


def drafting_bytes(target: TargetModel, drafter: DFlashDrafter) -> int:
    """Bytes of the weights that a step of few rows reads to draft, the head among them; of those in 8 bits, these."""
    head = target.head.weight
    total = weight_bytes(drafter) + head.numel() * head.element_size()
    linears = {name: module for name, module in drafter.named_modules() if isinstance(module, Linear)}
    for name, module in (*linears.items(), ("head", target.draft_head)):
        if module is not None and module.int8_weight is not None and name != "context_kv":
            rounded, scale = module.int8_weight.rounded, module.int8_weight.scale
            total += rounded.numel() * (1 - module.weight.element_size()) + scale.numel() * scale.element_size()
    return total


def read_bandwidth(num_bytes: int = 8 << 30) -> float:
    """Bytes per second of the best of two reads of fresh memory: a matrix-vector product and a sum."""
    matrix = torch.randn(num_bytes >> 17, 1 << 16, device="cuda").to(torch.bfloat16)
    vector = torch.randn(1 << 16, device="cuda").to(torch.bfloat16)
    best = 0.0
    for read in (lambda: torch.mv(matrix, vector), lambda: matrix.view(torch.int64).amax(dim=1)):
        read()
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            read()
            end.record()
            end.synchronize()
            best = max(best, matrix.numel() * 2 / (start.elapsed_time(end) / 1e3))
    return best


def versions() -> dict[str, Any]:
    """Of what was measured with."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "triton", "flash-attn-4", "vllm"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
        found["cuda"] = torch.version.cuda
    return found


def show_progress() -> None:
    """Log lines with times, and every thread's stack whenever two more minutes have passed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stdout)
    faulthandler.dump_traceback_later(120, repeat=True)


def save(path: Path, record: dict[str, Any]) -> None:
    """Written again after every row, so that a broken run leaves what it has."""
    path.write_text(json.dumps(record, indent=1) + "\n")
