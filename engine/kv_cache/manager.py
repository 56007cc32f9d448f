"""`KvCacheManager`: blocks of sequences. The pool's arithmetic applied to a sequence's progress.

Owns the pool and the keys; never decides who runs. Slots of a sequence are positions; a position p lies in entry
p // block_size of its block table.
"""

from collections.abc import Iterable

from engine.config.engine import EngineConfig
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_keys import extend_keys
from engine.sequence import Sequence


class KvCacheManager:
    """Block tables, prefix hits and their bookkeeping for one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.pool = BlockPool(num_blocks=config.num_blocks)
        self.block_size = config.block_size
        self._lookahead = config.lookahead
        self._max_blocks_per_seq = config.max_blocks_per_seq
        self.enable_prefix_caching = config.enable_prefix_caching

    def num_blocks_for(self, seq: Sequence, num_slots: int) -> int:
        """Blocks that hold positions 0 .. num_slots-1, clipped to what the sequence can ever write.

        An unfinished row has committed at most max_len - 2 and a finishing one max_len - 1, and the drafter's block
        writes `lookahead` slots from there: nothing lies at or past max_len + lookahead.
        """
        num_slots = min(num_slots, seq.max_len + self._lookahead)
        return -(-num_slots // self.block_size)

    def match_prefix(self, seq: Sequence) -> list[int]:
        """Resident blocks of the sequence's leading full blocks within its `max_hit_len`."""
        if not self.enable_prefix_caching:
            return []
        num_blocks = seq.max_hit_len // self.block_size
        self._extend_keys(seq, num_blocks)
        return self.pool.match(seq.block_keys[:num_blocks])

    def can_admit(self, seq: Sequence, hit_block_ids: list[int], num_slots: int) -> bool:
        """Are there blocks for positions 0 .. num_slots-1 behind this prefix hit?"""
        num_new = self.num_blocks_for(seq, num_slots) - len(hit_block_ids)
        return num_new <= self.pool.num_available - self.pool.num_revived(hit_block_ids)

    def num_missing(self, seq: Sequence, num_slots: int) -> int:
        """Blocks to allocate before positions 0 .. num_slots-1 are owned (0 or less: none)."""
        return self.num_blocks_for(seq, num_slots) - len(seq.block_ids)

    def grow(self, seq: Sequence, num_blocks: int) -> None:
        """Appends new blocks to the sequence's table."""
        seq.block_ids.extend(self.pool.allocate(num_blocks))
        assert len(seq.block_ids) <= self._max_blocks_per_seq, seq

    def assert_writable(self, seqs: Iterable[Sequence]) -> None:
        """Every block from launched_len on is the sequence's alone and promised to no one by a key."""
        for seq in seqs:
            first = seq.launched_len // self.block_size
            assert self.pool.are_writable(seq.block_ids, first), (
                f"one of {seq.block_ids[first:]} would be written while shared: {seq}"
            )

    def key_filled_blocks(self, seq: Sequence) -> None:
        """Enters blocks that are full of read tokens into the prefix cache."""
        num_full = seq.committed_len // self.block_size
        num_keyed = seq.keyed_len // self.block_size
        if num_full == num_keyed or not self.enable_prefix_caching:
            return
        self._extend_keys(seq, num_full)
        for index in range(num_keyed, num_full):
            self.pool.put_key(seq.block_ids[index], seq.block_keys[index])
        seq.keyed_len = num_full * self.block_size

    def release(self, seq: Sequence) -> None:
        """Gives all blocks back: cached ones stay findable until they are needed."""
        self.pool.release(seq.block_ids)
        seq.block_ids = []
        seq.num_sent_blocks = 0

    def _extend_keys(self, seq: Sequence, num_blocks: int) -> None:
        extend_keys(
            seq.block_keys,
            root=seq.root_key,
            token_ids=seq.token_ids,
            num_blocks=num_blocks,
            block_size=self.block_size,
        )
