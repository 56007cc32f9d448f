"""Pieces of prompts as rows of T, and what their verdict is: the torch forms.

A piece of n tokens at position s is a row whose last token is its first one and whose drafts are the others; nothing
decides about these, the prompt does. The last piece of a prompt is decided as the prompt's end: its last column alone,
as the only one of a row with s + n - 1 tokens committed and no drafts. A piece that draws nothing is a filler row then.

Shapes: R rows, K drafts, Q = K + 1 columns.
"""

from __future__ import annotations  # annotations only, of a class that refers to this module

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.kernels.row_state import PieceRows

if TYPE_CHECKING:
    from engine.runner.batch import DecodeBlock


def with_pieces(block: DecodeBlock, pieces: PieceRows) -> DecodeBlock:
    """The rows of T with the pieces among them."""
    assert block.last_R is not None
    is_piece_R = pieces.size_R != 0
    k_R = pieces.size_R.abs() - 1
    column_K = torch.arange(block.drafts_RK.shape[1], device=k_R.device)
    tokens_RK = pieces.ids_RQ[:, 1:].masked_fill(column_K >= k_R[:, None], 0)
    return replace(
        block,
        drafts_RK=torch.where(is_piece_R[:, None], tokens_RK, block.drafts_RK),
        k_R=torch.where(is_piece_R, k_R, block.k_R),
        committed_R=torch.where(is_piece_R, pieces.start_R, block.committed_R),
        finished_R=block.finished_R & ~is_piece_R,
        last_R=torch.where(is_piece_R, pieces.ids_RQ[:, 0], block.last_R),
    )


def drawn_columns(size_R: Tensor, width: int) -> Tensor:
    """bool [R, width]: columns whose token counts, in decode rows all of them."""
    column_Q = torch.arange(width, device=size_R.device)
    return (size_R[:, None] == 0) | (column_Q == -size_R[:, None] - 1)


def rows_to_verify(
    block: DecodeBlock, tokens_RQ: Tensor, valid_RQ: Tensor, filler_slot: int
) -> tuple[DecodeBlock, Tensor, Tensor]:
    """(rows, tokens, which of them are valid) as `engine.sampling.verify` and the commit behind it take them."""
    size_R = block.size_R
    assert size_R is not None
    first_R = torch.where(size_R < 0, -size_R - 1, 0)
    column_Q = torch.arange(tokens_RQ.shape[1], device=size_R.device)
    turned_RQ = (column_Q + first_R[:, None]) % tokens_RQ.shape[1]
    draws_nothing_R = size_R > 0
    rows = replace(
        block,
        k_R=block.k_R.masked_fill(size_R != 0, 0),
        slots_R=block.slots_R.masked_fill(draws_nothing_R, filler_slot),
        committed_R=(block.committed_R + first_R).masked_fill(draws_nothing_R, 0),
        finished_R=block.finished_R | draws_nothing_R,
    )
    return rows, tokens_RQ.gather(1, turned_RQ), valid_RQ.gather(1, turned_RQ)
