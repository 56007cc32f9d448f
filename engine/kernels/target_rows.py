"""T's inputs of decode rows and pieces of prompts in one launch, the new drafts' way into the slots in another.

Each row is one program, its columns one vector. What is computed is told by the torch forms in
`engine.runner` (`batch`, `piece_rows`, `draft_program`). Shapes as in `engine.kernels.row_state`.
"""

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.device_ops import begin
from engine.kernels.row_state import HEADER, LIMIT_AT, NEW_BLOCKS, HostUpload, Slots, TargetRows

_HEADER, _LIMIT_AT, _NEW_BLOCKS = tl.constexpr(HEADER), tl.constexpr(LIMIT_AT), tl.constexpr(NEW_BLOCKS)
_MOST_TABLE = 512  # blocks that are copied at once


@triton.jit
def cache_slot(table_ptr, position, inside, BLOCK_SIZE: tl.constexpr):
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=inside, other=0)
    return block * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit(do_not_specialize=["K", "tail"])
def _target_rows_kernel(
    upload_ptr,
    committed_ptr,
    last_ptr,
    draft_ptr,
    draft_count_ptr,
    finished_ptr,
    max_len_ptr,
    table_ptr,
    table_out_ptr,
    drafts_out_ptr,
    k_out_ptr,
    committed_out_ptr,
    finished_out_ptr,
    kv_len_out_ptr,
    id_out_ptr,
    position_out_ptr,
    cache_out_ptr,
    K,
    tail,
    draft_stride,
    max_len_stride,
    table_stride,
    table_columns,
    COLUMNS: tl.constexpr,
    TABLE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    limit = tl.load(upload_ptr + _LIMIT_AT)
    rows = upload_ptr + _HEADER
    slot = tl.load(rows + row)
    first_new = tl.load(rows + num_rows + row)
    num_new = tl.load(rows + 2 * num_rows + row)
    n = tl.arange(0, _NEW_BLOCKS)
    new_block = tl.load(rows + 3 * num_rows + row * _NEW_BLOCKS + n)
    pieces = rows + (3 + _NEW_BLOCKS) * num_rows
    # A slot with new blocks is one row's alone.
    slot_table = table_ptr + slot * table_stride
    tl.store(slot_table + first_new + n, new_block, mask=n < num_new)
    tl.debug_barrier()

    committed = tl.load(committed_ptr + slot)
    last = tl.load(last_ptr + slot)
    finished = tl.load(finished_ptr + slot) != 0
    k = tl.minimum(tl.load(draft_count_ptr + slot), tl.load(max_len_ptr + slot * max_len_stride) - 2 - committed)
    k = tl.minimum(tl.minimum(tl.maximum(k, 0), K), limit)
    k = tl.where(finished, 0, k)
    c = tl.arange(0, COLUMNS)
    draft = tl.load(draft_ptr + slot * draft_stride + c, mask=c < K, other=0)
    # Column 0 is the last token, column c its draft c - 1, columns past k the last token again, written nowhere.
    shifted = tl.load(draft_ptr + slot * draft_stride + c - 1, mask=(c > 0) & (c <= k), other=0)
    if PIECES:
        size = tl.load(pieces + row)
        is_piece = size != 0
        count = tl.maximum(size, -size)
        piece = pieces + 2 * num_rows + row * (K + 1)
        committed = tl.where(is_piece, tl.load(pieces + num_rows + row, mask=is_piece, other=0), committed)
        last = tl.where(is_piece, tl.load(piece, mask=is_piece, other=0), last)
        finished = finished & (size == 0)
        k = tl.where(is_piece, count - 1, k)
        draft = tl.where(is_piece, tl.load(piece + c + 1, mask=c + 1 < count, other=0), draft)
        shifted = tl.where(is_piece, tl.load(piece + c, mask=c < count, other=0), shifted)
    tl.store(k_out_ptr + row, k)
    tl.store(committed_out_ptr + row, committed)
    tl.store(finished_out_ptr + row, finished)
    tl.store(kv_len_out_ptr + row, committed + k + 1)
    tl.store(drafts_out_ptr + row * K + c, draft, mask=c < K)
    token = tl.where((c == 0) | (c > k), last, shifted)
    position = committed + tl.minimum(c, k)
    inside = c <= K
    cache = cache_slot(slot_table, position, inside, BLOCK_SIZE)
    cache = tl.where((c > k) | finished, 0, cache)
    at = row * (K + 1) + c
    tl.store(id_out_ptr + at, token, mask=inside)
    tl.store(position_out_ptr + at, position, mask=inside)
    tl.store(cache_out_ptr + at, cache, mask=inside)
    columns = tl.minimum((committed + tail) // BLOCK_SIZE + 1, table_columns).to(tl.int32)
    row_table = table_out_ptr + row.to(tl.int64) * table_columns
    for first in range(0, columns, TABLE):
        t = first + tl.arange(0, TABLE)
        blocks = tl.load(slot_table + t, mask=t < columns, other=0)
        tl.store(row_table + t, blocks, mask=t < columns)


@triton.jit(do_not_specialize=["K"])
def _store_drafts_kernel(
    slot_ptr,
    drafts_ptr,
    live_ptr,
    draft_ptr,
    draft_count_ptr,
    K,
    draft_stride,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    c = tl.arange(0, COLUMNS)
    drafts = tl.load(drafts_ptr + row * K + c, mask=c < K, other=0)
    tl.store(draft_ptr + slot * draft_stride + c, drafts, mask=c < K)
    tl.store(draft_count_ptr + slot, tl.where(tl.load(live_ptr + row) != 0, K, 0))


def target_rows(
    slots: Slots, upload: HostUpload, *, width: int, block_size: int, block_width: int, pdl: bool = False
) -> TargetRows:
    """T's inputs of the rows in `upload.numbers_C`, and their slots' new blocks in the block table.

    width: drafts of the program's rows. block_width: of D's blocks.
    """
    R, columns = upload.table_RB.shape
    assert columns == slots.block_table.shape[1]
    assert upload.table_RB.is_contiguous()
    rows = TargetRows.empty(R, width, upload.slots_R.device, upload.table_RB)
    _target_rows_kernel[(R,)](
        upload.numbers_C,
        slots.committed_len,
        slots.last_token,
        slots.draft_tokens,
        slots.draft_count,
        slots.finished,
        slots.max_len,
        slots.block_table,
        upload.table_RB,
        rows.drafts_RK,
        rows.k_R,
        rows.committed_R,
        rows.finished_R,
        rows.kv_len_R,
        rows.ids_N,
        rows.positions_N,
        rows.cache_N,
        width,
        width + 1 + block_width,
        slots.draft_tokens.stride(0),
        slots.max_len.stride(0),
        slots.block_table.stride(0),
        columns,
        COLUMNS=triton.next_power_of_2(width + 1),
        TABLE=min(_MOST_TABLE, triton.next_power_of_2(columns)),
        BLOCK_SIZE=block_size,
        PIECES=upload.size_R is not None,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return rows


def store_drafts(slots: Slots, slots_R: Tensor, drafts_RK: Tensor, live_R: Tensor, *, pdl: bool = False) -> None:
    """Puts the drafts into the slots; rows that are not live get none."""
    R, width = drafts_RK.shape
    assert drafts_RK.is_contiguous()
    _store_drafts_kernel[(R,)](
        slots_R,
        drafts_RK,
        live_R,
        slots.draft_tokens,
        slots.draft_count,
        width,
        slots.draft_tokens.stride(0),
        COLUMNS=triton.next_power_of_2(width),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
