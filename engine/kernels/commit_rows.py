"""Verify, commit and everything of D that follows from it, for decode rows and pieces of prompts, in one launch.

Each row is one program, its columns one vector. What is computed is told by the torch forms in
`engine.sampling.verify` and `engine.runner` (`draft_program`, `batch`, `piece_rows`). Shapes as in `row_state`.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.coin_rows import accepted_by_coin
from engine.kernels.device_ops import begin
from engine.kernels.row_state import NUMBER_AT, PLACE_AT, Commit, HostResults, Slots, TargetRows
from engine.kernels.target_rows import cache_slot
from engine.sampling.noise import STREAM_ACCEPT
from engine.step import Finish

_FINISH_STOP = tl.constexpr(int(Finish.STOP))
_FINISH_LENGTH = tl.constexpr(int(Finish.LENGTH))
_FINISH_ERROR = tl.constexpr(int(Finish.ERROR))
_FINISH_NONE = tl.constexpr(int(Finish.NONE))
_NUMBER_AT, _PLACE_AT = tl.constexpr(NUMBER_AT), tl.constexpr(PLACE_AT)


@triton.jit(do_not_specialize=["K", "num_stops", "mask_id", "positions", "num_packed", "certain"])
def _commit_kernel(
    slot_ptr,
    drawn_ptr,
    peak_ptr,
    drafts_ptr,
    k_ptr,
    committed_ptr,
    finished_ptr,
    seed_ptr,
    size_ptr,
    cache_ptr,
    position_ptr,
    state_committed_ptr,
    state_last_ptr,
    state_finished_ptr,
    max_len_ptr,
    min_len_ptr,
    stop_ptr,
    table_ptr,
    token_out_ptr,
    emitted_out_ptr,
    accepted_out_ptr,
    finish_out_ptr,
    packed_out_ptr,
    upload_ptr,
    context_slot_out_ptr,
    context_position_out_ptr,
    live_out_ptr,
    start_out_ptr,
    kv_len_out_ptr,
    block_id_out_ptr,
    block_position_out_ptr,
    block_cache_out_ptr,
    K,
    num_stops,
    mask_id,
    positions,
    length_stride,
    stop_stride,
    table_stride,
    num_packed,
    certain,
    fraction,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    STREAM: tl.constexpr,
    PIECES: tl.constexpr,
    DRAFTER: tl.constexpr,
    TO_HOST: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row)
    committed = tl.load(committed_ptr + row)
    finished = tl.load(finished_ptr + row) != 0
    k = tl.load(k_ptr + row)
    c = tl.arange(0, COLUMNS)
    real = c <= K
    at = row * (K + 1) + c
    peak = tl.load(peak_ptr + at, mask=real, other=0.0)
    valid = peak < float("inf")  # False for NaN
    token = tl.where(valid, tl.load(drawn_ptr + at, mask=real, other=0), 0)
    # Column `place` of what is decided is column c of the program; a last piece's begins with its last token's.
    place, inside, writes = c, real, None
    if PIECES:
        size = tl.load(size_ptr + row)
        count = tl.maximum(size, -size).to(tl.int32)
        first = tl.where(size < 0, count - 1, 0)
        place = tl.where(c < first, c - first + K + 1, c - first)
        inside = real & (c >= first)
        writes = size <= 0
        finished = finished | (size > 0)
        committed += first
        k = tl.where(size == 0, k, 0)
    tl.store(token_out_ptr + row * (K + 1) + place, token, mask=real)

    none = K + 2  # more than any column
    draft = tl.load(drafts_ptr + row * K + c, mask=c < K, other=-1)
    matches = (draft == token) & (c < k) & valid
    accepted = tl.min(tl.where(matches, none, c.to(tl.int64)), 0)
    if SYNTHETIC:
        coin = accepted_by_coin(tl.load(seed_ptr + slot * length_stride), committed, certain, fraction, STREAM)
        accepted = tl.minimum(coin, k)
    s = tl.arange(0, STOPS)
    stops = tl.load(stop_ptr + slot * stop_stride + s, mask=s < num_stops, other=-1)
    hits = tl.max((token[:, None] == stops[None, :]).to(tl.int32), 1) > 0
    min_len = tl.load(min_len_ptr + slot * length_stride)
    stop = hits & (token >= 0) & (committed + 1 + place >= min_len) & inside
    until_stop = tl.min(tl.where(stop, place.to(tl.int64) + 1, none), 0)
    until_length = tl.maximum(tl.load(max_len_ptr + slot * length_stride) - committed - 1, 0)
    until_invalid = tl.min(tl.where(valid | ~inside, none, place.to(tl.int64)), 0)
    emitted = tl.minimum(tl.minimum(accepted + 1, until_stop), until_length)
    emitted = tl.where(finished, 0, emitted)
    finish = tl.where(emitted == until_length, _FINISH_LENGTH, _FINISH_NONE)
    finish = tl.where(emitted == until_stop, _FINISH_STOP, finish)
    finish = tl.where(until_invalid < emitted, _FINISH_ERROR, finish)
    finish = tl.where(finished, _FINISH_NONE, finish)
    emitted = tl.minimum(emitted, until_invalid)
    accepted = tl.where(finished, 0, accepted)
    last = tl.sum(tl.where(inside & (place == tl.maximum(emitted - 1, 0)), token, 0), 0)
    last = tl.where(emitted > 0, last, tl.load(state_last_ptr + slot))
    new_committed = committed + emitted
    over = finished | (finish != _FINISH_NONE)
    tl.store(state_committed_ptr + slot, new_committed, mask=writes)
    tl.store(state_last_ptr + slot, last, mask=writes)
    tl.store(state_finished_ptr + slot, over, mask=writes)
    tl.store(emitted_out_ptr + row, emitted)
    tl.store(accepted_out_ptr + row, accepted)
    tl.store(finish_out_ptr + row, finish.to(tl.int64))
    packed, wanted = packed_out_ptr + row * (K + 5), row < num_packed
    if TO_HOST:
        packed += tl.load(upload_ptr + _PLACE_AT)
        tl.store(packed, (tl.load(upload_ptr + _NUMBER_AT) & 0x7FFFFFFF).to(tl.int32), mask=row == 0)
        packed += 1
    tl.store(packed, emitted.to(tl.int32), mask=wanted)
    tl.store(packed + 1, accepted.to(tl.int32), mask=wanted)
    tl.store(packed + 2, k.to(tl.int32), mask=wanted)
    tl.store(packed + 3, finish.to(tl.int32), mask=wanted)
    tl.store(packed + 4 + place, token.to(tl.int32), mask=real & wanted)

    if DRAFTER:
        # Rejected rows and those past the drafter's positions go to the null block.
        position = tl.load(position_ptr + at, mask=real, other=0)
        cache = tl.load(cache_ptr + at, mask=real, other=0)
        fed = emitted
        if PIECES:
            fed = tl.where(size == 0, emitted, count)
        tl.store(context_slot_out_ptr + at, tl.where((c < fed) & (position < positions), cache, 0), mask=real)
        tl.store(context_position_out_ptr + at, tl.minimum(position, positions - 1), mask=real)
        live = (over == 0) & (new_committed + W <= positions)
        tl.store(live_out_ptr + row, live)
        tl.store(start_out_ptr + row, new_committed)
        tl.store(kv_len_out_ptr + row, tl.where(live, new_committed + W, 1))
        w = tl.arange(0, BLOCK)
        of_block = w < W
        block_position = tl.minimum(new_committed + w, positions - 1)
        slots = cache_slot(table_ptr + slot * table_stride, block_position, of_block, BLOCK_SIZE)
        out = row * W + w
        tl.store(block_id_out_ptr + out, tl.where(w == 0, last, mask_id), mask=of_block)
        tl.store(block_position_out_ptr + out, block_position, mask=of_block)
        tl.store(block_cache_out_ptr + out, tl.where(live, slots, 0), mask=of_block)


def commit(
    slots: Slots,
    slots_R: Tensor,
    rows: TargetRows,
    drawn_N: Tensor,
    peak_N: Tensor,
    *,
    width: int,
    block_size: int,
    synthetic: tuple[float, Tensor] | None,
    block_width: int,
    mask_id: int,
    positions: int,
    size_R: Tensor | None = None,
    results: HostResults | None = None,
    pdl: bool = False,
) -> Commit:
    """Verifies and commits the rows, and makes everything of D that follows from it.

    synthetic: the length of `engine.sampling.synthetic` and the slots' seeds. block_width: W, 0 without a drafter.
    positions: of the drafter's table. size_R: `PieceRows.size_R` where some rows
    are pieces of prompts; what the drafter's block would be is then no use. results: where packed rows go; None: to
    the device, all of them.
    """
    R, Q, W, num_stops = slots_R.shape[0], width + 1, block_width, slots.stop_ids.shape[1]
    assert slots.max_len.stride(0) == slots.min_len.stride(0)
    assert synthetic is None or synthetic[1].stride(0) == slots.max_len.stride(0)
    length = 1.0 if synthetic is None else synthetic[0]
    assert drawn_N.is_contiguous()
    assert peak_N.is_contiguous()
    assert slots_R.is_contiguous()
    made = Commit.empty(R, width, W, slots_R.device, has_packed=results is None, table_RB=rows.table_RB)
    _commit_kernel[(R,)](
        slots_R,
        drawn_N,
        peak_N,
        rows.drafts_RK,
        rows.k_R,
        rows.committed_R,
        rows.finished_R,
        slots.max_len if synthetic is None else synthetic[1],
        rows.k_R if size_R is None else size_R,
        rows.cache_N,
        rows.positions_N,
        slots.committed_len,
        slots.last_token,
        slots.finished,
        slots.max_len,
        slots.min_len,
        slots.stop_ids,
        slots.block_table,
        made.tokens_RQ,
        made.emitted_R,
        made.accepted_R,
        made.finish_R,
        made.packed if results is None else results.memory,
        slots_R if results is None else results.numbers_C,
        made.context_slots_N,
        made.context_positions_N,
        made.live_R,
        made.start_R,
        made.kv_len_R,
        made.block_ids,
        made.block_positions,
        made.block_cache,
        width,
        num_stops,
        mask_id,
        positions,
        slots.max_len.stride(0),
        slots.stop_ids.stride(0),
        slots.block_table.stride(0),
        R if results is None else results.num_rows,
        math.floor(length) - 1,
        length - math.floor(length),
        W=W,
        COLUMNS=triton.next_power_of_2(Q),
        STOPS=triton.next_power_of_2(max(num_stops, 1)),
        BLOCK=triton.next_power_of_2(max(W, 1)),
        BLOCK_SIZE=block_size,
        SYNTHETIC=synthetic is not None,
        STREAM=STREAM_ACCEPT,
        PIECES=size_R is not None,
        DRAFTER=W > 0,
        TO_HOST=results is not None,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return made
