"""The fused layer kernels equal the torch expressions they stand for, roundings included."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.gemm_choice import GemmCut, HeadCut
from tests.gpu.places import dtypes, places

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.head_gemm import head_gemm
from engine.kernels.row_gemm import row_gemm
from engine.kernels.row_ops import (
    add_rms_norm,
    clear_rows,
    enter_rows,
    gather_rows,
    rms_norm,
    rotate_and_write,
    scale_rows,
    silu_mul,
)
from engine.kernels.shard_argmax import shard_argmax

# A sum in another order may turn one rounding of the result, or of a number that goes into it.
ULP = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def _random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(dtype).to(device)


def _close(got: Tensor, want: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    torch.testing.assert_close(got, want, rtol=factor * ULP[dtype], atol=factor * ULP[dtype])


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().t()
    return (y if bias is None else y + bias.double()).to(x.dtype)


def _exact(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: Tensor | None, *, swiglu: bool, residual: Tensor | None
) -> Tensor:
    """float64 throughout."""
    y = x.double()
    if norm is not None:
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.double()
    y = y @ weight.double().t()
    y = y if bias is None else y + bias.double()
    if swiglu:
        half = y.shape[1] // 2
        y = F.silu(y[:, :half]) * y[:, half:]
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize(("case", "device"), places([(1, 256), (5, 576), (70, 4096)], [(3, 48)]))
def test_norms(case: tuple[int, int], device: str) -> None:
    rows, size = case
    for dtype in dtypes(device):
        wide = _random(rows, 2 * size, dtype=dtype, device=device, scale=3.0)
        x, delta = wide[:, :size], _random(rows, size, dtype=dtype, device=device, seed=1)  # x: a longer row stride
        weight = _random(size, dtype=dtype, device=device, seed=2)
        _close(rms_norm(x, weight, 1e-5), _normed(x, weight, 1e-5), dtype)
        for target in (None, torch.empty(rows, 3, size, dtype=dtype, device=device)[:, 1]):
            total, y = add_rms_norm(x, delta, weight, 1e-6, total_NH=target)
            assert torch.equal(total, x + delta)
            assert target is None or total.data_ptr() == target.data_ptr()
            _close(y, _normed(x + delta, weight, 1e-6), dtype)


@pytest.mark.parametrize(("case", "device"), places([(1, 1536), (33, 12288)], [(2, 100)]))
def test_silu_mul(case: tuple[int, int], device: str) -> None:
    rows, size = case
    for dtype in dtypes(device):
        x = _random(rows, 2 * size, dtype=dtype, device=device, scale=4.0)
        x[0, :5] = torch.tensor([0.0, 88.5, -88.5, 1e4, -1e4], dtype=dtype, device=device)
        _close(silu_mul(x), F.silu(x[:, :size]) * x[:, size:], dtype)


@pytest.mark.parametrize(("case", "device"), places([(1, 576), (16, 4096), (300, 128)], [(3, 40)]))
def test_gather_rows(case: tuple[int, int], device: str) -> None:
    rows, size = case
    index = torch.randint(0, 50, (rows,), generator=torch.Generator().manual_seed(1)).to(device)
    for dtype in dtypes(device):
        table = _random(50, 2, size // 2, dtype=dtype, device=device)
        assert torch.equal(gather_rows(table, index), table[index])


@pytest.mark.parametrize(("case", "device"), places([(1, 576, 64), (16, 4096, 128), (64, 5120, 128)], [(3, 96, 32)]))
def test_rows_ahead_of_the_first_layer(case: tuple[int, int, int], device: str) -> None:
    """Bit for bit what three launches make."""
    rows, hidden, head = case
    generator = torch.Generator().manual_seed(rows)
    for dtype in dtypes(device):
        embedding, norm = (
            torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((50, hidden), (hidden,))
        )
        angles = torch.randn(40, 2, head, generator=generator).to(device, dtype)
        ids, positions = (torch.randint(0, 40, (rows,), generator=generator).to(device) for _ in range(2))
        x, turned, scaled = enter_rows(embedding, ids, angles, positions, norm, 1e-5)
        assert torch.equal(x, embedding[ids])
        assert torch.equal(turned, angles[positions])
        want = scale_rows(embedding[ids], norm, 1e-5)
        assert torch.equal(scaled.x_MK, want.x_MK)
        assert torch.equal(scaled.squares_MP, want.squares_MP)
        assert scaled.eps == want.eps


@pytest.mark.parametrize(("case", "device"), places([(384, 4096), (33, 576)], [(19, 40)]))
def test_clear_rows(case: tuple[int, int], device: str) -> None:
    rows, size = case
    for dtype in dtypes(device):
        for first in (0, 1, 16, rows - 2, rows):
            wide = _random(rows, size + 8, dtype=dtype, device=device)
            wide[first:] = float("nan")
            want = wide.clone()
            want[first:, :size] = 0
            clear_rows(wide[:, :size], torch.tensor([first], dtype=torch.int32, device=device))
            torch.testing.assert_close(wide, want, rtol=0, atol=0, equal_nan=True)


GEMM_TOYS = [
    {"M": 3, "K": 40, "N": 24, "norm": True, "bias": True},
    {"M": 17, "K": 72, "N": 24, "norm": True, "swiglu": True},
    {"M": 2, "K": 100, "N": 40, "residual": True, "splits": 3, "bias": True, "next": True},
    {"M": 3, "K": 40, "N": 24, "residual": True, "next": True},
    {"M": 18, "K": 136, "N": 40, "norm": True, "swiglu": True, "splits": 2, "turned": True},
    {"M": 5, "K": 128, "N": 70, "residual": True, "splits": 3, "next": True, "turned": True},
]
GEMMS = [
    *GEMM_TOYS,
    *[
        {"M": M, **shape}
        for M in (1, 16, 33, 64, 200)
        for shape in (
            {"K": 576, "N": 960, "norm": True, "bias": True},
            {"K": 576, "N": 576, "residual": True, "next": True},
            {"K": 576, "N": 1536, "norm": True, "swiglu": True},
            {"K": 1536, "N": 576, "residual": True, "splits": 3, "next": True},
            {"K": 576, "N": 4100, "float32": True},
            {"K": 4096, "N": 1024, "norm": True, "splits": 4},
            {"K": 4096, "N": 512, "swiglu": True},
            {"K": 4096, "N": 1000, "norm": True, "swiglu": True, "splits": 2, "turned": True},
            {"K": 4096, "N": 520, "residual": True, "splits": 4, "next": True, "turned": True},
            {"K": 1000, "N": 4100, "float32": True, "turned": True},
        )
    ],
]


@pytest.mark.parametrize(("case", "device"), places(GEMMS, GEMM_TOYS))
@pytest.mark.parametrize("pdl", [False, True])
def test_row_gemm(case: dict[str, Any], device: str, pdl: bool) -> None:
    if pdl and device == "cpu":
        pytest.skip("the interpreter launches nothing")
    M, K, N = case["M"], case["K"], case["N"]
    swiglu, splits, turned = case.get("swiglu", False), case.get("splits", 1), case.get("turned", False)
    count = torch.zeros(256, dtype=torch.int32, device=device) if splits > 1 else None
    for dtype in dtypes(device):
        x = _random(M, K + 8, dtype=dtype, device=device)[:, :K]
        weight = _random((2 if swiglu else 1) * N, K, dtype=dtype, device=device, seed=1, scale=K**-0.5)
        bias = _random(N, dtype=dtype, device=device, seed=2) if case.get("bias") else None
        norm = _random(K, dtype=dtype, device=device, seed=3) if case.get("norm") else None
        next_norm = _random(N, dtype=dtype, device=device, seed=5) if case.get("next") else None
        residual = _random(M, N + 8, dtype=dtype, device=device, seed=4)[:, :N] if case.get("residual") else None
        out_dtype = torch.float32 if case.get("float32") else dtype
        want = _product(x if norm is None else _normed(x, norm, 1e-5), weight, bias)
        if case.get("float32"):
            want = (x.double() @ weight.double().t()).float()
        if swiglu:
            want = F.silu(want[:, :N]) * want[:, N:]
        if residual is not None:
            want = residual + want
        exact = _exact(x, weight, bias, norm, swiglu=swiglu, residual=residual)
        cut = GemmCut(
            outputs=16 if device == "cpu" else 32 if swiglu or not turned else 64,
            inputs=32 if device == "cpu" else 64,
            num_splits=splits,
            turned=turned,
            ahead=1 << 14,
            staggered=turned,
        )
        results = []
        for _ in range(2):  # the second finds the counters as the first left them
            out = torch.full((M, N + 8), float("nan"), dtype=out_dtype, device=device)[:, :N]
            made = row_gemm(
                x if norm is None else scale_rows(x, norm, 1e-5),
                weight,
                out,
                cut=cut,
                count=count,
                bias=bias,
                swiglu=swiglu,
                residual_MN=residual,
                next_norm=None if next_norm is None else (next_norm, 1e-5),
                pdl=pdl,
            )
            if next_norm is None:
                assert made is None
            else:
                assert made is not None
                _close(made.x_MK, out * next_norm, dtype)
                _close(made.squares_MP.sum(1), out.float().pow(2).sum(1), torch.float32, 10)
            if norm is None:
                _close(out, want, dtype, 1e-1 if case.get("float32") and dtype != torch.float32 else 1.0)
            else:  # the norm's weight is rounded in elsewhere: every product moves by a rounding
                error = (out.double() - exact).norm() / exact.norm()
                # 2e-6: float32 sums of 12,288 products in another order than cuBLAS's.
                assert error <= 2 * (want.double() - exact).norm() / exact.norm() + 2e-6
            results.append(out)
        assert torch.equal(*results)
        assert count is None or not count.any()


def _layer(case: dict[str, Any], dtype: torch.dtype, device: str) -> dict[str, Any]:
    h, g, D, L, N = case["h"], case["g"], case["D"], case.get("L", 1), case["N"]
    table = _random(N, 2, D, dtype=dtype, device=device, seed=1)
    stack = _random(2 * L, 8, 16, g, D, dtype=dtype, device=device, seed=2)
    return {
        "angles": (table[:, :1], table[:, 1:]),
        "slots": torch.randperm(128, generator=torch.Generator().manual_seed(3))[:N].to(device),
        "stack": stack,
        "head_norm": _random(L, h + g, D, dtype=dtype, device=device, seed=4) if case["qk_norm"] else None,
    }


def _expected(qkv: Tensor, case: dict[str, Any], parts: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(q, the stack with the rows written) by torch expressions."""
    h, g, D, L, N = case["h"], case["g"], case["D"], case.get("L", 1), case["N"]
    heads = qkv.view(N, L, h + 2 * g, D)
    qk = heads[:, :, : h + g]
    if parts["head_norm"] is not None:
        qk = _normed(qk, parts["head_norm"], 1e-6)
    cos, sin = (a.unsqueeze(1) for a in parts["angles"])
    qk = torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin)
    stack = parts["stack"].clone().view(2 * L, -1, g, D)
    for layer in range(L):
        stack[2 * layer, parts["slots"]] = qk[:, layer, h:]
        stack[2 * layer + 1, parts["slots"]] = heads[:, layer, h + g :]
    return qk[:, 0, :h], stack.view(parts["stack"].shape)


HEAD_TOYS = [
    {"N": 3, "h": 2, "g": 1, "D": 32, "qk_norm": False},
    {"N": 2, "h": 0, "g": 2, "D": 32, "L": 2, "qk_norm": True},
]
HEADS = [
    *HEAD_TOYS,
    {"N": 16, "h": 9, "g": 3, "D": 64, "qk_norm": False},
    {"N": 33, "h": 9, "g": 3, "D": 64, "qk_norm": True},
    {"N": 1, "h": 32, "g": 8, "D": 128, "qk_norm": True},
    {"N": 80, "h": 0, "g": 3, "D": 64, "L": 5, "qk_norm": True},
]


@pytest.mark.parametrize(
    ("case", "device"), places([*HEADS, {"N": 5, "h": 4, "g": 2, "D": 80, "qk_norm": True}], HEAD_TOYS)
)
def test_rotate_and_write(case: dict[str, Any], device: str) -> None:
    for dtype in dtypes(device):
        parts = _layer(case, dtype, device)
        L, width = case.get("L", 1), (case["h"] + 2 * case["g"]) * case["D"]
        qkv = _random(case["N"], L * width, dtype=dtype, device=device, seed=5)
        want_q, want_stack = _expected(qkv, case, parts)
        stack = parts["stack"]
        norm = None if parts["head_norm"] is None else (parts["head_norm"], 1e-6)
        q = rotate_and_write(
            qkv,
            parts["angles"],
            parts["slots"],
            (stack[0], stack[1]),
            num_heads=case["h"],
            num_layers=L,
            head_norm=norm,
        )
        _close(q, want_q, dtype, 2)
        _close(stack, want_stack, dtype, 2)


@pytest.mark.parametrize(("case", "device"), places([HEADS[-1]], [HEAD_TOYS[-1]]))
def test_layers_further_apart_than_32_bits_reach(case: dict[str, Any], device: str) -> None:
    """A drafter's layers in a cache so large that the last one begins more than 2^31 elements behind the first."""
    dtype = dtypes(device)[-1]
    parts = _layer(case, dtype, device)
    L, width = case["L"], 2 * case["g"] * case["D"]
    qkv = _random(case["N"], L * width, dtype=dtype, device=device, seed=5)
    want = _expected(qkv, case, parts)[1]
    blocks = -(-(2**31 // (2 * L - 2) + 1) // parts["stack"][0, 0].numel())
    far = torch.zeros(2 * L, blocks, *parts["stack"].shape[2:], dtype=dtype, device=device)  # pages come when written
    rotate_and_write(
        qkv,
        parts["angles"],
        parts["slots"],
        (far[0], far[1]),
        num_heads=0,
        num_layers=L,
        head_norm=(parts["head_norm"], 1e-6),
    )
    for got_layer, want_layer in zip(far, want, strict=True):
        _close(got_layer.flatten(0, 1)[parts["slots"]], want_layer.flatten(0, 1)[parts["slots"]], dtype, 2)


@pytest.mark.parametrize(("case", "device"), places(HEADS, HEAD_TOYS))
@pytest.mark.parametrize("pdl", [False, True])
def test_head_gemm(case: dict[str, Any], device: str, pdl: bool) -> None:
    if pdl and device == "cpu":
        pytest.skip("the interpreter launches nothing")
    K = 40 if device == "cpu" else 576
    for dtype in dtypes(device):
        parts = _layer(case, dtype, device)
        L, width = case.get("L", 1), (case["h"] + 2 * case["g"]) * case["D"]
        x = _random(case["N"], K + 8, dtype=dtype, device=device, seed=6)[:, :K]
        weight = _random(L * width, K, dtype=dtype, device=device, seed=7, scale=K**-0.5)
        norm = _random(K, dtype=dtype, device=device, seed=8)
        for bias in (None, _random(L * width, dtype=dtype, device=device, seed=9)):
            qkv = _product(_normed(x, norm, 1e-5), weight, bias)
            want_q, want_stack = _expected(qkv, case, parts)
            q = torch.full((case["N"], max(case["h"], 1), case["D"]), float("nan"), dtype=dtype, device=device)
            stack = parts["stack"].clone()
            head_gemm(
                scale_rows(x, norm, 1e-5),
                weight,
                parts["angles"],
                parts["slots"],
                (stack[0], stack[1]),
                q,
                num_heads=case["h"],
                num_layers=L,
                bias=bias,
                head_norm=None if parts["head_norm"] is None else (parts["head_norm"], 1e-6),
                cut=HeadCut(inputs=32 if device == "cpu" else 64),
                pdl=pdl,
            )
            _close(q[:, : case["h"]], want_q, dtype, 4)
            _close(stack, want_stack, dtype, 4)


@pytest.mark.parametrize(("case", "device"), places([(1, 49152), (16, 151936), (130, 5000)], [(4, 9000)]))
def test_shard_argmax(case: tuple[int, int], device: str) -> None:
    rows, columns = case
    for dtype in dtypes(device):
        x = _random(rows, columns + 1, dtype=dtype, device=device)[:, :columns]
        x[0, [columns - 1, 4321, 77]] = 9.0  # a tie: the lowest id
        if rows > 3:
            x[1, columns // 2] = float("nan")
            x[2] = float("-inf")
            x[3] = float("nan")
        value, index = shard_argmax(x, 1000)
        want_value, want_index = x.float().max(dim=1)
        torch.testing.assert_close(value, want_value, rtol=0, atol=0, equal_nan=True)
        known = ~want_value.isnan()
        assert torch.equal(index[known], want_index[known] + 1000)
        assert index.dtype == torch.int64 and bool(((index >= 1000) & (index < 1000 + columns)).all())
