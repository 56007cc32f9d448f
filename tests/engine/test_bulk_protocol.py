"""Barriers of the attention fed by the copy engine, as a model: tiles that come late and in any order.

What a barrier's wait tells is the parity of a phase: one that is still to come looks like the one before it.
"""

import random

import pytest

from engine.attention.cuda_choice import BulkCut, bulk_cut

TILES = 24
SLOW = 60  # turns of a late tile; a group takes three for each of its own


def taken(cut: BulkCut, seed: int) -> tuple[bool, bool]:
    """(whether every group found the tiles that it took, whether all ended) of one program."""
    rng, stages = random.Random(seed), cut.num_stages
    full, empty, holds = [0] * stages, [0] * stages, [-1] * stages  # phases that have ended; the tile that lies there
    coming: list[tuple[int, int]] = []  # (turn, tile)
    next_tile, own, left, right = 0, list(range(cut.groups)), [0] * cut.groups, True

    def ended(phases: list[int], stage: int, parity: int) -> bool:
        return phases[stage] % 2 != parity

    for turn in range(100 * TILES):
        for due, tile in [come for come in coming if come[0] <= turn]:
            coming.remove((due, tile))
            holds[tile % stages] = tile
            full[tile % stages] += 1
        if next_tile < TILES and ended(empty, next_tile % stages, (next_tile // stages) % 2 ^ 1):
            coming.append((turn + rng.choice((3, 4, 5, SLOW)), next_tile))
            next_tile += 1
        for group, tile in enumerate(own):
            if tile >= TILES:
                continue
            if left[group] == 0 and ended(full, tile % stages, tile // stages % 2):
                right &= holds[tile % stages] == tile
                left[group] = 3
            elif left[group] == 1:
                empty[tile % stages] += 1
                own[group] += cut.groups
                left[group] = 0
            elif left[group]:
                left[group] -= 1
    return right, min(own) >= TILES


@pytest.mark.parametrize(("sequences", "queries"), [(1, 16), (1, 1), (8, 16), (9, 16), (16, 8), (17, 16), (128, 8)])
def test_cuts_take_the_tiles_that_were_brought(sequences: int, queries: int) -> None:
    shape = {"group": 4, "kv_heads": 8, "head_dim": 128, "block_size": 16, "num_sms": 132}
    cut = bulk_cut(sequences=sequences, queries=queries, **shape)
    assert cut is not None and cut.num_stages % cut.groups == 0
    assert all(taken(cut, seed) == (True, True) for seed in range(60))


def test_stages_that_groups_share_fail_in_the_model() -> None:
    found = [taken(BulkCut(num_splits=1, num_stages=5, groups=2), seed) for seed in range(60)]
    assert not all(right for right, _ in found)
    assert not all(ended for _, ended in found)
