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
    assert ragged_cut(rows=64, group=3, kv_heads=3, num_sms=132).rows < 128
