"""`BlockPool`: who owns which KV block. Ids and reference counts only; the tensors belong to the runner.

Every block but the null block 0 is in exactly one of three places:

    free      no owner, no key                        taken first, last freed first
    cached    no owner, has a prefix key              taken when nothing is free, least recently released first
    owned     reference count >= 1 (> 1: shared)      may have a key as well

Both models share a block id (the drafter's layers are further layers of the same cache), so a cached block always
carries its draft K/V.
"""


class BlockPool:
    """A fixed set of blocks 1 .. num_blocks-1. Block 0 is the null block: never owned, never cached."""

    def __init__(self, *, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks: {num_blocks} leaves no block beside the null block; at least 2 are needed")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: dict[int, None] = {}  # insertion order is release order: the first is the next to be evicted
        self._num_refs = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._condemned: set[int] = set()
        self._to_zero: list[int] = []
        self.num_evictions = 0

    @property
    def num_total(self) -> int:
        """Usable blocks (the null block is not counted)."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks with neither owner nor key."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks without an owner that a prefix hit can still revive."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    def num_refs(self, block_id: int) -> int:
        """Owners of a block."""
        return self._num_refs[block_id]

    def are_writable(self, block_ids: list[int], first: int = 0) -> bool:
        """Whether each from `first` on has exactly one owner, and no prefix key promises its content to anyone."""
        num_refs, key_of = self._num_refs, self._key_of
        for index in range(first, len(block_ids)):  # for every row of every step: no slice, no list
            block_id = block_ids[index]
            if num_refs[block_id] != 1 or key_of[block_id] is not None:
                return False
        return True

    def allocate(self, num: int) -> list[int]:
        """Takes `num` blocks with one reference each, evicting cached blocks when nothing else is left."""
        assert num <= self.num_available, f"{num} blocks asked for, {self.num_available} available"
        block_ids = []
        for _ in range(num):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id = next(iter(self._cached))
                self._evict(block_id)
                self.num_evictions += 1
            self._num_refs[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: list[int]) -> None:
        """Adds one reference to each block of a prefix hit."""
        for block_id in block_ids:
            assert self._key_of[block_id] is not None, f"block {block_id} is shared but has no key"
            if self._num_refs[block_id] == 0:
                del self._cached[block_id]
            self._num_refs[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """Drops one reference of each block, the last block of the sequence first.

        That order keeps the head of a chain longer than its tail, which is unreachable without the head.
        """
        for block_id in reversed(block_ids):
            assert self._num_refs[block_id] > 0, f"block {block_id} is released but has no owner"
            self._num_refs[block_id] -= 1
            if self._num_refs[block_id] == 0:
                if block_id in self._condemned:
                    self._condemned.remove(block_id)
                    self._to_zero.append(block_id)
                if self._key_of[block_id] is None:
                    self._free.append(block_id)
                else:
                    self._cached[block_id] = None

    def put_key(self, block_id: int, key: bytes) -> None:
        """Enters an owned, full block into the prefix cache. The first block with a key keeps it."""
        assert self._num_refs[block_id] > 0, f"block {block_id} takes a key but has no owner"
        assert self._key_of[block_id] is None, f"block {block_id} has a key already"
        if key not in self._block_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def condemn(self, block_ids: list[int]) -> None:
        """Owned blocks whose content is not to be trusted: no hit finds them any more, and once their last owner is
        gone `take_blocks_to_zero` names them. Zeroing them earlier would change what their other owners read."""
        for block_id in block_ids:
            assert self._num_refs[block_id] > 0, f"block {block_id} is condemned but has no owner"
            key = self._key_of[block_id]
            if key is not None:
                del self._block_of[key]
                self._key_of[block_id] = None
            self._condemned.add(block_id)

    def take_blocks_to_zero(self) -> tuple[int, ...]:
        """Condemned blocks that lost their last owner since the last call: zero them before a later step uses them."""
        block_ids, self._to_zero = tuple(self._to_zero), []
        return block_ids

    def match(self, keys: list[bytes]) -> list[int]:
        """Blocks of the longest cached run of leading `keys`."""
        block_ids: list[int] = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def num_revived(self, block_ids: list[int]) -> int:
        """How many of a hit's blocks have no owner, so that sharing them uses up available blocks."""
        return sum(self._num_refs[block_id] == 0 for block_id in block_ids)

    def drop_cache(self) -> None:
        """Forgets every key (owned blocks keep their owners)."""
        for block_id in list(self._cached):
            self._evict(block_id)
            self._free.append(block_id)
        self._block_of.clear()
        self._key_of = [None] * self.num_blocks

    def check_integrity(self, owners: dict[int, int]) -> None:
        """Compares the pool with `owners`: block id -> number of sequences that hold it.

        Raises:
            RuntimeError: every violation found, one per line.
        """
        faults = []
        free, cached = set(self._free), set(self._cached)
        owned = {block_id for block_id, num in enumerate(self._num_refs) if num > 0}
        if len(free) != len(self._free):
            faults.append("a block is twice in the free list")
        if len(free) + len(cached) + len(owned) != self.num_total or free | cached | owned != set(
            range(1, self.num_blocks)
        ):
            faults.append(f"free {len(free)} + cached {len(cached)} + owned {len(owned)} != total {self.num_total}")
        for block_id in sorted(owned | owners.keys()):
            if self._num_refs[block_id] != owners.get(block_id, 0):
                faults.append(
                    f"block {block_id}: {self._num_refs[block_id]} references, {owners.get(block_id, 0)} owners"
                )
        for block_id in sorted(free):
            if self._key_of[block_id] is not None:
                faults.append(f"free block {block_id} has a prefix key")
        for block_id in sorted(cached):
            if self._key_of[block_id] is None:
                faults.append(f"cached block {block_id} has no prefix key")
        keyed = {block_id: key for block_id, key in enumerate(self._key_of) if key is not None}
        if {block_id: key for key, block_id in self._block_of.items()} != keyed:
            faults.append("the key table and the blocks' keys differ")
        if faults:
            raise RuntimeError("KV block pool is inconsistent:\n" + "\n".join(faults))

    def _evict(self, block_id: int) -> None:
        del self._cached[block_id]
        key = self._key_of[block_id]
        assert key is not None
        del self._block_of[key]
        self._key_of[block_id] = None
