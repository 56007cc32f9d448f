"""How one rank of a tensor-parallel group shares a model: pure arithmetic on ranges, no tensors.

Every dimension that is cut is first padded with zeros up to a multiple of the group's size, so any degree works on any
shape: whole KV groups (a KV head with the query heads that read it), MLP columns, vocabulary rows, hidden columns of
the drafter's `fc`. A padded part has zero weights and adds exactly zero to the row-parallel sums.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Rank's part of a padded dimension: local size `size`, of which the first `real` come from the checkpoint.

    start: first global index of the part; rows start .. start+real-1 exist in the checkpoint.
    """

    start: int
    real: int
    size: int


def shard(total: int, *, rank: int, ranks: int) -> Shard:
    """The rank's contiguous part of `total` indices, padded so that all ranks hold ceil(total / ranks)."""
    assert 0 <= rank < ranks and total > 0
    size = -(-total // ranks)
    start = rank * size
    return Shard(start=start, real=max(0, min(size, total - start)), size=size)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShard:
    """A rank's heads: whole KV groups, in the checkpoint's order. Counts include padding unless called `real`."""

    num_heads: int
    num_kv_heads: int
    group_size: int  # query heads per KV head
    first_kv_head: int
    real_kv_heads: int

    @property
    def first_head(self) -> int:
        return self.first_kv_head * self.group_size

    @property
    def real_heads(self) -> int:
        return self.real_kv_heads * self.group_size


def shard_heads(num_heads: int, num_kv_heads: int, *, rank: int, ranks: int) -> HeadShard:
    """Whole KV groups per rank: 9/3 heads become 12/4 at 2 and at 4 ranks."""
    assert num_heads % num_kv_heads == 0
    group_size = num_heads // num_kv_heads
    part = shard(num_kv_heads, rank=rank, ranks=ranks)
    return HeadShard(
        num_heads=part.size * group_size,
        num_kv_heads=part.size,
        group_size=group_size,
        first_kv_head=part.start,
        real_kv_heads=part.real,
    )
