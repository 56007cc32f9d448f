"""How many KV blocks fit a GPU: the largest steps are run and the largest programs recorded, then memory is counted.

Everything but the KV cache is in place for that: weights, libraries, workspaces. All K/V go to the null block.
"""

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from engine.attention.kv_cache_tensors import KvCache
from engine.config.capacity import DEFAULT_GPU_SHARE, check_measured_blocks
from engine.config.engine import EngineConfig
from engine.kv_cache.block_bytes import bytes_per_block
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.runner.decode_programs import row_buckets
from engine.runner.runner import ModelRunner
from engine.step import BlockTableUpdate, PrefillChunk, SlotInit, StepPlan

logger = logging.getLogger(__name__)

_PROBE_BLOCKS = 2
CACHED_BATCHES = 16  # blocks of so many full batches are kept, requests and prefix cache together


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes on one GPU. free: before the probe, weights loaded. largest: taken by the largest steps and programs.
    per_pair: taken by one more pair of programs."""

    total: int
    free: int
    largest: int
    per_pair: int
    num_pairs: int

    @property
    def for_blocks(self) -> int:
        """What is left for the KV cache."""
        reserve = math.ceil(self.total * (1.0 - DEFAULT_GPU_SHARE))
        return self.free - reserve - self.largest - self.per_pair * (self.num_pairs - 1)


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
    largest = (row_buckets(config.max_num_seqs)[-1], config.draft_len_choices[-1])
    pairs = [largest, *([(1, 0)] if largest != (1, 0) else [])]
    after_pair: list[int] = []
    runner = ModelRunner(
        config=probe,
        target=target,
        drafter=drafter,
        kv=KvCache.create(probe, tp),
        tp=tp,
        device=device,
        progress=_noting(after_pair, free_bytes),
        only_pairs=pairs,
    )
    after_pair.append(free_bytes())
    launch_largest_prefill(runner, probe)
    free_bytes()
    use = MemoryUse(
        total=total,
        free=before,
        largest=before - min(lowest),
        per_pair=max(after_pair[-2] - after_pair[-1], 0) if len(after_pair) > 2 else 0,
        num_pairs=len(row_buckets(config.max_num_seqs)) * len(config.draft_len_choices),
    )
    del runner
    gc.collect()
    torch.cuda.empty_cache()
    return use


def launch_largest_prefill(runner: ModelRunner, config: EngineConfig) -> None:
    """A step of max_num_batched_tokens prompt tokens in as many prompts as have slots, all of which sample."""
    num_slots = min(config.max_num_seqs, config.max_num_batched_tokens)
    length = min(config.max_num_batched_tokens // num_slots, config.max_model_len - 1)
    num_blocks = -(-(length + config.lookahead) // config.block_size)
    inits = tuple(
        SlotInit(
            slot=slot,
            generation=0,
            prompt_len=length,
            max_len=config.max_model_len,
            min_len=0,
            temperature=1.0,
            top_k=0,
            top_p=0.5,
            min_p=0.0,
            seed=slot,
            stop_token_ids=(),
        )
        for slot in range(num_slots)
    )
    runner.launch(
        StepPlan(
            step_id=1,  # not one at which ranks are compared: what they read here may be anything
            verify_len=0,
            draft_len=config.draft_len_choices[-1],
            new_slots=inits,
            block_updates=tuple(
                BlockTableUpdate(slot=slot, first_index=0, block_ids=(0,) * num_blocks) for slot in range(num_slots)
            ),
            prefill=tuple(
                PrefillChunk(slot=slot, start=0, token_ids=(0,) * length, samples=True) for slot in range(num_slots)
            ),
        )
    )
    runner.discard()


def _noting(values: list[int], free_bytes: Callable[[], int]) -> Callable[[str], None]:
    """A progress callback that notes the free memory ahead of every pair."""
    return lambda phase: values.append(free_bytes())
