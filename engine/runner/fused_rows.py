"""The integer work around T and D as three calls of compiled kernels instead of some 150 of torch's.

On CUDA for programs of fixed shapes, pieces of prompts included, on the CPU for steps of decode rows alone; everything
else takes the torch forms in `batch`, `piece_rows`, `draft_program` and `engine.sampling.verify`, which these kernels
are tested against.
"""

from __future__ import annotations  # annotations only, of classes that refer to this one

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.attention.context import AttentionContext
from engine.config.engine import EngineConfig
from engine.kernels.available import dependent_launch, unavailable_reason
from engine.kernels.row_state import Commit, HostResults, HostUpload, Slots, TargetRows
from engine.layers.cpu_jit import unavailable_reason as cpu_unavailable_reason
from engine.runner.cpu_bookkeeping import CpuBookkeeping
from engine.runner.slots import SlotState
from engine.sampling.synthetic import synthetic_accepted

if TYPE_CHECKING:
    from engine.runner.batch import DecodeBlock, ForwardInputs, InputBuilder


class FusedRows:
    """One per runner. cpu: the kernels on the CPU; None: Triton's."""

    def __init__(
        self, config: EngineConfig, state: SlotState, builder: InputBuilder, *, cpu: CpuBookkeeping | None = None
    ) -> None:
        self._builder, self._block_size = builder, config.block_size
        self._state, self._cpu = state, cpu
        drafter = config.drafter
        self._block_width = config.block_width
        self._mask_id = 0 if drafter is None else drafter.mask_token_id
        self._positions = 0 if drafter is None else drafter.max_position_embeddings
        self._pdl = cpu is None and dependent_launch()
        self._commit: Callable[..., Commit] = self._commit_of(cpu)

    @classmethod
    def create(
        cls, config: EngineConfig, state: SlotState, builder: InputBuilder, device: torch.device
    ) -> FusedRows | None:
        """None where the kernels cannot run, or where debug_checks look at what lies between."""
        if config.debug_checks:
            return None
        if device.type == "cpu":
            return cls(config, state, builder, cpu=CpuBookkeeping()) if cpu_unavailable_reason() is None else None
        return cls(config, state, builder) if unavailable_reason() is None else None

    def _commit_of(self, cpu: CpuBookkeeping | None) -> Callable[..., Commit]:
        if cpu is not None:
            return cpu.commit
        from engine.kernels.commit_rows import commit

        return functools.partial(commit, pdl=self._pdl)

    @property
    def _slots(self) -> Slots:
        """The state's tensors as they are now: without `fixed_shapes` one may be replaced by a larger one."""
        state = self._state
        return Slots(
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

    @property
    def reads_host(self) -> bool:
        """Whether T's rows are made of an upload in host memory, by `host_inputs`."""
        return self._cpu is None

    def target_inputs(self, slots_R: Tensor, width: int) -> tuple[DecodeBlock, ForwardInputs]:
        """`decode_block` and `InputBuilder.target_inputs` of it, without prompt chunks. On the CPU."""
        assert self._cpu is not None
        rows = self._cpu.target_rows(self._slots, slots_R, width=width, block_size=self._block_size)
        return self._inputs(rows, slots_R, width)

    def host_inputs(self, upload: HostUpload, width: int) -> tuple[DecodeBlock, ForwardInputs]:
        """The same of the next upload, whose block-table changes it makes and whose pieces are rows. On CUDA."""
        from engine.kernels.take_upload import take_upload
        from engine.kernels.target_rows import target_rows

        take_upload(upload, pdl=self._pdl)
        rows = target_rows(
            self._slots,
            upload,
            width=width,
            block_size=self._block_size,
            block_width=self._block_width,
            pdl=self._pdl,
        )
        return self._inputs(rows, upload.slots_R, width, has_pieces=upload.size_R is not None)

    def _inputs(
        self, rows: TargetRows, slots_R: Tensor, width: int, *, has_pieces: bool = False
    ) -> tuple[DecodeBlock, ForwardInputs]:
        from engine.runner.batch import DecodeBlock, ForwardInputs

        group = self._builder.group(
            first_row=0,
            slots_R=slots_R,
            q_lens=(width + 1,) * slots_R.shape[0],
            q_start_R=rows.committed_R,
            kv_len_R=rows.kv_len_R,
            causal=True,
            has_filler=True,
            shares_keys=has_pieces,
            table_RB=rows.table_RB,
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
        synthetic_length: float | None,
        size_R: Tensor | None = None,
        results: HostResults | None = None,
    ) -> Commit:
        """`verify` and the writes of its verdict, the context's rows and the drafter's block.

        synthetic_length: of `engine.sampling.synthetic`, None without. On CUDA size_R: of `PieceRows`; results: where
        the packed rows go.
        """
        options: dict[str, Any]
        if self._cpu is None:
            synthetic = None if synthetic_length is None else (synthetic_length, self._state.seed)
            options = {"synthetic": synthetic, "size_R": size_R, "results": results}
        elif synthetic_length is None:
            options = {"synthetic_R": None}
        else:
            seed_R = self._state.seed[slots_R]
            options = {"synthetic_R": synthetic_accepted(synthetic_length, seed_R, rows.committed_R)}
        return self._commit(
            self._slots,
            slots_R,
            rows,
            drawn_N,
            peak_N,
            width=width,
            block_size=self._block_size,
            block_width=self._block_width,
            mask_id=self._mask_id,
            positions=self._positions,
            **options,
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
            table_RB=made.table_RB,
        )
        context = AttentionContext(slot_mapping_N=made.block_cache, groups=(group,))
        return ForwardInputs(ids_N=made.block_ids, positions_N=made.block_positions, context=context)

    def store_drafts(self, slots_R: Tensor, drafts_RK: Tensor, made: Commit) -> None:
        """The rows' new drafts and their number."""
        if self._cpu is not None:
            self._cpu.store_drafts(self._slots, slots_R, drafts_RK, made.live_R)
            return
        from engine.kernels.target_rows import store_drafts

        store_drafts(self._slots, slots_R, drafts_RK, made.live_R, pdl=self._pdl)
