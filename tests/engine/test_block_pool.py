"""The block pool keeps every block in exactly one place, and the prefix keys separate what must not meet."""

import pytest

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.prefix_keys import child_key, extend_keys, root_key


def test_null_block_is_never_handed_out():
    pool = BlockPool(num_blocks=5)
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_available == 0
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 available"):
        pool.allocate(1)


def test_pool_without_a_usable_block_is_refused():
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(num_blocks=1)


def test_cached_blocks_are_evicted_last_tail_first_and_least_recent_first():
    pool = BlockPool(num_blocks=6)
    old, new = pool.allocate(2), pool.allocate(2)
    for name, block_ids in (("old", old), ("new", new)):
        for index, block_id in enumerate(block_ids):
            pool.put_key(block_id, f"{name}{index}".encode())
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_cached) == (1, 4)
    taken = pool.allocate(3)
    assert taken[1:] == [old[1], old[0]]  # the free block first, then the older chain from its tail
    assert pool.match([b"old0"]) == []
    assert pool.match([b"new0", b"new1"]) == new
    assert pool.num_evictions == 2
    pool.check_integrity(dict.fromkeys(taken, 1))


def test_sharing_counts_references_and_forbids_writing():
    pool = BlockPool(num_blocks=4)
    blocks = pool.allocate(2)
    assert pool.are_writable(blocks[:1])
    pool.put_key(blocks[0], b"k")
    assert not pool.are_writable(blocks[:1])
    hit = pool.match([b"k", b"unknown"])
    pool.share(hit)
    assert pool.num_refs(blocks[0]) == 2
    pool.release(blocks)
    assert pool.num_refs(blocks[0]) == 1
    assert pool.num_revived(hit) == 0
    pool.release(hit)
    assert pool.num_revived(hit) == 1
    assert pool.num_cached == 1
    pool.check_integrity({})


def test_equal_content_is_cached_once():
    pool = BlockPool(num_blocks=4)
    first, second = pool.allocate(2)
    pool.put_key(first, b"k")
    pool.put_key(second, b"k")
    assert pool.match([b"k"]) == [first]
    pool.release([first, second])
    assert (pool.num_free, pool.num_cached) == (2, 1)
    pool.check_integrity({})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "twice in the free list"),
        (lambda pool: pool._free.pop(), "free 1 .* != total 3"),
        (lambda pool: pool._num_refs.__setitem__(3, 1), "block 3: 1 references, 0 owners"),
        (lambda pool: pool._key_of.__setitem__(1, b"x"), "free block 1 has a prefix key|key table"),
    ],
)
def test_integrity_check_finds(damage, message):
    pool = BlockPool(num_blocks=4)
    pool.allocate(1)
    pool.check_integrity({1: 1})
    damage(pool)
    with pytest.raises(RuntimeError, match=message):
        pool.check_integrity({1: 1})


def test_wrong_ends_are_caught():
    pool = BlockPool(num_blocks=4)
    blocks = pool.allocate(1)
    with pytest.raises(AssertionError, match="no key"):
        pool.share(blocks)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="no owner"):
        pool.release(blocks)


def test_drop_cache_keeps_owners():
    pool = BlockPool(num_blocks=5)
    kept, released = pool.allocate(1), pool.allocate(1)
    pool.put_key(kept[0], b"a")
    pool.put_key(released[0], b"b")
    pool.release(released)
    pool.drop_cache()
    assert pool.match([b"a"]) == pool.match([b"b"]) == []
    assert pool.num_cached == 0
    assert pool.num_refs(kept[0]) == 1
    pool.check_integrity({kept[0]: 1})


def test_keys_depend_on_everything_before_them():
    roots = [
        root_key(identity="m", cache_salt=None),
        root_key(identity="m", cache_salt=""),
        root_key(identity="m", cache_salt="s"),
        root_key(identity="ms", cache_salt=None),
        root_key(identity="", cache_salt="m"),
    ]
    chains = []
    for root in roots:
        for token_ids in ([1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 4, 3], [1, 2, 3, 4, 5]):
            keys: list[bytes] = []
            extend_keys(keys, root=root, token_ids=token_ids, num_blocks=2, block_size=2)
            chains.append(keys)
    assert len({keys[1] for keys in chains}) == len(roots) * 3  # the fifth token belongs to no full block
    assert chains[0][0] == chains[2][0] == child_key(roots[0], [1, 2])


def test_a_condemned_block_leaves_the_cache_at_once_and_is_zeroed_after_its_last_owner():
    pool = BlockPool(num_blocks=6)
    mine, other = pool.allocate(2), pool.allocate(1)
    pool.put_key(mine[0], b"k")
    pool.share(pool.match([b"k"]))
    pool.condemn(mine)
    assert pool.match([b"k"]) == []
    assert pool.take_blocks_to_zero() == ()
    pool.release(mine)
    assert pool.take_blocks_to_zero() == (mine[1],)  # the first has an owner left
    pool.release([mine[0]])
    pool.release(other)
    assert pool.take_blocks_to_zero() == (mine[0],)
    assert pool.take_blocks_to_zero() == ()
    pool.check_integrity({})
    assert pool.num_free == pool.num_total
