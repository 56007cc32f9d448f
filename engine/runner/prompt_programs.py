"""Prompt chunks as fixed-shape programs, one prompt at a time, for steps with few of them.

They serve prompts that are alone in a step, and those whose chunks are not made rows of the decode programs
(`engine.runner.pieces`), behind the decode rows if there are any.

The launches of a forward take the host several times what they take the device, so a chunk of n tokens runs as a
recorded program of the next size N >= n; the rows beyond n write to the null block and nobody reads them. Its numbers:

    [0] n   [1] position of the first token   [2] slot   [3] n - 1   [4 .. N+3] token ids

All chunks of a step travel in one upload; ahead of each chunk's programs its numbers are copied to where they read.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence

import torch

from engine.attention.context import AttentionContext
from engine.config.engine import EngineConfig
from engine.runner.batch import DecodeBlock, ForwardInputs, InputBuilder, cache_slots
from engine.runner.decode_programs import Variant
from engine.runner.draft_program import DecideAndDraft
from engine.runner.recorder import Program, Recorder
from engine.runner.results import NUM_COUNTS, pack
from engine.runner.slots import LOOKS_BETWEEN, SlotState
from engine.runner.target_program import TargetProgram, TargetStep
from engine.runner.upload_ring import UploadRing
from engine.step import PrefillChunk

logger = logging.getLogger(__name__)

_HEADER = 4
# More chunks in one step, or more tokens than below in several, share a ragged forward. On an H200 eight chunks took
# 10 ms one by one against 25 ms together for 135M parameters, whose launches count, and 16 chunks 18 against 33; eight
# took 61 against 48 ms for 8B.
_MAX_CHUNKS, _MAX_CHUNKS_OF_LARGE = 16, 2
_LARGE_PARAMETERS = 1 << 30
_MAX_SHARED_TOKENS = 2048
_SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)


def longest_chunk(config: EngineConfig) -> int:
    """Tokens of a prompt that one step may take."""
    return min(config.max_num_batched_tokens, config.max_model_len - 1)


def chunk_sizes(longest: int) -> tuple[int, ...]:
    """Sizes for chunks of up to `longest` tokens, ascending; the last is the least that holds the longest."""
    return (*[size for size in _SIZES if size < longest], longest)


class _ChunkPrograms:
    """T, and what follows it, for chunks of up to `size` tokens."""

    def __init__(self, owner: "PromptPrograms", size: int) -> None:
        self._owner, self._size = owner, size
        self._step: TargetStep | None = None

    def record(self, recorder: Recorder) -> None:
        self.run_target = recorder.record(self._target)
        has_drafter = self._owner.draft_program.has_drafter
        self.run_context = recorder.record(self._context) if has_drafter else lambda: None
        self.run_decide = {variant: recorder.record(self._decide_program(variant)) for variant in Variant}
        if recorder.records:
            self._step = None  # the programs know where it lies; others may use the memory

    def _target(self) -> None:
        owner = self._owner
        num_1, start_1, slot_1, last_1 = owner.numbers[:_HEADER].split(1)
        columns_N = torch.arange(self._size, device=owner.numbers.device)
        positions_N = start_1 + torch.minimum(columns_N, last_1)
        cache_N = cache_slots(owner.state, slot_1, positions_N[None], owner.block_size)[0]
        group = owner.builder.group(
            first_row=0,
            slots_R=slot_1,
            q_lens=(self._size,),
            q_start_R=start_1,
            kv_len_R=start_1 + num_1,
            causal=True,
            has_filler=True,
        )
        inputs = ForwardInputs(
            ids_N=owner.numbers[_HEADER : _HEADER + self._size],
            positions_N=positions_N,
            context=AttentionContext(slot_mapping_N=cache_N.masked_fill(columns_N >= num_1, 0), groups=(group,)),
        )
        self._step = owner.target_program.run_chunk(inputs, last_1)

    def _context(self) -> None:
        assert self._step is not None
        self._owner.draft_program.write_context(self._step, None, 0, 0)

    def _decide_program(self, variant: Variant) -> Program:
        def run() -> None:
            owner = self._owner
            assert self._step is not None
            slot_1 = owner.slot_1
            decision = owner.draft_program.decide(
                self._step,
                DecodeBlock(
                    slots_R=slot_1,
                    drafts_RK=slot_1.new_empty(1, 0),
                    k_R=torch.zeros_like(slot_1),
                    committed_R=owner.numbers[1:2] + owner.numbers[3:4],
                    finished_R=owner.state.finished.index_select(0, slot_1),  # False but for the filler slot
                ),
                (),
                0,
                variant.value,
            )
            assert decision is not None
            owner.results.copy_(pack(decision))

        return run


class PromptPrograms:
    """All sizes of one engine. results: int32 [1, NUM_COUNTS + 1], the packed row of the chunk that ran last.

    num_parameters: of the target on this rank. only_ends: record the largest and the smallest size alone, to see what
    they take.
    """

    def __init__(
        self,
        *,
        config: EngineConfig,
        state: SlotState,
        builder: InputBuilder,
        target_program: TargetProgram,
        draft_program: DecideAndDraft,
        recorder: Recorder,
        device: torch.device,
        num_parameters: int,
        only_ends: bool = False,
    ) -> None:
        self.state, self.builder = state, builder
        self.target_program, self.draft_program = target_program, draft_program
        self.block_size = config.block_size
        longest = longest_chunk(config)
        sizes = chunk_sizes(longest)
        self._sizes = tuple(sorted({sizes[0], sizes[-1]})) if only_ends else sizes
        self.numbers = torch.zeros(_HEADER + longest, dtype=torch.int64, device=device)
        self.slot_1 = self.numbers[2:3]
        self.results = torch.zeros(1, NUM_COUNTS + 1, dtype=torch.int32, device=device)
        self._upload = UploadRing(_MAX_CHUNKS * _HEADER + max(longest, _MAX_SHARED_TOKENS), device)
        self._max_chunks = _MAX_CHUNKS_OF_LARGE if num_parameters >= _LARGE_PARAMETERS else _MAX_CHUNKS
        self._recorder = recorder
        self._programs = {size: _ChunkPrograms(self, size) for size in self._sizes}
        self._draft_lens = config.draft_len_choices
        # Greedy drafts are the same in every variant.
        self._draft_variants = (Variant.GREEDY,) if config.draft_sampling == "greedy" else tuple(Variant)
        self._drafts: dict[tuple[int, Variant], Program] = {}

    def record(self, progress: Callable[[str], None]) -> None:
        """Records every size, the largest first."""
        started = time.perf_counter()
        self.numbers.copy_(torch.zeros_like(self.numbers))
        self.numbers[:_HEADER].copy_(torch.tensor([1, 0, self.state.filler_slot, 0]))
        for number, size in enumerate(reversed(self._sizes)):
            progress(f"recording prompt programs: {number + 1} of {len(self._sizes)} ({size} tokens)")
            self._programs[size].record(self._recorder)
        progress("recording draft programs")
        for draft_len, variant in itertools.product(self._draft_lens, self._draft_variants):
            program = self._drafts_program(draft_len, variant)
            self._drafts[draft_len, variant] = self._recorder.record(program)
        logger.info("Prompt programs: %d sizes in %.1f s", len(self._sizes), time.perf_counter() - started)

    def _drafts_program(self, draft_len: int, variant: Variant) -> Program:
        return lambda: self.draft_program.draft(self.slot_1, draft_len, variant.value.filters)

    def take(self, prefill: Sequence[PrefillChunk]) -> bool:
        """Whether these chunks run here: few, and none whose logits or hidden states someone wants to see."""
        if len(prefill) > self._max_chunks or any([chunk.scored_next for chunk in prefill]):
            return False
        if self.state.traits_of([chunk.slot for chunk in prefill]) & LOOKS_BETWEEN:
            return False
        return len(prefill) == 1 or sum([len(chunk.token_ids) for chunk in prefill]) <= _MAX_SHARED_TOKENS

    def run(
        self, prefill: Sequence[PrefillChunk], draft_len: int, on_result: Callable[[PrefillChunk, torch.Tensor], None]
    ) -> None:
        """Runs the chunks in order. on_result: gets each sampling chunk and its packed row, to be copied at once."""
        array, places, end = self._upload.next(), [], 0
        for chunk in prefill:
            num = len(chunk.token_ids)
            array[end : end + _HEADER] = (num, chunk.start, chunk.slot, num - 1)
            array[end + _HEADER : end + _HEADER + num] = chunk.token_ids
            places.append(end)
            end += _HEADER + num
        self._upload.send(end)
        for chunk, start in zip(prefill, places, strict=True):
            num = len(chunk.token_ids)
            # Rows beyond the chunk keep the ids of an earlier one: any valid id does.
            self.numbers[: _HEADER + num].copy_(self._upload.device[start : start + _HEADER + num])
            programs = self._programs[next(size for size in self._sizes if size >= num)]
            programs.run_target()
            if not chunk.samples:
                programs.run_context()
                continue
            variant = Variant.of(self.state.traits_of((chunk.slot,)))
            programs.run_decide[variant]()
            on_result(chunk, self.results)
            programs.run_context()
            self._drafts[draft_len, variant if variant in self._draft_variants else Variant.GREEDY]()
