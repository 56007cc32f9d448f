"""Products fed by the tensor copy engine: equal to the layer's torch form, a row's bits follow from that row alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.gemm_choice import StreamCut, stream_cut

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.available import copy_engine, dependent_launch
from engine.kernels.row_gemm import Scaled
from engine.kernels.row_ops import scale_rows

EPS = 1e-5
CASES: list[dict[str, Any]] = [
    {"K": 4096, "N": 6144, "norm": True},
    {"K": 4096, "N": 6144, "norm": True, "bias": True},
    {"K": 4096, "N": 4096, "residual": True, "next": True},
    {"K": 4096, "N": 4096, "residual": True, "next": True, "bias": True},
    {"K": 4096, "N": 12288, "norm": True, "swiglu": True},
    {"K": 12288, "N": 4096, "residual": True, "next": True},
    {"K": 12288, "N": 4096, "residual": True},
    {"K": 4096, "N": 14336, "norm": True, "swiglu": True},
    {"K": 14336, "N": 4096, "residual": True, "next": True},
    {"K": 20480, "N": 4096},
    {"K": 20480, "N": 4096, "bias": True},
    # Cuts that no shape above has: fewer steps than stages, units that go on from one tile and share to the next.
    {"K": 512, "N": 256, "norm": True, "cut": StreamCut(num_splits=1, units=2)},
    {"K": 2048, "N": 192, "residual": True, "next": True, "cut": StreamCut(num_splits=2, units=3, staggered=True)},
    {"K": 1536, "N": 96, "swiglu": True, "norm": True, "cut": StreamCut(num_splits=3, units=1, num_stages=3)},
]


def _random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return (x * scale).bfloat16()


class Problem:
    """A product of up to 16 rows, whose residual and result lie in longer rows."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.K, self.N, self.swiglu = case["K"], case["N"], case.get("swiglu", False)
        cut = case.get("cut") or stream_cut(rows=16, K=self.K, N=self.N, swiglu=self.swiglu)
        assert cut is not None
        self.cut = cut
        rows = self.N * (2 if self.swiglu else 1)
        self.x = _random(16, self.K)
        self.weight = _random(rows, self.K, seed=1, scale=self.K**-0.5)
        self.bias = _random(rows, seed=2) if case.get("bias") else None
        self.norm = _random(self.K, seed=3) if case.get("norm") else None
        self.residual = _random(16, self.N + 8, seed=4)[:, : self.N] if case.get("residual") else None
        self.next_norm = _random(self.N, seed=5) if case.get("next") else None
        self.count = torch.zeros(rows, dtype=torch.int32, device="cuda")

    def run(self, x: Tensor | Scaled, spare: int = 8) -> tuple[Tensor, Scaled | None]:
        """Of rows whose norm is still to come, or is ready. spare: columns of the result's rows beside it."""
        from engine.kernels.stream_gemm import stream_gemm

        if isinstance(x, Tensor) and self.norm is not None:
            x = scale_rows(x, self.norm, EPS)
        rows = (x.x_MK if isinstance(x, Scaled) else x).shape[0]
        out = torch.empty(rows, self.N + spare, dtype=torch.bfloat16, device="cuda")[:, : self.N]
        if spare:
            out.fill_(float("nan"))
        made = stream_gemm(
            x,
            self.weight,
            out,
            cut=self.cut,
            count=self.count,
            bias=self.bias,
            swiglu=self.swiglu,
            residual_MN=None if self.residual is None else self.residual[:rows],
            next_norm=None if self.next_norm is None else (self.next_norm, EPS),
            pdl=dependent_launch(),
        )
        return out, made

    def expected(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """In float64, rounded to a type where the layer's torch form rounds."""

        def rounded(value: Tensor) -> Tensor:
            return value.to(dtype).double()

        y = x.double()
        if self.norm is not None:
            y = rounded(rounded(y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)) * self.norm.double())
        y = y @ self.weight.double().t()
        y = rounded(y if self.bias is None else y + self.bias.double())
        if self.swiglu:
            y = rounded(rounded(F.silu(y[:, : self.N])) * y[:, self.N :])
        return y if self.residual is None else rounded(y + self.residual[: x.shape[0]].double())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_torch_form(case: dict[str, Any]) -> None:
    if not copy_engine():
        pytest.skip("needs SM90")
    problem = Problem(case)
    exact = problem.expected(problem.x, torch.float64)
    error_of_torch = (problem.expected(problem.x, torch.bfloat16) - exact).norm() / exact.norm()
    first, made = problem.run(problem.x)
    assert (first.double() - exact).norm() / exact.norm() <= 1.5 * error_of_torch
    assert not problem.count.any()
    assert (made is None) == (problem.next_norm is None)
    if made is not None and problem.next_norm is not None:
        assert torch.equal(made.x_MK, (first.float() * problem.next_norm.float()).bfloat16())
        torch.testing.assert_close(made.squares_MP.sum(1), first.float().pow(2).sum(1))
    for _ in range(20):  # the counters are as the first call left them, and other timing gives the same bits
        assert torch.equal(problem.run(problem.x)[0], first)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rows_bits_follow_from_that_row(case: dict[str, Any]) -> None:
    if not copy_engine():
        pytest.skip("needs SM90")
    problem = Problem(case)
    whole, _ = problem.run(problem.x)
    for rows in (1, 2, 8, 15):
        assert torch.equal(problem.run(problem.x[:rows])[0], whole[:rows])
    others = problem.x.clone()
    others[[0, 3, 15]] = 100 * _random(3, problem.K, seed=9)
    kept = [m for m in range(16) if m not in (0, 3, 15)]
    assert torch.equal(problem.run(others)[0][kept], whole[kept])


@pytest.mark.gpu
def test_captured_products_follow_each_other() -> None:
    """A chain in a graph, where each asks for its weights before the one before it has ended."""
    if not copy_engine():
        pytest.skip("needs SM90")
    first = Problem({"K": 4096, "N": 12288, "norm": True, "swiglu": True})
    second = Problem({"K": 12288, "N": 4096, "residual": True, "next": True})
    assert first.norm is not None
    x, norm = first.x.clone(), first.norm

    def chain() -> Tensor:
        scaled: Scaled | None = scale_rows(x, norm, EPS)
        for _ in range(4):
            assert scaled is not None
            result, scaled = second.run(first.run(scaled, spare=0)[0], spare=0)
        return result

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for seed in range(5):
        x.copy_(_random(16, 4096, seed=seed))
        graph.replay()
        assert torch.equal(result, chain())


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize(("K", "N"), [(20480, 4096), (20480, 512), (2048, 49152), (4096, 32000)])
@torch.inference_mode()
def test_a_linear_layer_takes_the_products_cut(K: int, N: int, out_dtype: torch.dtype | None, bias: bool) -> None:
    """The very bits of the kernel, for rows of any shape, and of torch's form all but its rounding."""
    from engine.kernels.stream_gemm import stream_gemm
    from engine.layers.linear import Linear

    if not copy_engine():
        pytest.skip("needs SM90")
    layer = Linear(K, N, bias=bias, dtype=torch.bfloat16, device="cuda", out_dtype=out_dtype)
    layer.weight.copy_(_random(N, K, seed=1, scale=K**-0.5))
    if layer.bias is not None:
        layer.bias.copy_(_random(N, seed=2))
    x = _random(16, K + 8)[:, :K]  # rows that lie further apart than they are long
    cut = stream_cut(rows=16, K=K, N=N)
    assert cut is not None
    want = torch.empty(16, N, dtype=out_dtype or torch.bfloat16, device="cuda")
    stream_gemm(x, layer.weight, want, cut=cut, count=layer.split_count, bias=layer.bias, pdl=dependent_launch())
    assert torch.equal(layer.forward(x), want)
    assert torch.equal(layer.forward(x[:5]), want[:5])
    assert torch.equal(layer.forward(x.reshape(4, 4, K)), want.view(4, 4, N))
    exact = x.double() @ layer.weight.double().t() + (0.0 if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(want.double(), exact, rtol=1e-3 if out_dtype else 1e-2, atol=1e-3 if out_dtype else 1e-2)
    assert not layer.split_count.any()
