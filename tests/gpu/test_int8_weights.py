"""Products by weights of 8 bits: equal to torch's of the same numbers, with everything that is fused around them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.gemm_choice import GemmCut, StreamCut
from engine.kernels.int8_choice import MAX_ROWS, int8_cut, int8_stream_cut, keeps_int8, streams_int8
from engine.layers.int8_weight import Int8Weight, in_stream_order, round_weight
from tests.gpu.places import dtypes, places

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.available import copy_engine, dependent_launch
from engine.kernels.row_gemm import Scaled, row_gemm
from engine.kernels.row_ops import scale_rows

EPS = 1e-5
TOYS = [
    {"M": 3, "K": 40, "N": 24, "norm": True, "bias": True},
    {"M": 17, "K": 72, "N": 24, "norm": True, "swiglu": True},
    {"M": 2, "K": 100, "N": 40, "residual": True, "splits": 3, "bias": True, "next": True},
    {"M": 5, "K": 128, "N": 70, "residual": True, "splits": 2, "next": True, "turned": True},
    {"M": 4, "K": 64, "N": 50, "float32": True},
]
STREAMED = [
    # Fewer steps than stages; units that go on from one tile and share to the next, and a program with fewer of them.
    {"M": 5, "K": 512, "N": 256, "norm": True, "cut": StreamCut(num_splits=1, units=2, inputs=128, num_stages=8)},
    {"M": 16, "K": 2048, "N": 320, "residual": True, "next": True, "cut": StreamCut(num_splits=2, units=3, inputs=256)},
    {"M": 20, "K": 2048, "N": 128, "norm": True, "cut": StreamCut(num_splits=2, units=1, rows=32, inputs=128)},
    {"M": 3, "K": 1536, "N": 96, "swiglu": True, "cut": StreamCut(num_splits=3, units=2, inputs=128, staggered=True)},
]
CASES = [  # by the cuts that are chosen
    *TOYS,
    *STREAMED,
    *[
        {"M": M, **shape}
        for M in (1, MAX_ROWS)
        for shape in (
            {"K": 4096, "N": 6144, "norm": True},
            {"K": 4096, "N": 6144, "norm": True, "bias": True},
            {"K": 4096, "N": 4096, "residual": True, "next": True},
            {"K": 4096, "N": 12288, "norm": True, "swiglu": True},
            {"K": 12288, "N": 4096, "residual": True, "next": True},
            {"K": 20480, "N": 4096},
            {"K": 4096, "N": 10240},
            {"K": 4096, "N": 20032, "float32": True},
            {"K": 4096, "N": 20008, "float32": True},
            {"K": 4112, "N": 4096, "residual": True, "next": True},
            {"K": 576, "N": 49152, "float32": True},
        )
    ],
]


def _random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device) * scale
    return x.to(dtype)


def _cut(case: dict[str, Any], device: str) -> GemmCut | StreamCut:
    if "cut" in case:
        return case["cut"]
    if case in TOYS:
        tile = 16 if device == "cpu" else 64 if case.get("turned") else 32
        return GemmCut(
            outputs=tile,
            inputs=32 if device == "cpu" else 64,
            num_splits=case.get("splits", 1),
            turned=case.get("turned", False),
            staggered=case.get("turned", False),
        )
    rows = case["N"] * (2 if case.get("swiglu") else 1)
    if copy_engine() and streams_int8(rows, case["K"]):
        streamed = int8_stream_cut(rows=case["M"], K=case["K"], N=rows)
        assert streamed is not None
        return streamed
    cut = int8_cut(rows=case["M"], K=case["K"], N=rows, swiglu=case.get("swiglu", False))
    assert cut is not None
    return cut


def _product(cut: GemmCut | StreamCut, x: Any, weight: Int8Weight, out: Tensor, **fused: Any) -> Any:
    if isinstance(cut, GemmCut):
        return row_gemm(x, weight.rounded, out, cut=cut, scale=weight.scale, **fused)
    from engine.kernels.stream_gemm import stream_gemm

    weight = weight.streamed()
    return stream_gemm(x, weight.rounded, out, cut=cut, scale=weight.scale, **fused)


@pytest.mark.parametrize(("case", "device"), places(CASES, TOYS))
def test_products(case: dict[str, Any], device: str) -> None:
    if isinstance(case.get("cut"), StreamCut) and not copy_engine():
        pytest.skip("written for SM90")
    M, K, N = case["M"], case["K"], case["N"]
    swiglu = case.get("swiglu", False)
    dtype = dtypes(device)[-1]
    cut = _cut(case, device)
    x = _random(M, K + 8, dtype=dtype, device=device)[:, :K]
    weight = round_weight(_random((2 if swiglu else 1) * N, K, dtype=dtype, device=device, seed=1, scale=K**-0.5))
    bias = _random(N, dtype=dtype, device=device, seed=2) if case.get("bias") else None
    norm = _random(K, dtype=dtype, device=device, seed=3) if case.get("norm") else None
    next_norm = _random(N, dtype=dtype, device=device, seed=5) if case.get("next") else None
    residual = _random(M, N + 8, dtype=dtype, device=device, seed=4)[:, :N] if case.get("residual") else None
    ready = x if norm is None else scale_rows(x, norm, EPS)
    # What the kernel is given: rows whose norm's weight is rounded in.
    rows = x.double()
    if isinstance(ready, Scaled):
        rows = ready.x_MK.double() * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + EPS)
    want = rows @ (weight.rounded.double() * weight.scale.double()[:, None]).t()
    want = want if bias is None else want + bias.double()
    if swiglu:
        want = F.silu(want[:, :N]) * want[:, N:]
    want = want if residual is None else want + residual.double()
    count = torch.zeros(weight.scale.numel(), dtype=torch.int32, device=device)
    results = []
    for _ in range(2):  # the second finds the counters as the first left them
        out = torch.full((M, N + 8), float("nan"), dtype=dtype, device=device)[:, :N]
        out = torch.empty(M, N, dtype=torch.float32, device=device) if case.get("float32") else out
        made = _product(
            cut,
            ready,
            weight,
            out,
            count=count,
            bias=bias,
            swiglu=swiglu,
            residual_MN=residual,
            next_norm=None if next_norm is None else (next_norm, EPS),
            pdl=device == "cuda" and dependent_launch(),
        )
        near = 1e-4 if case.get("float32") else torch.finfo(dtype).eps * (2 if swiglu else 1)
        assert (out.double() - want).norm() <= near * want.norm()
        torch.testing.assert_close(out.double(), want, rtol=4 * near, atol=4 * near)
        assert (made is None) == (next_norm is None)
        if made is not None and next_norm is not None:
            assert torch.equal(made.x_MK, (out.float() * next_norm.float()).to(dtype))
            torch.testing.assert_close(made.squares_MP.sum(1), out.float().pow(2).sum(1), rtol=1e-4, atol=1e-4)
        results.append(out)
    assert torch.equal(*results)
    assert not count.any()


@pytest.mark.gpu
def test_the_gpu_rounds_as_the_cpu_does() -> None:
    weight = _random(3000, 6016, dtype=torch.bfloat16, device="cpu", scale=0.02)  # more than one piece
    weight[7] = 0
    weight[8] = 1e-38
    there, here = round_weight(weight.cuda()), round_weight(weight)
    assert torch.equal(there.scale.cpu(), here.scale)
    assert torch.equal(there.rounded.cpu(), here.rounded)


def _linear(K: int, N: int, **options: Any) -> Any:
    from engine.layers.linear import Linear

    layer = Linear(K, N, dtype=torch.bfloat16, device="cuda", **options)
    layer.weight.data.copy_(_random(N, K, dtype=torch.bfloat16, device="cuda", scale=K**-0.5))
    return layer


@pytest.mark.gpu
@torch.inference_mode()
def test_few_rows_of_a_linear_layer_read_8_bits_and_more_rows_do_not() -> None:
    for K, options in ((4096, {}), (4096, {"out_dtype": torch.float32}), (4112, {})):
        layer = _linear(K, 2048, **options)
        assert not layer.prepare(int8=True)
        assert isinstance(layer.int8_weight, Int8Weight)
        streams = layer.int8_weight.streams
        assert streams == (K == 4096 and copy_engine())
        x = _random(MAX_ROWS + 1, K, dtype=torch.bfloat16, device="cuda", seed=3)
        exact = x.double() @ layer.weight.double().t()
        scale = layer.int8_weight.scale.double()[:, None]
        plain = round_weight(layer.weight).rounded
        assert torch.equal(layer.int8_weight.rounded, plain) == (not streams)
        rounded = x.double() @ (plain.double() * scale).t()
        apart = (rounded - exact).norm()
        few, many = layer.forward(x[:-1]).double(), layer.forward(x).double()
        assert (few - rounded[:-1]).norm() < 0.5 * apart
        assert (many - exact).norm() < 0.5 * apart
    small = _linear(512, 512)
    small.prepare(int8=True)
    assert small.int8_weight is None
    plain = _linear(4096, 2048)
    plain.prepare(int8=False)
    assert plain.int8_weight is None


@pytest.mark.parametrize("rows", [1, 7, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize(
    ("K", "N", "swiglu", "streams"),
    [(4096, 6144, False, True), (4096, 24576, True, True), (576, 49152, False, False), (4112, 4096, False, False)],
)
def test_what_is_taken(rows: int, K: int, N: int, swiglu: bool, streams: bool) -> None:
    assert keeps_int8(N, K)
    assert streams_int8(N, K) == streams
    cut = int8_cut(rows=rows, K=K, N=N, swiglu=swiglu)
    assert (cut is not None) == (rows <= MAX_ROWS)
    if cut is not None:
        steps = -(-K // cut.inputs)
        of_each = -(-steps // cut.num_splits)
        assert (cut.num_splits - 1) * of_each < steps, "every program has a step"
    assert int8_cut(rows=rows, K=K, N=N, swiglu=swiglu, shared_bytes=1024) is None
    if streams:
        streamed = int8_stream_cut(rows=rows, K=K, N=N)
        assert (streamed is not None) == (rows <= MAX_ROWS)
        assert streamed is None or K % (streamed.inputs * streamed.num_splits) == 0


def test_what_is_not_kept() -> None:
    assert not keeps_int8(512, 512), "small"
    assert not keeps_int8(49152, 584), "rows that begin within a load"
    assert not streams_int8(49152 + 8, 4096)
    assert not streams_int8(49152, 4096 + 64)


def test_the_order_of_the_matrix_units() -> None:
    """Thread t of a row's four has columns 2t, 2t + 1, 2t + 8 and 2t + 9 of every 16, 32 of 128 in a row."""
    columns = in_stream_order(torch.arange(256).expand(3, 256))[1]
    for block in (0, 1):
        for thread in range(4):
            own = columns[128 * block + 32 * thread :][:32]
            first = 128 * block + 2 * thread
            assert own.tolist() == [first + 16 * c + d for c in range(8) for d in (0, 1, 8, 9)]


def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[2] = 0
    rounded = round_weight(weight)
    assert not rounded.rounded[2].any() and rounded.scale[2] == 0
    back = rounded.rounded * rounded.scale[:, None]
    assert ((back - weight.float()).abs() <= 0.501 * rounded.scale[:, None]).all()
    assert (rounded.rounded.abs().amax(1)[[0, 1, 3]] == 127).all()
