"""Keys of full KV blocks: a chain of digests, so that a key stands for all tokens up to the block's end.

A key is a 16-byte BLAKE2b digest of (parent key, the block's token ids). The root holds the engine's identity (target,
drafter, dtype) and the request's salt, so equal tokens under another model or another salt never meet.
"""

from array import array
from hashlib import blake2b

KEY_BYTES = 16


def root_key(*, identity: str, cache_salt: str | None) -> bytes:
    """Parent of a sequence's first block. No salt and an empty salt are different roots."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (identity.encode(), b"" if cache_salt is None else b"salt:" + cache_salt.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def child_key(parent: bytes, token_ids: list[int]) -> bytes:
    """Key of the block that holds `token_ids` (exactly one block's worth) behind `parent`."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=KEY_BYTES).digest()


def extend_keys(keys: list[bytes], *, root: bytes, token_ids: list[int], num_blocks: int, block_size: int) -> None:
    """Appends keys to `keys` in place until it covers the first `num_blocks` blocks of `token_ids`.

    The tokens of those blocks must all be known: num_blocks * block_size <= len(token_ids).
    """
    assert num_blocks * block_size <= len(token_ids), f"{num_blocks} blocks are not full at {len(token_ids)} tokens"
    for index in range(len(keys), num_blocks):
        parent = keys[-1] if keys else root
        keys.append(child_key(parent, token_ids[index * block_size : (index + 1) * block_size]))
