"""What the bookkeeping kernels of a decode step read and make. Tensors only: imports no Triton.

Shapes: R rows, K drafts, Q = K + 1 columns, W drafter block, S slots, B block-table columns. int64 unless said.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PieceRows:
    """Which rows are pieces of prompts (see `engine.runner.pieces`), as a step's upload brings them.

    size [R]: 0 a decode row, n a piece of n tokens that draws nothing, -n the last piece of a prompt, whose token is
    drawn. start [R]: position of a piece's first token. ids [R, Q]: its tokens. These two hold anything where there is
    no piece, and behind a piece's tokens.
    """

    size_R: Tensor
    start_R: Tensor
    ids_RQ: Tensor


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

    @classmethod
    def empty(cls, R: int, K: int, device: torch.device) -> Self:
        """Unwritten memory for R rows of K drafts."""
        N = R * (K + 1)
        return cls(
            drafts_RK=_integers(device, R, K),
            k_R=_integers(device, R),
            committed_R=_integers(device, R),
            finished_R=torch.empty(R, dtype=torch.bool, device=device),
            kv_len_R=_integers(device, R),
            ids_N=_integers(device, N),
            positions_N=_integers(device, N),
            cache_N=_integers(device, N),
        )


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

    @classmethod
    def empty(cls, R: int, K: int, W: int, device: torch.device) -> Self:
        """Unwritten memory for R rows of K drafts and blocks of W."""
        Q = K + 1
        return cls(
            tokens_RQ=_integers(device, R, Q),
            emitted_R=_integers(device, R),
            accepted_R=_integers(device, R),
            finish_R=_integers(device, R),
            packed=torch.empty(R, 4 + Q, dtype=torch.int32, device=device),
            context_slots_N=_integers(device, R * Q),
            context_positions_N=_integers(device, R * Q),
            live_R=torch.empty(R, dtype=torch.bool, device=device),
            start_R=_integers(device, R),
            kv_len_R=_integers(device, R),
            block_ids=_integers(device, R * W),
            block_positions=_integers(device, R * W),
            block_cache=_integers(device, R * W),
        )


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


def _integers(device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=device)
