"""Device-resident state of every request slot. The runner owns it; the scheduler only names slots.

Row `num_slots` is the filler slot: never assigned, always finished, block table all null.
"""

import torch

from engine.config.engine import EngineConfig
from engine.layers.upload import upload
from engine.step import SlotInit, StepPlan

_MIN_STOP_COLUMNS = 8


class SlotState:
    """Tensors indexed by slot ([S] unless said), S = max_num_seqs + 1. Lengths in tokens, positions absolute.

    committed_len: tokens whose target K/V exist; last_token sits at that position (see `engine.step`).
    draft_tokens [S, Kmax], draft_count: drafts made by the last D.
    block_table [S, B]: KV block ids, 0 (the null block) where nothing is assigned.
    stop_ids [S, NS]: padded with -1.
    longest_table: blocks in the longest block table among the slots of the plan applied last; the host's bound of every
        K/V length of that step.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        size = config.max_num_seqs + 1
        self._device = device

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.committed_len = integers(size)
        self.last_token = integers(size)
        self.draft_tokens = integers(size, max(config.max_draft_len, 1))
        self.draft_count = integers(size)
        self.finished = torch.ones(size, dtype=torch.bool, device=device)
        self.generation = integers(size)
        self.block_table = integers(size, config.max_blocks_per_seq)
        self.prompt_len = integers(size)
        self.max_len = integers(size)
        self.min_len = integers(size)
        self.seed = integers(size)
        self.top_k = integers(size)
        self.temperature = torch.zeros(size, dtype=torch.float32, device=device)
        self.top_p = torch.ones(size, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(size, dtype=torch.float32, device=device)
        self.stop_ids = torch.full((size, _MIN_STOP_COLUMNS), -1, dtype=torch.int64, device=device)
        # Host copy of what decides which code runs, so that no step reads the device back for it.
        self._inits: list[SlotInit | None] = [None] * size
        self._num_blocks = [0] * size
        self.longest_table = 0

    def apply(self, plan: StepPlan) -> None:
        """Upload a plan's new slots and block-table changes, in that order."""
        if plan.new_slots:
            self._assign(plan.new_slots)
        for update in plan.block_updates:
            end = update.first_index + len(update.block_ids)
            assert end <= self.block_table.shape[1], "block table overflow: the scheduler reserved past max_model_len"
            self.block_table[update.slot, update.first_index : end] = upload(update.block_ids, self._device)
            self._num_blocks[update.slot] = end
        used = [*plan.decode_slots, *[chunk.slot for chunk in plan.prefill]]
        self.longest_table = max([self._num_blocks[slot] for slot in used], default=0)

    def init_of(self, slot: int) -> SlotInit:
        """The host's copy of what the slot's request asked for."""
        init = self._inits[slot]
        assert init is not None, f"slot {slot} holds no request"
        return init

    def _assign(self, inits: tuple[SlotInit, ...]) -> None:
        self._widen_stop_ids(max(len(i.stop_token_ids) for i in inits))
        slots = upload([i.slot for i in inits], self._device)

        def put(target: torch.Tensor, values: list[int] | list[float]) -> None:
            target[slots] = upload(values, self._device, dtype=target.dtype)

        put(self.generation, [i.generation for i in inits])
        put(self.prompt_len, [i.prompt_len for i in inits])
        put(self.max_len, [i.max_len for i in inits])
        put(self.min_len, [i.min_len for i in inits])
        put(self.seed, [i.seed for i in inits])
        put(self.top_k, [i.top_k for i in inits])
        put(self.temperature, [i.temperature for i in inits])
        put(self.top_p, [i.top_p for i in inits])
        put(self.min_p, [i.min_p for i in inits])
        width = self.stop_ids.shape[1]
        rows = [list(i.stop_token_ids) + [-1] * (width - len(i.stop_token_ids)) for i in inits]
        self.stop_ids[slots] = upload(rows, self._device)
        self.committed_len[slots] = 0
        self.draft_count[slots] = 0
        self.finished[slots] = False
        self.block_table[slots] = 0
        for init in inits:
            self._inits[init.slot] = init
            self._num_blocks[init.slot] = 0

    def _widen_stop_ids(self, needed: int) -> None:
        have = self.stop_ids.shape[1]
        if needed <= have:
            return
        wider = torch.full((self.stop_ids.shape[0], 2 * needed), -1, dtype=torch.int64, device=self._device)
        wider[:, :have] = self.stop_ids
        self.stop_ids = wider
