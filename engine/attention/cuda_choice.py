"""Which attention kernel a call takes on CUDA, and how it is cut. Pure arithmetic on shapes, so that a graph is stable.

The constants were chosen from `benchmarks/gpu_attention.py`; what a line of its result says about a shape, this file
does. Shapes: R sequences, Q queries of each, G query heads per KV head, g KV heads, D head size.
"""

from dataclasses import dataclass

MERGED_IN_PLACE = 8  # most splits that the last program of a sequence merges itself
MAX_DECODE_QUERIES = 32  # uniform groups of at most so many queries take the split-KV kernel
_TILE_ROWS = (16, 32, 64, 128)
_PROGRAMS_PER_SM = 2  # what the splits of a decode call aim at
_IN_PLACE_TILES = 6  # tiles per split up to which few splits merged in place beat many and a second kernel


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
class RaggedCut:
    """rows, positions: of a tile."""

    rows: int
    positions: int
    num_warps: int = 4
    num_stages: int = 3


def decode_cut(*, sequences: int, queries: int, group: int, kv_heads: int, max_kv_len: int, num_sms: int) -> DecodeCut:
    """How the split-KV kernel cuts R sequences of up to max_kv_len positions."""
    packed = queries * group
    rows = next((size for size in _TILE_ROWS if size >= packed), _TILE_ROWS[-1])
    positions = 64
    units = sequences * kv_heads * -(-packed // rows)
    tiles = -(-max_kv_len // positions)
    wanted = min(tiles, max(1, _PROGRAMS_PER_SM * num_sms // units))
    if wanted > MERGED_IN_PLACE and tiles <= _IN_PLACE_TILES * MERGED_IN_PLACE:
        wanted = MERGED_IN_PLACE
    return DecodeCut(
        rows=rows,
        positions=positions,
        num_splits=wanted,
        num_warps=8 if rows == 128 else 4,
    )


def ragged_cut(*, rows: int, group: int, kv_heads: int, num_sms: int) -> RaggedCut:
    """How the ragged kernel cuts a group of that many query rows."""
    large = rows * group * kv_heads >= 128 * num_sms or group > 64
    return RaggedCut(
        rows=128 if large else 64,
        positions=64,
        num_warps=8 if large else 4,
        num_stages=3,
    )


def prefers_flash(*, sequences: int, queries: int, kv_heads: int, num_sms: int) -> bool:
    """Whether flash-attn beats the split-KV kernel on a decode group: it has no splits, so R x g must fill the GPU."""
    return sequences * kv_heads >= 2 * num_sms and queries > 1
