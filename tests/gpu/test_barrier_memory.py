"""Where the compiler puts what warps are told when they part: over no barrier, which no other store may touch.

A barrier that nothing uses any more gives its place away while it still is one.
"""

import re

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from triton.runtime.jit import JITFunction

from engine.attention.cuda_choice import BulkCut
from engine.kernels.available import copy_engine
from engine.kernels.gemm_choice import stream_cut
from engine.kernels.merge_splits import Workspace
from tests.gpu.attention_cases import Problem

BARRIER_BYTES = 8


def overwritten(ptx: str) -> tuple[set[int], set[int]]:
    """(offsets of all barriers in shared memory, those that a store at a fixed place reaches) of a kernel."""
    offset = {to: int(at) for to, at in re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx)}
    named = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)
    assert named and all(name in offset for name in named)
    barriers = {offset[name] for name in named}
    hit = set()
    for width, bits, at in re.findall(r"st\.shared(\.v\d)?\.b(\d+)\s+\[global_smem(?:\+(\d+))?\]", ptx):
        first = int(at or 0)
        end = first + int(width[2:] or 1) * int(bits) // 8
        hit |= {barrier for barrier in barriers if first < barrier + BARRIER_BYTES and barrier < end}
    return barriers, hit


def test_a_store_over_a_barrier_is_found() -> None:
    ptx = """
        add.s32 %r3, %r1, 128;
        @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
        add.s32 %r4, %r1, 144;
        @%p1 mbarrier.init.shared::cta.b64 [%r4], 1;
        st.shared.v4.b32 [global_smem+112], {%r5, %r6, %r7, %r8};
        st.shared.b32 [global_smem+148], %r9;
    """
    assert overwritten(ptx) == ({128, 144}, {144})
    assert overwritten(ptx.replace("+112", "+124")) == ({128, 144}, {128, 144})


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """PTX of the kernels that are launched, by name."""
    if not copy_engine():
        pytest.skip("needs SM90")
    found: dict[str, str] = {}
    run = JITFunction.run

    def noted(self, *args, **kwargs):
        kernel = run(self, *args, **kwargs)
        found[self.fn.__name__] = kernel.asm["ptx"]
        return kernel

    monkeypatch.setattr(JITFunction, "run", noted)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cut",
    [
        BulkCut(num_splits=16),
        BulkCut(num_splits=16, positions=128, num_stages=2),
        BulkCut(num_splits=1, num_stages=3),
        BulkCut(num_splits=1, groups=2),
    ],
    ids=str,
)
def test_attention(compiled: dict[str, str], cut: BulkCut) -> None:
    from engine.kernels.bulk_attention import bulk_attention

    problem = Problem(q_lens=(16,), starts=(100,), h=32, g=8, D=128)
    q, k, v = problem.tensors(torch.bfloat16, "cuda")
    group, out = problem.group("cuda"), torch.empty(q.shape[0], problem.h * problem.D, dtype=q.dtype, device="cuda")
    bulk_attention(
        q,
        k,
        v,
        out,
        q_len=16,
        q_start_R=group.q_start_R,
        kv_len_R=group.kv_len_R,
        block_table_RB=group.block_table_RB,
        causal=True,
        cut=cut,
        workspace=Workspace.create(problem.g, cut, problem.D, q.device) if cut.num_splits > 1 else None,
    )
    barriers, hit = overwritten(compiled["_bulk_kernel"])
    assert len(barriers) == 3 * cut.num_stages + (2 if cut.groups > 1 else 0)
    assert not hit


@pytest.mark.gpu
def test_products(compiled: dict[str, str]) -> None:
    from engine.kernels.stream_gemm import stream_gemm

    K, N = 4096, 6144
    cut = stream_cut(rows=16, K=K, N=N)
    assert cut is not None
    x, weight = (torch.zeros(rows, K, dtype=torch.bfloat16, device="cuda") for rows in (16, N))
    stream_gemm(x, weight, x.new_empty(16, N), cut=cut)
    barriers, hit = overwritten(compiled["_stream_kernel"])
    assert len(barriers) == 3 * cut.num_stages
    assert not hit
