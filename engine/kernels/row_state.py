"""What the bookkeeping kernels of a decode step read and make. Tensors only: imports no Triton.

Shapes: R rows, K drafts, Q = K + 1 columns, W drafter block, S slots, B block-table columns. int64 unless said.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRows:
    """`decode_block` and the rows of T made of it. drafts [R, K]; finished bool [R]; ids, positions, cache [R * Q]."""

    drafts_RK: Tensor
    k_R: Tensor
    committed_R: Tensor
    finished_R: Tensor
    kv_len_R: Tensor
    ids_N: Tensor
    positions_N: Tensor
    cache_N: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What a step decided (tokens [R, Q], emitted, accepted, finish [R]; packed int32 [R, 4 + Q]) and what D goes on
    with: the context's cache slots and positions [R * Q], the block's rows [R * W], live bool [R]. Without a drafter
    only the first part is filled."""

    tokens_RQ: Tensor
    emitted_R: Tensor
    accepted_R: Tensor
    finish_R: Tensor
    packed: Tensor
    context_slots_N: Tensor
    context_positions_N: Tensor
    live_R: Tensor
    start_R: Tensor
    kv_len_R: Tensor
    block_ids: Tensor
    block_positions: Tensor
    block_cache: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """The slot state's tensors that the kernels read and write; see `engine.runner.slots.SlotState`."""

    committed_len: Tensor
    last_token: Tensor
    draft_tokens: Tensor
    draft_count: Tensor
    finished: Tensor
    max_len: Tensor
    min_len: Tensor
    stop_ids: Tensor
    block_table: Tensor
