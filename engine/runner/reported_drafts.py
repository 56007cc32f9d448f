"""The drafts a step made, as a plan with `report_drafts` wants them in its results."""

from collections.abc import Sequence

import torch

from engine.runner.slots import SlotState


def pack_drafts(state: SlotState, slots_S: torch.Tensor, draft_len: int) -> torch.Tensor:
    """int32 [S, 1 + draft_len]: how many drafts each row has, then the drafts. To be taken right behind D."""
    counts_S1 = state.draft_count[slots_S][:, None]
    return torch.cat([counts_S1, state.draft_tokens[slots_S, :draft_len]], dim=1).to(torch.int32)


def drafts_of(packed: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Each row's drafts; none for a row that has ended or is beyond the drafter's positions."""
    return [tuple(row[1 : 1 + row[0]]) for row in packed]
