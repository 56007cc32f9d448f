"""Attention that norms and rotates heads itself: equal to the kernel that does so ahead of it, cache included."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.attention.cuda_choice import BulkCut
from tests.gpu.attention_cases import Problem

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.available import copy_engine, dependent_launch
from engine.kernels.bulk_attention import bulk_attention
from engine.kernels.merge_splits import Workspace
from engine.kernels.row_ops import rotate_and_write
from engine.kernels.turn_heads import Unturned

EPS = 1e-6
LONE = BulkCut(num_splits=16)
QWEN = Problem(q_lens=(16,), starts=(1000,), h=32, g=8, D=128)
PROBLEMS = [replace(QWEN, starts=(start,)) for start in (0, 3, 15, 16, 240, 250, 1009, 1024, 4096)] + [
    replace(QWEN, short=(5,)),
    replace(QWEN, starts=(777,), causal=False),
    replace(QWEN, starts=(1013,), causal=False, short=(3,), spare=500),
    replace(QWEN, q_lens=(16,) * 4, starts=(40, 0, 3000, 511), spare=100),
    replace(QWEN, q_lens=(8,) * 2, starts=(400, 170), short=(0, 4), block_size=128),
    replace(QWEN, q_lens=(1,), starts=(2047,)),
    replace(QWEN, q_lens=(9,), h=28, g=4),
    replace(QWEN, q_lens=(32,), h=16, g=8),
]
# Lengths around the end of a unit, of a tile of every split, and of a tile of one split.
EDGES = [
    replace(QWEN, q_lens=(queries,), starts=(length - queries,))
    for queries in (1, 8, 16)
    for length in (1, 15, 16, 17, 1023, 1024, 1025, 1040, 1041, 2047, 2048, 2049, 2064, 2065, 4096)
    if length >= queries
]
CUTS = [
    LONE,
    BulkCut(num_splits=16, positions=128, num_stages=2),
    BulkCut(num_splits=3, positions=32, num_stages=2),
]


class Turning:
    """A problem whose queries, keys and values are still to be turned; the cache holds NaN where they will be."""

    def __init__(self, problem: Problem, cut: BulkCut) -> None:
        self.problem, self.cut = problem, cut
        _, k, v = problem.tensors(torch.bfloat16, "cuda")
        self.group = problem.group("cuda")
        generator = torch.Generator("cuda").manual_seed(3)
        rows, heads = sum(problem.q_lens), problem.h + 2 * problem.g
        self.heads = torch.randn(rows, heads, problem.D, generator=generator, device="cuda").bfloat16()
        self.norm = torch.randn(problem.h + problem.g, problem.D, generator=generator, device="cuda").bfloat16()
        angle = torch.randn(rows, problem.D // 2, generator=generator, device="cuda") * 9
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
        self.angles = table[:, :1], table[:, 1:]
        place = self.group.q_start_R[:, None] + torch.arange(problem.q_lens[0], device="cuda")
        columns = (place // problem.block_size).clamp(max=self.group.block_table_RB.shape[1] - 1)
        slots = self.group.block_table_RB.gather(1, columns) * problem.block_size + place % problem.block_size
        real = place < self.group.kv_len_R[:, None]
        self.slots = torch.where(real, slots, 0).flatten()  # others go to the null block
        self.caches = [k, v]
        for cache in self.caches:
            cache.view(-1, problem.g, problem.D)[self.slots] = float("nan")

    def run(self, *, within: bool, normed: bool = True) -> tuple[Tensor, list[Tensor]]:
        """(attention, caches); within: turned by the attention."""
        problem, pdl = self.problem, dependent_launch()
        k, v = caches = [cache.clone() for cache in self.caches]
        out = torch.full((self.heads.shape[0], problem.h * problem.D), float("nan"), device="cuda").bfloat16()
        norm = self.norm if normed else None
        heads, unturned = self.heads, Unturned(angles=self.angles, slots_N=self.slots, norm=norm, eps=EPS)
        if not within:
            heads = rotate_and_write(
                self.heads.flatten(1),
                self.angles,
                self.slots,
                (k, v),
                num_heads=problem.h,
                head_norm=None if norm is None else (norm, EPS),
                pdl=pdl,
            )
        bulk_attention(
            heads,
            k,
            v,
            out,
            q_len=problem.q_lens[0],
            q_start_R=self.group.q_start_R,
            kv_len_R=self.group.kv_len_R,
            block_table_RB=self.group.block_table_RB,
            causal=problem.causal,
            cut=self.cut,
            workspace=Workspace.create(len(problem.q_lens) * problem.g, self.cut, problem.D, k.device),
            unturned=unturned if within else None,
            pdl=pdl,
        )
        return out, caches


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("problem", "normed", "cut"),
    [(problem, normed, cut) for cut in CUTS for normed in (True, False) for problem in PROBLEMS]
    + [(problem, True, LONE) for problem in EDGES],
    ids=str,
)
def test_equals_turning_ahead(problem: Problem, normed: bool, cut: BulkCut) -> None:
    if not copy_engine():
        pytest.skip("needs SM90")
    turning = Turning(problem, cut)
    want, want_caches = turning.run(within=False, normed=normed)
    got, caches = turning.run(within=True, normed=normed)
    assert not got.isnan().any()
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1.6e-2)
    for cache, wanted in zip(caches, want_caches, strict=True):
        # Sums of squares in another order: a last bit may differ. Block 0 is nobody's.
        torch.testing.assert_close(cache[1:], wanted[1:], rtol=1e-2, atol=1e-2, equal_nan=True)
    for _ in range(3):
        assert torch.equal(turning.run(within=True, normed=normed)[0], got)


@pytest.mark.gpu
@pytest.mark.parametrize("base", [0, 40, 1000])
def test_bits_do_not_depend_on_the_place_in_a_block(base: int) -> None:
    """One sequence's heads, as the last of a block or its first: the same key and attention."""
    if not copy_engine():
        pytest.skip("needs SM90")
    found: dict[int, Tensor] = {}
    keys: dict[int, Tensor] = {}
    whole = torch.randn(base + 48, 48, 128, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    angle = torch.arange(base + 48, device="cuda")[:, None] * torch.logspace(0, -4, 64, device="cuda")
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)
    first = Turning(replace(QWEN, starts=(base + 32,)), LONE)
    k_all, v_all = (cache.nan_to_num() for cache in first.caches)
    for start in range(base, base + 17):
        turning = Turning(replace(QWEN, starts=(start,), spare=base + 32 - start), LONE)
        turning.caches = [k_all.clone(), v_all.clone()]
        turning.heads = whole[start : start + 16]
        turning.angles = table[start : start + 16, :1], table[start : start + 16, 1:]
        if start > base:  # what earlier rows left
            for place in range(base, start):
                slot = _slot(turning, place)
                turning.caches[0].view(-1, 8, 128)[slot] = keys[place]
                turning.caches[1].view(-1, 8, 128)[slot] = whole[place, 40:]
        out, caches = turning.run(within=True)
        for i, row in enumerate(out):
            key = caches[0].view(-1, 8, 128)[_slot(turning, start + i)]
            assert torch.equal(keys.setdefault(start + i, key), key), start + i
            assert torch.equal(found.setdefault(start + i, row), row), start + i


def _slot(turning: Turning, place: int) -> int:
    size = turning.problem.block_size
    return int(turning.group.block_table_RB[0, place // size]) * size + place % size
