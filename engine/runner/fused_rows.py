"""The integer work around T and D as three launches of Triton kernels instead of some 150 of torch's.

Only for decode rows in programs of fixed shapes; everything else takes the torch forms in `batch`, `draft_program` and
`engine.sampling.verify`, which these kernels are tested against.
"""

from __future__ import annotations  # annotations only, of classes that refer to this one

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.config.engine import EngineConfig
from engine.kernels.available import dependent_launch, unavailable_reason
from engine.kernels.row_state import Commit, Slots, TargetRows
from engine.runner.slots import SlotState

if TYPE_CHECKING:
    from engine.runner.batch import DecodeBlock, ForwardInputs, InputBuilder


class FusedRows:
    """One per runner. The slot state's tensors stay where they are (`fixed_shapes`)."""

    def __init__(self, config: EngineConfig, state: SlotState, builder: InputBuilder) -> None:
        self._builder, self._block_size = builder, config.block_size
        drafter = config.drafter
        self._block_width = 0 if drafter is None else drafter.block_size
        self._mask_id = 0 if drafter is None else drafter.mask_token_id
        self._positions = 0 if drafter is None else drafter.max_position_embeddings
        self._slots = Slots(
            committed_len=state.committed_len,
            last_token=state.last_token,
            draft_tokens=state.draft_tokens,
            draft_count=state.draft_count,
            finished=state.finished,
            max_len=state.max_len,
            min_len=state.min_len,
            stop_ids=state.stop_ids,
            block_table=state.block_table,
        )
        self._pdl = dependent_launch()

    @classmethod
    def create(
        cls, config: EngineConfig, state: SlotState, builder: InputBuilder, device: torch.device
    ) -> FusedRows | None:
        """None where the kernels cannot run, or where debug_checks look at what lies between."""
        if device.type != "cuda" or config.debug_checks or unavailable_reason() is not None:
            return None
        return cls(config, state, builder)

    def target_inputs(self, slots_R: Tensor, width: int, limit_1: Tensor) -> tuple[DecodeBlock, ForwardInputs]:
        """`decode_block` and `InputBuilder.target_inputs` of it, without prompt chunks."""
        from engine.kernels.target_rows import target_rows
        from engine.runner.batch import DecodeBlock, ForwardInputs

        rows = target_rows(self._slots, slots_R, limit_1, width=width, block_size=self._block_size, pdl=self._pdl)
        group = self._builder.group(
            first_row=0,
            slots_R=slots_R,
            q_lens=(width + 1,) * slots_R.shape[0],
            q_start_R=rows.committed_R,
            kv_len_R=rows.kv_len_R,
            causal=True,
        )
        decode = DecodeBlock(
            slots_R=slots_R,
            drafts_RK=rows.drafts_RK,
            k_R=rows.k_R,
            committed_R=rows.committed_R,
            finished_R=rows.finished_R,
            fused=rows,
        )
        context = AttentionContext(slot_mapping_N=rows.cache_N, groups=(group,))
        return decode, ForwardInputs(ids_N=rows.ids_N, positions_N=rows.positions_N, context=context)

    def commit(
        self,
        slots_R: Tensor,
        rows: TargetRows,
        drawn_N: Tensor,
        peak_N: Tensor,
        width: int,
        synthetic_R: Tensor | None,
    ) -> Commit:
        """`verify` and the writes of its verdict, the context's rows and the drafter's block."""
        from engine.kernels.commit_rows import commit

        return commit(
            self._slots,
            slots_R,
            rows,
            drawn_N,
            peak_N,
            width=width,
            block_size=self._block_size,
            synthetic_R=synthetic_R,
            block_width=self._block_width,
            mask_id=self._mask_id,
            positions=self._positions,
            pdl=self._pdl,
        )

    def draft_inputs(self, slots_R: Tensor, made: Commit) -> ForwardInputs:
        """`InputBuilder.draft_inputs` of rows that were committed here."""
        from engine.runner.batch import ForwardInputs

        group = self._builder.group(
            first_row=0,
            slots_R=slots_R,
            q_lens=(self._block_width,) * slots_R.shape[0],
            q_start_R=made.start_R,
            kv_len_R=made.kv_len_R,
            causal=False,
        )
        context = AttentionContext(slot_mapping_N=made.block_cache, groups=(group,))
        return ForwardInputs(ids_N=made.block_ids, positions_N=made.block_positions, context=context)

    def store_drafts(self, slots_R: Tensor, drafts_RK: Tensor, made: Commit) -> None:
        """The rows' new drafts and their number."""
        from engine.kernels.target_rows import store_drafts

        store_drafts(self._slots, slots_R, drafts_RK, made.live_R, pdl=self._pdl)
