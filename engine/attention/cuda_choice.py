"""Which attention kernel a call takes on CUDA, and how it is cut. Pure arithmetic on shapes, so that a graph is stable.

The constants were chosen from `benchmarks/gpu_attention.py` and `gpu_attention_batch.py`; what a line of their results
says about a shape, this file does.

Shapes: R sequences, Q queries of each, G query heads per KV head, g KV heads, D head size.
"""

from dataclasses import dataclass

MAX_DECODE_QUERIES = 32  # uniform groups of at most so many queries take the split-KV kernel, at any batch size
_TILE_ROWS = (16, 32, 64, 128)
_MOST_SPLITS = 128
_MOST_BULK_SPLITS = 32  # of few KV heads: the merge of more takes longer than they gain
_MOST_LONE_MERGES = 2048  # programs that merge a head each
UNIT = 16  # positions that a copy of the tensor copy engine brings: pages are multiples of it
_SHORT_KV_LEN = 8192  # between 4,096 positions, where short tiles gain, and 16,384, where they lose


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCut:
    """rows, positions: of a tile; num_splits: most programs of a sequence; min_tiles: fewest tiles of one of them."""

    rows: int
    positions: int
    num_splits: int
    min_tiles: int = 1
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class BulkCut:
    """Of the kernel fed by the tensor copy engine.

    num_splits: programs of a KV head; positions, rows: of a tile; groups: of warps that compute, each its own tiles and
    its own ones of the num_stages places for them.
    """

    num_splits: int
    positions: int = 64
    num_stages: int = 4
    rows: int = 64
    groups: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RaggedCut:
    """rows, positions: of a tile."""

    rows: int
    positions: int
    num_warps: int = 4
    num_stages: int = 3


def decode_cut(
    *, sequences: int, queries: int, group: int, kv_heads: int, head_dim: int, max_kv_len: int, num_sms: int
) -> DecodeCut:
    """How the split-KV kernel cuts R sequences of up to max_kv_len positions.

    A tile takes about a microsecond whatever else happens, so one request gets a program per tile; many get what keeps
    the SMs busy: 6 programs each of small tiles at head size 64, half of it for tall tiles, two thirds at 128. One
    request of large heads gets one program an SM: what more of them gain the merge of their parts loses. So it is where
    tall tiles of such heads alone fill the SMs. One request's few tiles are short, which come sooner; many gain from
    being long.
    """
    packed = queries * group
    rows = next((size for size in _TILE_ROWS if size >= packed), _TILE_ROWS[-1])
    units = sequences * kv_heads * -(-packed // rows)
    few = head_dim > 64 and units <= num_sms // 16
    short = few and rows == 64 and max_kv_len <= _SHORT_KV_LEN
    positions = 32 if short else 64
    tiles = -(-max_kv_len // positions)
    programs_per_sm = (6 if rows <= 32 else 3) if head_dim <= 64 else (4 if rows <= 32 else 2)
    if few or (rows > 32 and head_dim > 64 and 10 * units >= 9 * num_sms):
        programs_per_sm = 1
    return DecodeCut(
        rows=rows,
        positions=positions,
        num_splits=max(1, min(tiles, _MOST_SPLITS, programs_per_sm * num_sms // units)),
        num_warps=8 if rows == 128 else 4,
        num_stages=4 if short else 3,
    )


def bulk_cut(
    *, sequences: int, queries: int, group: int, kv_heads: int, head_dim: int, block_size: int, num_sms: int
) -> BulkCut | None:
    """How the kernel with the tensor copy engine cuts R sequences; None where it has no form, or was not seen to gain.

    A program for each SM: several for a head while heads are few, then one with two groups of warps. Where heads
    outnumber the SMs, two programs share one. Few queries of few sequences were not measured.
    """
    packed = queries * group
    heads = sequences * kv_heads
    if packed > 64 or head_dim != 128 or block_size % UNIT:
        return None
    if sequences > 1 and packed <= (32 if 2 * heads <= num_sms else 16):
        return None
    if 2 * heads <= num_sms:
        return BulkCut(num_splits=min(num_sms // heads, _MOST_BULK_SPLITS))
    if heads <= num_sms:
        return BulkCut(num_splits=1, num_stages=4, groups=2)
    return BulkCut(num_splits=1, num_stages=3)


def merge_heads(*, rows: int, heads: int, num_splits: int) -> int:
    """Heads of a program of the merge: one where programs are few or have many splits to add, else four."""
    return 1 if rows * heads <= _MOST_LONE_MERGES or num_splits > 8 else 4


def ragged_cut(*, rows: int, group: int, kv_heads: int, num_sms: int) -> RaggedCut:
    """How the ragged kernel cuts a group of that many query rows."""
    large = rows * group * kv_heads >= 128 * num_sms or group > 64
    return RaggedCut(
        rows=128 if large else 64,
        positions=64,
        num_warps=8 if large else 4,
        num_stages=3,
    )
