"""What the processors of `LogitsStage` share: where a rank's tables live, and the rows a processor works on."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.step import LogitsRules


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabPlace:
    """num_slots: rows of a table. vocab_size, vocab_start: this rank's shard, padding included."""

    num_slots: int
    vocab_size: int
    vocab_start: int
    device: torch.device

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(columns of the shard, whether each id is in it); foreign ids and padding (-1) get some valid column."""
        columns = ids - self.vocab_start
        is_mine = (ids >= 0) & (columns >= 0) & (columns < self.vocab_size)
        return columns.clamp(0, self.vocab_size - 1), is_mine

    def table(self, *shape: int, fill: float, dtype: torch.dtype) -> Tensor:
        """A tensor [num_slots, *shape] filled with one value."""
        return torch.full((self.num_slots, *shape), fill, dtype=dtype, device=self.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedRows:
    """P rows that one processor concerns.

    slots, rules: what the host knows of them. slots_P, drafts_PK: int64 on the device; column j of a row comes after
    its drafts 1..j, and what lies past its own drafts is any id, or -1.
    """

    slots: Sequence[int]
    rules: Sequence[LogitsRules]
    slots_P: Tensor
    drafts_PK: Tensor
