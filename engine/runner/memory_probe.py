"""How many KV blocks fit a GPU: the largest steps are run and the largest programs recorded, then memory is counted.

Everything but the KV cache is in place for that: weights, libraries, workspaces. All K/V go to the null block. Steps
include what runs outside the recorded programs: a ragged forward of prompts whose tokens are scored, and the largest
verify whose rows ask for log-probabilities and for changed logits.
"""

import gc
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from engine.attention.kv_cache_tensors import KvCache
from engine.config.capacity import (
    DEFAULT_GPU_SHARE,
    check_given_blocks,
    check_measured_blocks,
    not_enough_beside_the_cache,
)
from engine.config.engine import EngineConfig
from engine.kv_cache.block_bytes import bytes_per_block
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.runner.decode_programs import program_shapes
from engine.runner.prompt_programs import chunk_sizes, longest_chunk
from engine.runner.runner import ModelRunner
from engine.sampling_params import MAX_LOGPROBS
from engine.step import BlockTableUpdate, LogitsRules, PrefillChunk, SlotInit, StepPlan

logger = logging.getLogger(__name__)

_PROBE_BLOCKS = 2
CACHED_BATCHES = 16  # blocks of so many full batches are kept, requests and prefix cache together


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes on one GPU. free: before the probe, weights loaded. largest: taken by the largest steps and programs.
    per_pair, per_size: taken by one more pair of decode programs, by the prompt programs of one more size."""

    total: int
    free: int
    largest: int
    per_pair: int
    num_pairs: int
    per_size: int
    num_sizes: int

    @property
    def for_blocks(self) -> int:
        """What is left for the KV cache."""
        reserve = math.ceil(self.total * (1.0 - DEFAULT_GPU_SHARE))
        more = self.per_pair * (self.num_pairs - 1) + self.per_size * (self.num_sizes - 1)
        return self.free - reserve - self.largest - more


def measured_config(
    config: EngineConfig,
    *,
    target: TargetModel,
    drafter: DFlashDrafter | None,
    tp: TpGroup,
    device: torch.device,
) -> EngineConfig:
    """The config with num_blocks from this group's GPUs, the least that one of them affords.

    Raises:
        ValueError: one request of max_model_len does not fit; the message shows the arithmetic.
    """
    use = measure(config, target=target, drafter=drafter, tp=tp, device=device)
    blocks_1 = torch.tensor([use.for_blocks // bytes_per_block(config)], device=device)
    affordable = int(tp.all_gather(blocks_1, dim=0).min())
    usable = config.max_num_seqs * config.max_blocks_per_seq + 1
    # Requests can own no more than these; a prefix cache has a use for more, up to where the host's books get long.
    blocks = min(affordable, CACHED_BATCHES * usable if config.enable_prefix_caching else usable)
    check_measured_blocks(config, blocks, use.total, use.total - use.free, use.free - use.for_blocks)
    return replace(config, num_blocks=blocks)


def measure(
    config: EngineConfig, *, target: TargetModel, drafter: DFlashDrafter | None, tp: TpGroup, device: torch.device
) -> MemoryUse:
    """Runs the probe; frees what it took."""

    lowest: list[int] = []

    def free_bytes() -> int:
        """What stays free once the eager runs' memory is given back; `lowest` keeps what was free before."""
        torch.cuda.synchronize(device)
        lowest.append(torch.cuda.mem_get_info(device)[0])
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]

    torch.cuda.empty_cache()
    total, before = torch.cuda.mem_get_info(device)[1], free_bytes()
    # All tables of the probe point at the null block, which the checks forbid.
    probe = replace(config, num_blocks=_PROBE_BLOCKS, debug_checks=False)
    shapes = {(shape.num_rows, shape.width): shape for shape in program_shapes(config)}
    widest = config.draft_len_choices[-1]
    # The largest step with prompts among its rows, the largest of decode rows alone, and the smallest pair: of those
    # that have programs of both kinds, where there are any.
    both_kinds = [key for key, shape in shapes.items() if shape.takes_pieces]
    pairs = {max([key for key in shapes if key[1] == widest]), (config.max_num_seqs, widest), min(both_kinds or shapes)}
    marks: dict[str, list[int]] = {}
    runner = ModelRunner(
        config=probe,
        target=target,
        drafter=drafter,
        kv=KvCache.create(probe, tp),
        tp=tp,
        device=device,
        progress=lambda phase: marks.setdefault(phase.split(":")[0], []).append(free_bytes()),
        only_pairs=sorted(pairs),
    )
    after = free_bytes()
    launch_largest_steps(runner, probe)
    free_bytes()
    use = MemoryUse(
        total=total,
        free=before,
        largest=before - min(lowest),
        per_pair=_of_the_last(marks.get("recording decode programs", []), after),
        num_pairs=len(shapes),
        per_size=_of_the_last(
            marks.get("recording prompt programs", []), marks.get("recording draft programs", [0])[0]
        ),
        num_sizes=len(chunk_sizes(longest_chunk(config))),
    )
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return use


def launch_largest_steps(runner: ModelRunner, config: EngineConfig) -> None:
    """What takes most memory outside the recorded programs; two steps that nobody reads.

    max_num_batched_tokens prompt tokens in as many prompts as have slots, all scored; then the widest verify of all
    slots. Every row draws with a filter, changes its logits and asks for all the log-probabilities it may.
    """
    slots = range(config.max_num_seqs)
    num_prompts = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // num_prompts, config.max_model_len - 1)
    width = config.draft_len_choices[-1]
    # The second step may accept all its drafts and draft behind them.
    num_blocks = min(-(-(length + width + 1 + config.lookahead) // config.block_size), config.max_blocks_per_seq)
    rules = LogitsRules(logit_bias=((0, 1.0),), presence_penalty=0.5 if config.enable_penalty else 0.0)
    inits = tuple(
        SlotInit(
            slot=slot,
            generation=0,
            prompt_len=length,
            max_len=config.max_model_len,
            min_len=0,
            temperature=1.0,
            top_k=0,
            top_p=0.5 if config.enable_top_p else 1.0,
            min_p=0.0,
            seed=slot,
            stop_token_ids=(),
            num_logprobs=MAX_LOGPROBS,
            num_prompt_logprobs=MAX_LOGPROBS,
            rules=rules,
        )
        for slot in slots
    )
    chunks = tuple(
        PrefillChunk(slot=slot, start=0, token_ids=(0,) * length, samples=True, scored_next=(0,) * (length - 1))
        for slot in range(num_prompts)
    )
    # Steps at which ranks are compared have other numbers: what they read here may be anything.
    runner.launch(
        StepPlan(
            step_id=1,
            verify_len=0,
            draft_len=width,
            new_slots=inits,
            block_updates=tuple(
                BlockTableUpdate(slot=slot, first_index=0, block_ids=(0,) * num_blocks) for slot in slots
            ),
            prefill=chunks,
        )
    )
    runner.discard()
    runner.launch(StepPlan(step_id=2, verify_len=width, draft_len=width, decode_slots=tuple(slots)))
    runner.discard()


def run_largest_steps(runner: ModelRunner, config: EngineConfig, device: torch.device) -> None:
    """`launch_largest_steps` on an engine whose cache the user sized: what does not fit shows now, not in service."""
    if config.debug_checks:
        return  # they forbid rows without blocks of their own
    launch_largest_steps(runner, config)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


@contextmanager
def given_blocks_fit(config: EngineConfig, device: torch.device) -> Iterator[None]:
    """Around the allocation of a cache that the user sized, and whatever takes memory behind it.

    Raises:
        ValueError: it does not fit beside what is there already or what came behind it; the message shows the
            arithmetic.
    """
    torch.cuda.empty_cache()  # what loading took and gave back
    free, total = torch.cuda.mem_get_info(device)
    check_given_blocks(config, total_bytes=total, free_bytes=free)
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        left = free - config.num_blocks * bytes_per_block(config)
        raise ValueError(not_enough_beside_the_cache(config, total, free, left)) from error


def _of_the_last(free_before: list[int], free_after: int) -> int:
    """Bytes that the last of several programs took. 0: there was only one, which counts as a largest step."""
    return max(free_before[-1] - free_after, 0) if len(free_before) > 1 else 0
