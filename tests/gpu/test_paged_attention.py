"""The Triton attention kernels equal softmax attention in float64, however the work is split."""

from dataclasses import replace

import pytest
import torch

from engine.attention.cuda_choice import DecodeCut, RaggedCut
from tests.gpu.attention_cases import Problem
from tests.gpu.places import dtypes, places

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.attention_scan import PLAIN, AttentionOptions
from engine.kernels.decode_attention import decode_attention
from engine.kernels.merge_splits import Workspace, row_tiles
from engine.kernels.ragged_attention import ragged_attention, ragged_tiles, uniform_tiles

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SPLITS = (1, 3, 8, 11)

FILLER = Problem(q_lens=(4, 4, 4), starts=(75, 0, 40), short=(0, 3, 2))
BLOCK = Problem(q_lens=(16,), starts=(30,), causal=False, spare=64)
TOYS = [
    (Problem(q_lens=(1, 1), starts=(3, 40), h=9, g=3, spare=20), 1),
    (FILLER, 3),
    (BLOCK, 11),
    (Problem(q_lens=(2,), starts=(30,), h=4, g=1, D=80, block_size=32), 2),
]
CASES = [
    (problem, splits)
    for splits in SPLITS
    for problem in (
        Problem(q_lens=(1,), starts=(0,)),
        Problem(q_lens=(1, 1), starts=(3, 900), h=9, g=3, spare=200),
        replace(FILLER, starts=(500, 0, 61)),
        replace(BLOCK, q_lens=(16, 16), starts=(30, 1300)),
        Problem(q_lens=(16,) * 8, starts=tuple(range(0, 2000, 250)), h=32, g=8, D=128),
        Problem(q_lens=(16,), starts=(1000,), h=12, g=2, block_size=128),
        Problem(q_lens=(2, 2), starts=(400, 170), h=4, g=4, D=80, block_size=32),
        Problem(q_lens=(2, 2), starts=(400, 17), h=4, g=1, D=96, block_size=48),
    )
]


def _check(
    problem: Problem, dtype: torch.dtype, device: str, cut: DecodeCut, options: AttentionOptions = PLAIN
) -> None:
    q, k, v = problem.tensors(dtype, device)
    group = problem.group(device)
    out = torch.empty(q.shape[0], problem.h * problem.D, dtype=dtype, device=device)
    units = len(problem.q_lens) * problem.g * row_tiles(problem.q_lens[0], problem.h // problem.g, cut.rows)
    workspace = Workspace.create(units, cut, problem.D, q.device) if cut.num_splits > 1 else None
    expected = problem.expected(q, k, v, window=options.window, soft_cap=options.soft_cap, sink_h=options.sink_h)
    for _ in range(2):  # the second call finds the first one's workspace
        out.fill_(float("nan"))
        decode_attention(
            q,
            k,
            v,
            out,
            q_len=problem.q_lens[0],
            q_start_R=group.q_start_R,
            kv_len_R=group.kv_len_R,
            block_table_RB=group.block_table_RB,
            causal=problem.causal,
            cut=cut,
            workspace=workspace,
            options=options,
        )
        torch.testing.assert_close(out.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("case", "device"), places(CASES, TOYS))
def test_decode(case: tuple[Problem, int], device: str) -> None:
    problem, num_splits = case
    for dtype in dtypes(device):
        cut = DecodeCut(rows=16, positions=16 if device == "cpu" else 64, num_splits=num_splits)
        _check(problem, dtype, device, cut)


@pytest.mark.parametrize(("case", "device"), places([(2, 64), (4, 64), (7, 64)], [(2, 16)]))
def test_a_querys_bits_do_not_depend_on_its_place_in_a_block(case: tuple[int, int], device: str) -> None:
    """What lossless output in bfloat16 rests on: with good drafts a position is read late in a block, with bad ones
    first. The positions cross the lengths at which the work is split anew."""
    num_splits, tile = case
    queries, length, group = 9, tile * (num_splits + 1) + tile // 2, 3
    problem = Problem(q_lens=(length,), starts=(0,), h=6, g=2)
    for dtype in dtypes(device):
        q, k, v = problem.tensors(dtype, device)
        table = problem.group(device).block_table_RB
        cut = DecodeCut(rows=32, positions=tile, num_splits=num_splits)
        workspace = Workspace.create(problem.g, cut, problem.D, q.device)
        found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for start in range(tile * num_splits - queries - 2, length - queries + 1):
            out = torch.empty(queries, problem.h * problem.D, dtype=dtype, device=device)
            workspace.stat.zero_()
            decode_attention(
                q[start : start + queries],
                k,
                v,
                out,
                q_len=queries,
                q_start_R=torch.tensor([start], device=device),
                kv_len_R=torch.tensor([start + queries], device=device),
                block_table_RB=table,
                causal=True,
                cut=cut,
                workspace=workspace,
            )
            sums = workspace.stat.view(problem.g, num_splits, 2, cut.rows)[:, :, 1].clone()
            for place, row in enumerate(out):
                found.setdefault(start + place, []).append((row, sums[:, :, place * group : (place + 1) * group]))
        for position, seen in found.items():
            for row, sums in seen:
                # The same splits did the same part. The interpreter's products depend on the row in the tile.
                torch.testing.assert_close(sums, seen[0][1], msg=f"position {position}")
                assert device == "cpu" or torch.equal(row, seen[0][0]), f"position {position}"


OTHER_SHAPES = [
    (problem, DecodeCut(rows=rows, positions=positions, num_splits=4, min_tiles=min_tiles, num_warps=warps))
    for problem, _ in CASES[2:6]
    for rows, positions, min_tiles, warps in ((16, 32, 2, 4), (32, 128, 1, 4), (64, 64, 3, 8), (128, 64, 1, 8))
]


@pytest.mark.parametrize(
    ("case", "device"),
    places(OTHER_SHAPES, [(FILLER, DecodeCut(rows=32, positions=32, num_splits=2, min_tiles=2))]),
)
def test_decode_in_other_tiles(case: tuple[Problem, DecodeCut], device: str) -> None:
    problem, cut = case
    _check(problem, dtypes(device)[1], device, cut)


WITH_OPTIONS = [(splits, kind) for splits in SPLITS for kind in ("window", "soft_cap", "sink", "all")]


@pytest.mark.parametrize(("case", "device"), places(WITH_OPTIONS, [(1, "all"), (4, "all"), (9, "all")]))
def test_decode_options(case: tuple[int, str], device: str) -> None:
    num_splits, kind = case
    problem = Problem(q_lens=(4, 4), starts=(70, 9), short=(1, 0), h=4, g=2)
    options = AttentionOptions(
        window=20 if kind in ("window", "all") else None,
        soft_cap=2.0 if kind in ("soft_cap", "all") else None,
        sink_h=torch.tensor([0.5, -1.0, 3.0, 0.0], device=device) if kind in ("sink", "all") else None,
    )
    cut = DecodeCut(rows=16, positions=16, num_splits=num_splits)
    _check(problem, torch.float32, device, cut, options)


RAGGED_TOYS = [
    Problem(q_lens=(5, 1, 20), starts=(0, 30, 7)),
    Problem(q_lens=(13, 2), starts=(0, 3), h=9, g=3, D=80, causal=False),
]
RAGGED = [
    *RAGGED_TOYS,
    Problem(q_lens=(500, 1, 77), starts=(0, 30, 170)),
    Problem(q_lens=(33, 9), starts=(0, 3), h=9, g=3, causal=False),
    Problem(q_lens=(200,), starts=(500,), h=32, g=8, D=128, block_size=128),
    Problem(q_lens=(20, 2), starts=(5, 0), h=7, g=1, D=96, block_size=32),
]


@pytest.mark.parametrize(("case", "device"), places(RAGGED, RAGGED_TOYS))
def test_ragged(case: Problem, device: str) -> None:
    problem = case
    sink_h = torch.linspace(-1, 2, problem.h, device=device)
    for options in (PLAIN, AttentionOptions(window=11, soft_cap=3.0, sink_h=sink_h)):
        for dtype in dtypes(device):
            q, k, v = problem.tensors(dtype, device)
            group = problem.group(device)
            out = torch.full((q.shape[0], problem.h * problem.D), float("nan"), dtype=dtype, device=device)
            tiles = ragged_tiles(problem.q_lens, group=problem.h // problem.g, rows=64)
            ragged_attention(
                q,
                k,
                v,
                out,
                tiles_T4=torch.tensor(tiles, device=device),
                q_start_R=group.q_start_R,
                kv_len_R=group.kv_len_R,
                block_table_RB=group.block_table_RB,
                causal=problem.causal,
                cut=RaggedCut(rows=64, positions=32),
                options=options,
            )
            expected = problem.expected(
                q, k, v, window=options.window, soft_cap=options.soft_cap, sink_h=options.sink_h
            )
            torch.testing.assert_close(out.cpu().double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("q_lens", [(5,), (64,), (33, 33, 33), (200, 200)])
def test_uniform_tiles_are_the_ragged_ones(q_lens: tuple[int, ...]) -> None:
    for group, rows in ((1, 64), (4, 64), (3, 128)):
        tiles_T4 = uniform_tiles(q_lens, group=group, rows=rows, device=torch.device("cpu"))
        assert tiles_T4.tolist() == ragged_tiles(q_lens, group=group, rows=rows)
