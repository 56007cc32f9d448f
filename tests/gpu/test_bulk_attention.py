"""Attention fed by the tensor copy engine: equal to float64, and a query's bits follow from its position alone."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from engine.attention.cuda_choice import BulkCut, bulk_cut
from tests.gpu.attention_cases import Problem
from tests.gpu.places import places

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.attention_scan import PLAIN, AttentionOptions, padded_head
from engine.kernels.available import copy_engine, dependent_launch
from engine.kernels.merge_splits import Workspace, merge_splits

QWEN = Problem(q_lens=(16,), starts=(1000,), h=32, g=8, D=128)
PROBLEMS = [
    replace(QWEN, starts=(start,)) for start in (0, 3, 15, 16, 100, 239, 240, 241, 250, 1009, 1024, 4096, 16384, 32000)
] + [
    replace(QWEN, short=(5,)),
    replace(QWEN, starts=(5,), short=(13,)),
    replace(QWEN, starts=(777,), causal=False),
    replace(QWEN, starts=(0,), causal=False),
    replace(QWEN, starts=(1013,), causal=False, short=(3,), spare=500),
    replace(QWEN, q_lens=(16,) * 4, starts=(40, 0, 3000, 511), spare=100),
    replace(QWEN, q_lens=(8,) * 2, starts=(400, 170), short=(0, 4), block_size=128),
    replace(QWEN, q_lens=(1,), starts=(2047,)),
    replace(QWEN, q_lens=(4,), starts=(65,), block_size=32),
    replace(QWEN, q_lens=(9,), h=28, g=4),
    replace(QWEN, q_lens=(8,), h=8, g=1),
    replace(QWEN, q_lens=(32,), h=16, g=8),
    replace(QWEN, q_lens=(20,), h=4, g=4),
]
# Lengths around the end of a unit, of a tile of every split, and of a tile of one split.
EDGES = [
    replace(QWEN, q_lens=(queries,), starts=(length - queries,))
    for queries in (1, 8, 16)
    for length in (1, 15, 16, 17, 1023, 1024, 1025, 1040, 1041, 2047, 2048, 2049, 2064, 2065, 4096)
    if length >= queries
]
LONE = BulkCut(num_splits=16)
CUTS = [
    LONE,
    BulkCut(num_splits=16, positions=128, num_stages=2),
    BulkCut(num_splits=1, positions=64, num_stages=3),
    BulkCut(num_splits=1, num_stages=4, groups=2),
    BulkCut(num_splits=2, num_stages=4, groups=2),
    BulkCut(num_splits=5, positions=32, num_stages=4),
]


def _attend(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cut: BulkCut, start: int | None = None
) -> torch.Tensor:
    """start: another place of the block of queries than the problem's, over its cache."""
    from engine.kernels.bulk_attention import bulk_attention

    group = problem.group("cuda")
    out = torch.full((q.shape[0], problem.h * problem.D), float("nan"), dtype=q.dtype, device="cuda")
    length = problem.q_lens[0]
    bulk_attention(
        q,
        k,
        v,
        out,
        q_len=length,
        q_start_R=group.q_start_R if start is None else torch.tensor([start], device="cuda"),
        kv_len_R=group.kv_len_R if start is None else torch.tensor([start + length], device="cuda"),
        block_table_RB=group.block_table_RB,
        causal=problem.causal,
        cut=cut,
        workspace=Workspace.create(len(problem.q_lens) * problem.g, cut, problem.D, q.device)
        if cut.num_splits > 1
        else None,
        pdl=dependent_launch(),
    )
    return out


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("problem", "cut"),
    [(problem, cut) for i, cut in enumerate(CUTS) for problem in PROBLEMS[:: 1 if i < 4 else 3]]
    + [(problem, LONE) for problem in EDGES]
    + [(problem, cut) for cut in CUTS[1:] for problem in EDGES[::5]],
    ids=str,
)
def test_equals_attention_in_float64(problem: Problem, cut: BulkCut) -> None:
    if not copy_engine():
        pytest.skip("needs SM90")
    q, k, v = problem.tensors(torch.bfloat16, "cuda")
    first = _attend(problem, q, k, v, cut)
    torch.testing.assert_close(first.cpu().double(), problem.expected(q, k, v), rtol=1.6e-2, atol=1.6e-2)
    for _ in range(3):
        assert torch.equal(_attend(problem, q, k, v, cut), first)


@pytest.mark.gpu
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("base", [0, 40, 240, 1000, 4080])
def test_a_querys_bits_do_not_depend_on_its_place_in_a_block(base: int, cut: BulkCut) -> None:
    if not copy_engine():
        pytest.skip("needs SM90")
    whole = replace(QWEN, starts=(base + 24,))
    _, k, v = whole.tensors(torch.bfloat16, "cuda")
    q = torch.randn(base + 40, QWEN.h, QWEN.D, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    found: dict[int, torch.Tensor] = {}
    for start in range(base, base + 25):
        for place, row in enumerate(_attend(whole, q[start : start + 16], k, v, cut, start)):
            assert torch.equal(found.setdefault(start + place, row), row), start + place


@pytest.mark.parametrize("seen", [1, 16, 17, 100, 290])
@pytest.mark.parametrize("num_splits", [1, 5, 16])
def test_parts_dealt_page_by_page_merge_to_the_whole(seen: int, num_splits: int) -> None:
    """Parts of every split that a query sees, made as the kernel deals units of 16 positions; others hold NaN."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs in processes without a GPU")
    h, g, D, cut = 2, 1, 16, BulkCut(num_splits=num_splits)
    generator = torch.Generator().manual_seed(seen)
    score = torch.randn(h, seen, generator=generator, dtype=torch.float64) * 3  # base 2
    value = torch.randn(seen, D, generator=generator, dtype=torch.float64)
    workspace = Workspace.create(g, cut, D, torch.device("cpu"))
    workspace.part.fill_(float("nan"))
    workspace.stat.fill_(float("nan"))
    part = workspace.part.view(num_splits, cut.rows, D)
    stat = workspace.stat.view(num_splits, 2, cut.rows)
    for split in range(min(num_splits, math.ceil(seen / 16))):
        mine = torch.arange(seen) // 16 % num_splits == split
        best = score[:, mine].amax(1)
        weight = torch.exp2(score[:, mine] - best[:, None])
        stat[split, 0, :h], stat[split, 1, :h] = best.float(), weight.sum(1).float()
        part[split, :h] = (weight @ value[mine]).float()
    out = torch.empty(1, h * D)
    merge_splits(
        workspace,
        out,
        q_len=1,
        q_start_R=torch.tensor([seen - 1]),
        kv_len_R=torch.tensor([seen]),
        kv_heads=g,
        head_dim=D,
        causal=True,
        cut=cut,
    )
    want = torch.softmax(score * math.log(2), dim=1) @ value
    torch.testing.assert_close(out.view(h, D).double(), want, rtol=1e-5, atol=1e-5)


MERGES = [
    (h, g, D, queries, num_splits)
    for num_splits in (2, 4, 8)
    for h, g, D, queries in ((32, 8, 128, 16), (9, 3, 64, 8), (4, 4, 80, 2))
]


@pytest.mark.parametrize(("shape", "device"), places(MERGES, MERGES[1:3] + MERGES[-2:]))
def test_heads_that_are_merged_together(
    shape: tuple[int, int, int, int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several heads of a program, their number and the splits' no divisors of each other, with a sink or without."""
    h, g, D, queries, num_splits = shape
    monkeypatch.setattr("engine.kernels.merge_splits.merge_heads", lambda **_: 4)
    cut, G, DP, starts = BulkCut(num_splits=num_splits), h // g, padded_head(D), (3, 70)
    workspace = Workspace.create(len(starts) * g, cut, D, torch.device(device))
    workspace.part.normal_()
    workspace.stat.uniform_(0.5, 4.0)
    part = workspace.part.view(len(starts), g, num_splits, cut.rows, DP).double()
    stat = workspace.stat.view(len(starts), g, num_splits, 2, cut.rows).double()
    sink_h = torch.linspace(-1, 2, h, device=device)
    for options in (PLAIN, AttentionOptions(sink_h=sink_h)):
        out = torch.full((len(starts) * queries, h * D), float("nan"), device=device)
        merge_splits(
            workspace,
            out,
            q_len=queries,
            q_start_R=torch.tensor(starts, device=device),
            kv_len_R=torch.tensor(starts, device=device) + queries,
            kv_heads=g,
            head_dim=D,
            causal=True,
            cut=cut,
            options=options,
        )
        for row, head in itertools.product(range(len(out)), range(h)):
            sequence, query = divmod(row, queries)
            used = min(num_splits, math.ceil((starts[sequence] + query + 1) / 16))
            cell = query * G + head % G
            best, total = stat[sequence, head // G, :used, :, cell].T
            weight = torch.exp2(best)
            whole = (weight * total).sum() + (0 if options.sink_h is None else sink_h[head].double().exp())
            want = weight @ part[sequence, head // G, :used, cell, :D] / whole
            torch.testing.assert_close(out[row, head * D : head * D + D].double(), want, rtol=1e-4, atol=1e-5)


def test_the_copy_engine_is_taken_for_few_large_heads_alone() -> None:
    shape = {"sequences": 1, "queries": 16, "group": 4, "kv_heads": 8, "head_dim": 128, "block_size": 16}
    for same in (
        {},
        {"queries": 1},
        {"queries": 8},
        {"sequences": 8},
        {"block_size": 128},
        {"group": 1, "queries": 32},
    ):
        cut = bulk_cut(**(shape | same), num_sms=132)
        assert cut is not None and 2 <= cut.num_splits <= 132 // 8, same
    for other in (
        {"queries": 17},
        {"group": 5},
        {"head_dim": 64},
        {"head_dim": 256},
        {"block_size": 24},
        {"sequences": 2, "queries": 8},
        {"sequences": 16, "queries": 4},
    ):
        assert bulk_cut(**(shape | other), num_sms=132) is None, other
    for sequences, groups in ((9, 2), (16, 2), (17, 1), (128, 1)):
        for queries in (8, 16):
            cut = bulk_cut(**(shape | {"sequences": sequences, "queries": queries}), num_sms=132)
            assert cut is not None and cut.num_splits == 1 and cut.groups == groups, sequences
