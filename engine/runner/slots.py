"""Device-resident state of every request slot. The runner owns it; the scheduler only names slots.

Row `num_slots` is the filler slot: never assigned, always finished, block table all null.
"""

import enum
from collections.abc import Sequence

import torch

from engine.config.engine import EngineConfig
from engine.layers.upload import upload
from engine.sampling.filters import FilterFlags
from engine.sampling.sampler import SamplingRows, stops_are_masked
from engine.sampling_params import MAX_STOP_TOKEN_IDS
from engine.step import BlockTableUpdate, SlotInit, StepPlan

_MIN_STOP_COLUMNS = 8


class SlotTraits(enum.IntFlag):
    """What the host knows of a slot's request and decides by, so that no step reads the device back for it."""

    NONE = 0
    DRAWS = 1  # temperature above 0
    FILTERS = 2  # ... and top_k, top_p or min_p
    MASKS_STOPS = 4  # min_tokens
    LOGPROBS = 8
    RULES = 16  # the target's logits are changed before the draw

    @classmethod
    def of(cls, init: SlotInit) -> "SlotTraits":
        traits = cls.NONE
        if init.temperature > 0.0:
            traits |= cls.DRAWS
            if init.top_k > 0 or init.top_p < 1.0 or init.min_p > 0.0:
                traits |= cls.FILTERS
        if init.min_len > init.prompt_len:
            traits |= cls.MASKS_STOPS
        if init.num_logprobs >= 0:
            traits |= cls.LOGPROBS
        if init.rules is not None:
            traits |= cls.RULES
        return traits


# Somebody looks at what T made, or changes it, between T and D. Plain: members of a flag are joined by Python code.
LOOKS_BETWEEN = int(SlotTraits.LOGPROBS | SlotTraits.RULES)


class SlotState:
    """Tensors indexed by slot ([S] unless said), S = max_num_seqs + 1. Lengths in tokens, positions absolute.

    committed_len: tokens whose target K/V exist; last_token sits at that position (see `engine.step`).
    draft_tokens [S, Kmax], draft_count: drafts made by the last D.
    draft_logits [S, Kmax, V]: kept logits they were drawn from, float32, vocabulary padded as the target's is; None
        unless drafts are probabilistic.
    block_table [S, B]: KV block ids, 0 (the null block) where nothing is assigned.
    stop_ids [S, NS]: padded with -1.
    longest_table: blocks in the longest block table among the slots of the plan applied last; the host's bound of every
        K/V length of that step.
    fixed_shapes: no tensor is ever replaced by a larger one, as captured programs need.
    """

    def __init__(self, config: EngineConfig, device: torch.device, *, fixed_shapes: bool = False) -> None:
        size = config.max_num_seqs + 1
        self._device = device
        self._has_top_k, self._has_top_p = config.enable_top_k, config.enable_top_p
        self.filler_slot = config.max_num_seqs

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.committed_len = integers(size)
        self.last_token = integers(size)
        self.draft_tokens = integers(size, max(config.max_draft_len, 1))
        self.draft_count = integers(size)
        self.draft_logits = (
            torch.zeros(size, max(config.max_draft_len, 1), config.padded_vocab_size, device=device)
            if config.draft_sampling == "probabilistic"
            else None
        )
        self.finished = torch.ones(size, dtype=torch.bool, device=device)
        self.block_table = integers(size, config.max_blocks_per_seq)
        # One row per slot, so that a request's parameters are written at once; the columns have names below.
        self._integers = integers(size, 6)
        self._floats = torch.tensor([[0.0, 1.0, 0.0]], device=device).repeat(size, 1)
        columns = self._integers.unbind(dim=1)
        self.generation, self.prompt_len, self.max_len, self.min_len, self.seed, self.top_k = columns
        self.temperature, self.top_p, self.min_p = self._floats.unbind(dim=1)
        stop_columns = MAX_STOP_TOKEN_IDS + len(config.target.eos_token_ids) if fixed_shapes else _MIN_STOP_COLUMNS
        self._fixed_shapes = fixed_shapes
        self.stop_ids = torch.full((size, stop_columns), -1, dtype=torch.int64, device=device)
        self._inits: list[SlotInit | None] = [None] * size
        self._traits = [0] * size  # SlotTraits as plain integers: cheaper to join
        self._num_blocks = [0] * size
        self.longest_table = 0

    def apply(self, plan: StepPlan) -> None:
        """Upload a plan's new slots and block-table changes, in that order."""
        if plan.new_slots:
            self._assign(plan.new_slots)
        self.write_table(plan.block_updates)
        used = [*plan.decode_slots, *[chunk.slot for chunk in plan.prefill]]
        self.longest_table = max([self._num_blocks[slot] for slot in used], default=0)

    def note_table(self, updates: Sequence[BlockTableUpdate]) -> None:
        """Notes the tables' new lengths, of changes that somebody writes."""
        for update in updates:
            end = update.first_index + len(update.block_ids)
            assert end <= self.block_table.shape[1], "block table overflow: the scheduler reserved past max_model_len"
            self._num_blocks[update.slot] = end

    def write_table(self, updates: Sequence[BlockTableUpdate]) -> None:
        """Puts the changes into the block table, and notes them."""
        self.note_table(updates)
        width = self.block_table.shape[1]
        entries: list[int] = []
        block_ids: list[int] = []
        for update in updates:
            first = update.slot * width + update.first_index
            entries.extend(range(first, first + len(update.block_ids)))
            block_ids.extend(update.block_ids)
        if entries:
            self.block_table.view(-1)[upload(entries, self._device)] = upload(block_ids, self._device)

    def inits_of(self, slots: Sequence[int]) -> tuple[SlotInit, ...]:
        """The host's copies of what the slots' requests asked for."""
        inits = [init for slot in slots if (init := self._inits[slot]) is not None]
        assert len(inits) == len(slots), f"of the slots {slots} one holds no request"
        return tuple(inits)

    def init_of(self, slot: int) -> SlotInit:
        """The host's copy of what the slot's request asked for."""
        init = self._inits[slot]
        assert init is not None, f"slot {slot} holds no request"
        return init

    def traits_of(self, slots: Sequence[int]) -> int:
        """What any of the slots' requests asks for: SlotTraits bits, to be compared with plain integers in a loop."""
        bits = 0
        for slot in slots:
            bits |= self._traits[slot]
        return bits

    def sampling_rows(
        self, slots_N: torch.Tensor, position_N: torch.Tensor, flags: FilterFlags, *, mask_stops: bool = False
    ) -> SamplingRows:
        """Sampling parameters of rows that draw these slots' tokens at these positions. mask_stops: some request may
        not stop yet, so its stop ids are masked where that holds."""
        return SamplingRows(
            temperature_N=self.temperature[slots_N],
            top_k_N=self.top_k[slots_N],
            top_p_N=self.top_p[slots_N],
            min_p_N=self.min_p[slots_N],
            seed_N=self.seed[slots_N],
            position_N=position_N,
            stop_ids_NS=self.stop_ids[slots_N] if mask_stops else None,
            mask_stops_N=stops_are_masked(position_N, self.min_len[slots_N]) if mask_stops else None,
            all_greedy=flags.all_greedy,
            any_filter=flags.any_filter,
            sort_width=flags.sort_width,
            has_top_k=self._has_top_k,
            has_top_p=self._has_top_p,
        )

    def _assign(self, inits: tuple[SlotInit, ...]) -> None:
        self._widen_stop_ids(max(len(i.stop_token_ids) for i in inits))
        slots = upload([i.slot for i in inits], self._device)
        self._integers[slots] = upload(
            [[i.generation, i.prompt_len, i.max_len, i.min_len, i.seed, i.top_k] for i in inits], self._device
        )
        self._floats[slots] = upload(
            [[i.temperature, i.top_p, i.min_p] for i in inits], self._device, dtype=torch.float32
        )
        width = self.stop_ids.shape[1]
        rows = [list(i.stop_token_ids) + [-1] * (width - len(i.stop_token_ids)) for i in inits]
        self.stop_ids[slots] = upload(rows, self._device)
        # Not `tensor[slots] = 0`: that copies the number from the host and waits for it.
        self.committed_len.index_fill_(0, slots, 0)
        self.draft_count.index_fill_(0, slots, 0)
        self.finished.index_fill_(0, slots, False)
        self.block_table.index_fill_(0, slots, 0)
        for init in inits:
            self._inits[init.slot] = init
            self._traits[init.slot] = int(SlotTraits.of(init))
            self._num_blocks[init.slot] = 0

    def _widen_stop_ids(self, needed: int) -> None:
        have = self.stop_ids.shape[1]
        if needed <= have:
            return
        assert not self._fixed_shapes, f"{needed} stop ids, more than a request may have"
        wider = torch.full((self.stop_ids.shape[0], 2 * needed), -1, dtype=torch.int64, device=self._device)
        wider[:, :have] = self.stop_ids
        self.stop_ids = wider
