"""What attention must know about one step: made once by the runner, shared by all layers.

Shapes: N flattened rows of the step, R sequences of a group, B columns of the block table.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionGroup:
    """Sequences that attend in one call. Its rows are first_row .. first_row + sum(q_lens) - 1, sequence by sequence.

    q_lens:     queries of each sequence (uniform for decode).
    q_start_R:  int64, position of the first query.
    kv_len_R:   int64, visible K/V length with the new tokens included, >= 1.
    block_table_RB: int64, ceil(max_kv_len / block_size) columns or more; past a sequence's blocks any valid id.
    max_kv_len: host-side upper bound of kv_len_R; it fixes the shapes, so equal values give equal programs.
    causal:     query i sees positions <= q_start + i; otherwise every position below kv_len.
    has_filler: a sequence's last queries may lie past its kv_len; nobody reads what they get.
    shares_keys: some may be pieces of one prompt (`engine.runner.pieces`), which see each other's new K/V: all rows'
        are in the cache before any is read.
    window:     query i sees no position below min(q_start + i - window + 1, kv_len - 1): the last `window` positions up
                to its own, and always at least one. None: no lower bound.
    cache:      per-step derived tensors of a backend (masks, gather indices), filled at the first layer.
    """

    first_row: int
    q_lens: tuple[int, ...]
    q_start_R: Tensor
    kv_len_R: Tensor
    block_table_RB: Tensor
    max_kv_len: int
    causal: bool
    has_filler: bool = False
    shares_keys: bool = False
    window: int | None = None
    cache: dict[object, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return sum(self.q_lens)


@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """slot_mapping_N: int64, flat cache slot (block id * block_size + offset) each row's K/V is written to; a row to be
    dropped points into the null block 0. A row that belongs to no group attends to nothing and gives zeros."""

    slot_mapping_N: Tensor
    groups: tuple[AttentionGroup, ...]


class Attention(Protocol):
    """An attention backend. K/V of the step's rows are already in the cache."""

    def __call__(self, q_NhD: Tensor, k_cache: Tensor, v_cache: Tensor, ctx: AttentionContext) -> Tensor:
        """q [N, heads, D], caches [num_blocks, block_size, kv_heads, D] -> [N, heads * D]."""
        ...
