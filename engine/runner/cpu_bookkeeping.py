"""The CPU's counterparts of the Triton kernels in `engine.kernels.target_rows` and `engine.kernels.commit_rows`."""

import ctypes
import functools

import torch
from torch import Tensor

from engine.kernels.row_state import Commit, Slots, TargetRows
from engine.layers.cpu_jit import JobKernel, compile_ir
from engine.runner.cpu_bookkeeping_job import CommitWord, StoreWord, TargetWord

_KEPT_SHAPES = 16  # a batch stays at one shape or two for many steps


class CpuBookkeeping:
    """Results are good until the next call of the same shape: they are written to the same places, which are kept for
    the shapes used last.

    At one row the torch forms are some 150 calls of several us each; these are three.
    """

    def __init__(self) -> None:
        from engine.runner.cpu_bookkeeping_ir import module_ir  # imports llvmlite, which not every machine has

        engine = compile_ir(module_ir(), optimise=True)
        self._target, self._commit, self._store = (
            JobKernel(engine, name) for name in ("target_rows", "commit_rows", "store_drafts")
        )
        self._target_job = ctypes.c_int64 * len(TargetWord)
        self._commit_job = ctypes.c_int64 * len(CommitWord)
        self._store_job = ctypes.c_int64 * len(StoreWord)
        self._rows_of = functools.lru_cache(_KEPT_SHAPES)(TargetRows.empty)
        self._commit_of = functools.lru_cache(_KEPT_SHAPES)(Commit.empty)

    def target_rows(self, slots: Slots, slots_R: Tensor, *, width: int, block_size: int) -> TargetRows:
        """T's inputs of decode rows at a program width of `width` drafts."""
        R = slots_R.shape[0]
        rows = self._rows_of(R, width, slots_R.device)
        assert slots_R.is_contiguous()
        job = self._target_job(
            R,
            width,
            slots_R.data_ptr(),
            slots.committed_len.data_ptr(),
            slots.last_token.data_ptr(),
            slots.draft_tokens.data_ptr(),
            slots.draft_tokens.stride(0),
            slots.draft_count.data_ptr(),
            slots.finished.data_ptr(),
            slots.max_len.data_ptr(),
            slots.max_len.stride(0),
            slots.block_table.data_ptr(),
            slots.block_table.stride(0),
            block_size,
            rows.drafts_RK.data_ptr(),
            rows.k_R.data_ptr(),
            rows.committed_R.data_ptr(),
            rows.finished_R.data_ptr(),
            rows.kv_len_R.data_ptr(),
            rows.ids_N.data_ptr(),
            rows.positions_N.data_ptr(),
            rows.cache_N.data_ptr(),
        )
        self._target.run(job, 1)
        return rows

    def commit(
        self,
        slots: Slots,
        slots_R: Tensor,
        rows: TargetRows,
        drawn_N: Tensor,
        peak_N: Tensor,
        *,
        width: int,
        block_size: int,
        synthetic_R: Tensor | None,
        block_width: int,
        mask_id: int,
        positions: int,
    ) -> Commit:
        """Verifies and commits the rows, and makes everything of D that follows from it.

        block_width: W, 0 without a drafter. positions: of the drafter's table.
        """
        R = slots_R.shape[0]
        made = self._commit_of(R, width, block_width, slots_R.device)
        assert made.packed is not None
        assert slots.max_len.stride(0) == slots.min_len.stride(0)
        assert all(tensor.is_contiguous() for tensor in (slots_R, drawn_N, peak_N, slots.stop_ids))
        assert (drawn_N.dtype, peak_N.dtype) == (torch.int64, torch.float32)
        job = self._commit_job(
            R,
            width,
            slots_R.data_ptr(),
            drawn_N.data_ptr(),
            peak_N.data_ptr(),
            rows.drafts_RK.data_ptr(),
            rows.k_R.data_ptr(),
            rows.committed_R.data_ptr(),
            rows.finished_R.data_ptr(),
            0 if synthetic_R is None else synthetic_R.data_ptr(),
            rows.cache_N.data_ptr(),
            rows.positions_N.data_ptr(),
            slots.committed_len.data_ptr(),
            slots.last_token.data_ptr(),
            slots.finished.data_ptr(),
            slots.max_len.data_ptr(),
            slots.min_len.data_ptr(),
            slots.max_len.stride(0),
            slots.stop_ids.data_ptr(),
            slots.stop_ids.shape[1],
            slots.block_table.data_ptr(),
            slots.block_table.stride(0),
            block_size,
            block_width,
            mask_id,
            positions,
            made.tokens_RQ.data_ptr(),
            made.emitted_R.data_ptr(),
            made.accepted_R.data_ptr(),
            made.finish_R.data_ptr(),
            made.packed.data_ptr(),
            made.context_slots_N.data_ptr(),
            made.context_positions_N.data_ptr(),
            made.live_R.data_ptr(),
            made.start_R.data_ptr(),
            made.kv_len_R.data_ptr(),
            made.block_ids.data_ptr(),
            made.block_positions.data_ptr(),
            made.block_cache.data_ptr(),
        )
        self._commit.run(job, 1)
        return made

    def store_drafts(self, slots: Slots, slots_R: Tensor, drafts_RK: Tensor, live_R: Tensor) -> None:
        """Puts the drafts into the slots; rows that are not live get none."""
        R, width = drafts_RK.shape
        assert drafts_RK.is_contiguous()
        job = self._store_job(
            R,
            width,
            slots_R.data_ptr(),
            drafts_RK.data_ptr(),
            live_R.data_ptr(),
            slots.draft_tokens.data_ptr(),
            slots.draft_tokens.stride(0),
            slots.draft_count.data_ptr(),
        )
        self._store.run(job, 1)
