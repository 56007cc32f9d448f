"""What the bookkeeping kernels of a decode step read and make. Tensors only: imports no Triton.

Shapes: R rows, K drafts, Q = K + 1 columns, W drafter block, S slots, B block-table columns. int64 unless said.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

HEADER = 4  # numbers ahead of an upload's rows
NUMBER_AT, LIMIT_AT, PLACE_AT, LENGTH_AT = range(HEADER)  # the upload's own, the drafts' limit, the results' place, all
NEW_BLOCKS = 4  # of a row that an upload has room for
ENTRIES = 3  # uploads in host memory: one being read, one waiting behind the step in flight, one being filled


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
class HostUpload:
    """A step's numbers in host memory, from where the first kernel of T takes them.

    entries [ENTRIES, C]: pinned on CUDA; upload n is entry n % ENTRIES and lies as `engine.runner.step_upload` tells.
    number [1]: of the upload that is taken next; who takes it passes to the one behind it.
    numbers [C]: where they are taken to. slots, size [R]: parts of it; size is None in programs that take no pieces.
    table [R, B]: the rows' block tables as far as T and D of the step look, whatever valid ids behind.
    usual_length, most_length: of an upload without pieces and of any, in programs of R rows.
    """

    entries_EC: Tensor
    number_1: Tensor
    numbers_C: Tensor
    slots_R: Tensor
    size_R: Tensor | None
    table_RB: Tensor
    usual_length: int
    most_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRows:
    """`decode_block` and the rows of T made of it. drafts [R, K]; finished bool [R]; ids, positions, cache [R * Q];
    table: of `HostUpload`, None where the rows came otherwise."""

    drafts_RK: Tensor
    k_R: Tensor
    committed_R: Tensor
    finished_R: Tensor
    kv_len_R: Tensor
    ids_N: Tensor
    positions_N: Tensor
    cache_N: Tensor
    table_RB: Tensor | None = None

    @classmethod
    def empty(cls, R: int, K: int, device: torch.device, table_RB: Tensor | None = None) -> Self:
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
            table_RB=table_RB,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HostResults:
    """Where the packed rows go, in host memory that the device writes.

    memory: int32, pinned on CUDA. numbers: of the upload, which tells the place in the memory, where its own number
    goes and behind which the rows begin. num_rows: of those that anybody reads, the first.
    """

    memory: Tensor
    numbers_C: Tensor
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What a step decided (tokens [R, Q], emitted, accepted, finish [R]; packed int32 [R, 4 + Q], None where
    `HostResults` took the rows) and what D goes on with: the context's cache slots and positions [R * Q], the block's
    rows [R * W], live bool [R]. Without a drafter only the first part is filled. table: of `TargetRows`."""

    tokens_RQ: Tensor
    emitted_R: Tensor
    accepted_R: Tensor
    finish_R: Tensor
    packed: Tensor | None
    context_slots_N: Tensor
    context_positions_N: Tensor
    live_R: Tensor
    start_R: Tensor
    kv_len_R: Tensor
    block_ids: Tensor
    block_positions: Tensor
    block_cache: Tensor
    table_RB: Tensor | None = None

    @classmethod
    def empty(
        cls,
        R: int,
        K: int,
        W: int,
        device: torch.device,
        *,
        has_packed: bool = True,
        table_RB: Tensor | None = None,
    ) -> Self:
        """Unwritten memory for R rows of K drafts and blocks of W."""
        Q = K + 1
        return cls(
            tokens_RQ=_integers(device, R, Q),
            emitted_R=_integers(device, R),
            accepted_R=_integers(device, R),
            finish_R=_integers(device, R),
            packed=torch.empty(R, 4 + Q, dtype=torch.int32, device=device) if has_packed else None,
            context_slots_N=_integers(device, R * Q),
            context_positions_N=_integers(device, R * Q),
            live_R=torch.empty(R, dtype=torch.bool, device=device),
            start_R=_integers(device, R),
            kv_len_R=_integers(device, R),
            block_ids=_integers(device, R * W),
            block_positions=_integers(device, R * W),
            block_cache=_integers(device, R * W),
            table_RB=table_RB,
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
