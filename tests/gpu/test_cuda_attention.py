"""The CUDA backend gives every row of a step the reference's attention, whichever kernel takes its group."""

from dataclasses import replace

import pytest
import torch

from engine.attention import flash
from engine.attention.context import AttentionContext
from engine.attention.cuda_choice import DecodeCut, decode_cut, ragged_cut
from engine.attention.cuda_paged import cuda_paged_attention
from engine.attention.reference import paged_attention
from tests.gpu.attention_cases import Problem
from tests.gpu.places import places

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


def _contexts(large: bool) -> list[list[Problem]]:
    """Groups of one step each; first_row leaves rows that belong to no group."""
    decode = Problem(q_lens=(4, 4), starts=(70, 9), short=(1, 0))
    chunk = Problem(q_lens=(20, 3), starts=(30, 0), first_row=9)
    if not large:
        return [[decode, chunk]]
    return [
        [replace(decode, starts=(1500, 40)), replace(chunk, q_lens=(700, 3), starts=(300, 0))],
        [Problem(q_lens=(16,), starts=(1500,), h=32, g=8, D=128)],
        [Problem(q_lens=(16,) * 2, starts=(1500, 90), short=(0, 6), h=32, g=8, D=128, causal=False)],
        [Problem(q_lens=(1,) * 40, starts=tuple(range(40)), h=32, g=8, D=128)],
        [Problem(q_lens=(16,) * 64, starts=tuple(range(100, 164)), h=32, g=8, D=128, causal=False)],
        [Problem(q_lens=(16,) * 64, starts=tuple(range(100, 164)), short=(3,) * 64, h=32, g=8, D=128)],
        [Problem(q_lens=(600,), starts=(0,), h=9, g=3)],
    ]


@pytest.mark.parametrize(("case", "device"), places(_contexts(True), _contexts(False)))
def test_equals_the_reference(case: list[Problem], device: str) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    widest = max(case, key=lambda p: p.num_blocks)
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16):
        for window in (None, 13):
            # One cache for all groups: the null block and places that no row may see hold NaN.
            _, k, v = widest.tensors(dtype, device)
            k, v = k.nan_to_num(0.5), v.nan_to_num(0.5)
            groups = tuple(replace(p.group(device), window=window) for p in case)
            rows = max(p.first_row + sum(p.q_lens) for p in case)
            q = torch.randn(rows, widest.h + 2, widest.D, generator=torch.Generator().manual_seed(3))
            q = q.to(dtype).to(device)[:, : widest.h]
            ctx = AttentionContext(slot_mapping_N=torch.zeros(rows, dtype=torch.int64, device=device), groups=groups)
            want = paged_attention(q, k, v, ctx)
            for _ in range(2):  # the second call takes what the groups cache
                got = cuda_paged_attention(q, k, v, ctx)
                torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_attention_is_captured_and_right(causal: bool, block_size: int) -> None:
    if flash.unavailable_reason() is not None:
        pytest.skip(str(flash.unavailable_reason()))
    for problem in (
        Problem(q_lens=(16, 16), starts=(100, 20), h=32, g=8, D=128, block_size=block_size, causal=causal),
        Problem(q_lens=(130, 7), starts=(100, 0), h=9, g=3, D=64, block_size=block_size, causal=causal),
    ):
        q, k, v = problem.tensors(torch.bfloat16, "cuda")
        k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
        group = problem.group("cuda")
        flash.flash_attention(q, k, v, group)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash.flash_attention(q, k, v, group)
        out.fill_(float("nan"))
        graph.replay()
        expected = problem.expected(q, k, v)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1.6e-2, atol=1.6e-2)


def check_filler(problem: Problem, device: str, dtype: torch.dtype) -> None:
    """Everything past the sequence's own keys is NaN but what its last block holds, as a cache keeps it."""
    q, k, v = problem.tensors(dtype, device)
    group = problem.group(device)
    last = group.block_table_RB[0, (problem.kv_lens[0] - 1) // problem.block_size]
    k[last], v[last] = k[last].nan_to_num(0.5), v[last].nan_to_num(0.5)
    num_real = problem.q_lens[0] - problem.short[0]
    out = flash.flash_attention(q, k, v, replace(group, has_filler=True))
    expected = problem.expected(q, k, v)[:num_real]
    torch.testing.assert_close(out[:num_real].cpu().double(), expected, rtol=1.6e-2, atol=1.6e-2)
    assert not out[num_real:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize(("start", "length", "short"), [(0, 384, 300), (100, 96, 1), (250, 512, 129)])
def test_a_prompt_program_reads_nothing_past_its_prompt(block_size: int, start: int, length: int, short: int) -> None:
    if flash.unavailable_reason() is not None:
        pytest.skip(str(flash.unavailable_reason()))
    shape = {"q_lens": (length,), "starts": (start,), "short": (short,), "block_size": block_size}
    check_filler(Problem(**shape, h=32, g=8, D=128), "cuda", torch.bfloat16)
    check_filler(Problem(**shape, h=9, g=3, D=64), "cuda", torch.bfloat16)


def hungry_flash_attn(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    causal: bool,
    num_splits: int,
) -> torch.Tensor:
    """As the library by its documentation: masks end at the last key, masked keys are read with weight 0, in whole
    pages; rows that no sequence has are left as they were allocated."""
    assert {t.dtype for t in (cu_seqlens_q, seqused_k, page_table)} == {torch.int32}
    assert num_splits == 1
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    out = torch.full_like(q, float("nan"))
    page = k_cache.shape[1]
    for r, (first, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        keys = int(seqused_k[r])
        pages = page_table[r, : -(-keys // page)].long()
        k, v = (c[pages].flatten(0, 1).repeat_interleave(q.shape[1] // c.shape[2], dim=1) for c in (k_cache, v_cache))
        position = keys - (end - first) + torch.arange(end - first)[:, None] if causal else torch.tensor([[keys - 1]])
        seen = torch.arange(k.shape[0]) <= position
        score = torch.einsum("qhd,shd->hqs", q[first:end], k) / q.shape[2] ** 0.5
        out[first:end] = torch.einsum("hqs,shd->qhd", score.masked_fill(~seen, float("-inf")).softmax(-1), v)
    return out


@pytest.mark.parametrize("short", [0, 1, 17, 39])
def test_filler_queries_of_one_sequence_are_left_out(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_function", lambda: hungry_flash_attn)
    check_filler(Problem(q_lens=(40,), starts=(21,), short=(short,)), "cpu", torch.float32)


def test_groups_of_several_sequences_read_no_key_past_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN that another request left behind a sequence's keys reaches none of its rows."""
    monkeypatch.setattr(flash, "_function", lambda: hungry_flash_attn)
    exact = Problem(q_lens=(33, 33), starts=(31, 15), spare=64)  # they end with a block
    for problem in (exact, replace(exact, q_lens=(40, 16), starts=(8, 0))):
        q, k, v = problem.tensors(torch.float32, "cpu")
        out = flash.flash_attention(q, k, v, problem.group("cpu"))
        torch.testing.assert_close(out.double(), problem.expected(q, k, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_sequences", "has_filler", "taken"), [(1, True, True), (2, False, True), (2, True, False)]
)
def test_filler_queries_of_several_sequences_are_not_given_to_it(
    num_sequences: int, has_filler: bool, taken: bool
) -> None:
    problem = Problem(q_lens=(40,) * num_sequences, starts=(21,) * num_sequences)
    q, k, _ = problem.tensors(torch.bfloat16, "cpu")
    assert flash.suits(q, replace(problem.group("cpu"), has_filler=has_filler), k.shape[1]) is taken


@pytest.mark.parametrize("max_kv_len", [64, 2048, 32768])
@pytest.mark.parametrize("sequences", [1, 8, 128])
@pytest.mark.parametrize("queries", [1, 8, 16])
def test_a_cut_depends_on_shapes_alone_and_covers_them(max_kv_len: int, sequences: int, queries: int) -> None:
    shape = {
        "sequences": sequences,
        "queries": queries,
        "group": 4,
        "kv_heads": 8,
        "head_dim": 128,
        "max_kv_len": max_kv_len,
    }
    cut = decode_cut(**shape, num_sms=132)
    assert cut == decode_cut(**shape, num_sms=132)
    assert isinstance(cut, DecodeCut) and 1 <= cut.num_splits <= -(-max_kv_len // cut.positions)
    assert cut.rows >= min(queries * 4, 128) and cut.rows & (cut.rows - 1) == 0


def test_one_request_is_split_and_many_are_not() -> None:
    one = decode_cut(sequences=1, queries=16, group=4, kv_heads=8, head_dim=128, max_kv_len=4096, num_sms=132)
    many = decode_cut(sequences=64, queries=16, group=4, kv_heads=8, head_dim=128, max_kv_len=4096, num_sms=132)
    assert one.num_splits > 8 and many.num_splits == 1
    far = decode_cut(sequences=1, queries=16, group=4, kv_heads=8, head_dim=128, max_kv_len=32768, num_sms=132)
    assert one.positions < far.positions and one.num_splits == far.num_splits == 16
    assert ragged_cut(rows=64, group=3, kv_heads=3, num_sms=132).rows < 128
