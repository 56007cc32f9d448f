"""Prompt chunks as rows of the decode programs, so that one forward serves a step's decode rows and its prompts, or
several prompts that come together. Only where the step drafts.

A chunk is cut into pieces of at most Q = K + 1 tokens. Each is a row of the program of width K: all rows' K/V are
written before a layer's attention reads the cache, so the pieces of a prompt see each other. Rows of a mixed step:

    decode rows | last pieces of the prompts that end, in plan order | all other pieces | filler rows

Pure arithmetic on the host.
"""

from collections.abc import Sequence

import numpy as np

from engine.runner.slots import LOOKS_BETWEEN
from engine.step import PrefillChunk, StepPlan

PROMPT_TOKENS = 512  # that fit beside a full batch
# Each piece reads everything before it again; far behind in a prompt its own programs do better.
_FARTHEST_START = 4096
# Reading the weights of a matrix product takes as long as multiplying some 150 rows by them (H200, bfloat16).
_SAVED_TOKENS = 128


def most_rows(max_num_seqs: int, width: int) -> int:
    """Rows of the largest mixed step at this width. 0: it has none."""
    return max_num_seqs + PROMPT_TOKENS // (width + 1) if width and max_num_seqs > 1 else 0


def num_pieces(prefill: Sequence[PrefillChunk], width: int) -> int:
    """Rows that these chunks take."""
    return sum([-(-len(chunk.token_ids) // (width + 1)) for chunk in prefill])


def may_mix(plan: StepPlan, traits: int) -> bool:
    """Whether a step's prompts may run as rows, if there is a program for so many: beside its decode rows, or several
    of them. One alone has programs of its own.

    traits: `SlotTraits` of its requests that get a token. Left out is what somebody wants to look at between T and D or
        behind it.
    """
    if len(plan.prefill) < (1 if plan.decode_slots else 2) or not plan.draft_len:
        return False
    if plan.report_drafts or traits & LOOKS_BETWEEN:
        return False
    return not any([chunk.scored_next or chunk.start > _FARTHEST_START for chunk in plan.prefill])


def saves_time(plan: StepPlan, num_rows: int, num_decode_rows: int) -> bool:
    """Whether the filler columns of the mixed program cost less than a program more for each chunk.

    num_rows: of that program. num_decode_rows: of the one that the decode rows alone would take, 0 without any.
    """
    apart = sum([len(chunk.token_ids) + _SAVED_TOKENS for chunk in plan.prefill])
    return (num_rows - num_decode_rows) * (plan.draft_len + 1) <= apart


def write_pieces(
    prefill: Sequence[PrefillChunk],
    first: int,
    slots_R: np.ndarray,
    size_R: np.ndarray,
    start_R: np.ndarray,
    ids_RQ: np.ndarray,
) -> None:
    """Writes the chunks' rows from row `first` on; rows and columns without a token keep what they hold.

    size_R, start_R, ids_RQ: as in `engine.kernels.row_state.PieceRows`.
    """
    width = ids_RQ.shape[1]
    end, other = first, first + sum([chunk.samples for chunk in prefill])
    for chunk in prefill:
        num = len(chunk.token_ids)
        tokens = np.array(chunk.token_ids)
        whole = (num - 1) // width  # ahead of its last piece
        rows = slice(other, other + whole)
        slots_R[rows] = chunk.slot
        size_R[rows] = width
        start_R[rows] = np.arange(chunk.start, chunk.start + whole * width, width)
        ids_RQ[rows] = tokens[: whole * width].reshape(whole, width)
        other += whole
        row, left = end if chunk.samples else other, num - whole * width
        slots_R[row] = chunk.slot
        size_R[row] = -left if chunk.samples else left
        start_R[row] = chunk.start + whole * width
        ids_RQ[row, :left] = tokens[whole * width :]
        end += chunk.samples
        other += not chunk.samples
