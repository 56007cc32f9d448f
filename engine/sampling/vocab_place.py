"""Where a rank's per-slot tables live and which part of the vocabulary they cover."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
