"""The row-wise CPU kernels equal the torch expressions they stand for, rounding included, and treat each row alone."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.layers import cpu_rows
from engine.layers.cpu_jit import obstacle
from engine.layers.cpu_rows import RowKernels

DTYPES = [torch.float32, torch.bfloat16]
ULP = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}  # a norm's sum in another order may turn one rounding

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=f"kernel: {obstacle()}")


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def kernels(request: pytest.FixtureRequest) -> RowKernels:
    return RowKernels(request.param)


def _random(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotated(x_NhD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.addcmul(x_NhD * cos, x_NhD.roll(x_NhD.shape[-1] // 2, -1), sin)


@pytest.mark.parametrize(("rows", "size"), [(1, 8), (5, 576), (70, 1000)])
def test_rms_norm(kernels: RowKernels, rows: int, size: int) -> None:
    x, weight = _random(rows, size, dtype=kernels.dtype, scale=3.0), _random(size, dtype=kernels.dtype, seed=1)
    y = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(y, _norm(x, weight, 1e-5), rtol=ULP[kernels.dtype], atol=1e-6)
    assert torch.equal(torch.cat([kernels.rms_norm(row, weight, 1e-5) for row in x.split(1)]), y)


def test_add_rms_norm_is_the_norm_of_the_rounded_sum(kernels: RowKernels) -> None:
    x, delta = (_random(70, 576, dtype=kernels.dtype, seed=s) for s in (0, 1))
    weight = _random(576, dtype=kernels.dtype, seed=2)
    total, y = kernels.add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, x + delta)
    assert torch.equal(y, kernels.rms_norm(x + delta, weight, 1e-6))


def test_silu_mul(kernels: RowKernels) -> None:
    x = _random(33, 2 * 1536, dtype=kernels.dtype, scale=4.0)
    x[0, :9] = torch.tensor([0.0, -0.0, 100.0, -100.0, 88.5, -88.5, -87.5, 1e4, -1e4], dtype=kernels.dtype)
    y = kernels.silu_mul(x)
    torch.testing.assert_close(y, F.silu(x[:, :1536]) * x[:, 1536:], rtol=ULP[kernels.dtype], atol=1e-30)
    assert torch.equal(torch.cat([kernels.silu_mul(row) for row in x.split(1)]), y)


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("h", "g", "D"), [(9, 3, 64), (2, 1, 16), (4, 4, 96)])
def test_rotate_and_write(kernels: RowKernels, h: int, g: int, D: int, with_norm: bool) -> None:
    N, dtype = 41, kernels.dtype
    qkv = _random(N, (h + 2 * g) * D, dtype=dtype)
    table = _random(N, 2, D, dtype=dtype, seed=1)
    cos, sin = table[:, :1], table[:, 1:]
    weight = _random(h + g, D, dtype=dtype, seed=2) if with_norm else None
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(3))[:N]
    k_cache, v_cache = (_random(16, 4, g, D, dtype=dtype, seed=s) for s in (4, 5))
    expected_k, expected_v = k_cache.clone().view(-1, g, D), v_cache.clone().view(-1, g, D)
    heads = qkv.view(N, h + 2 * g, D)
    qk = heads[:, : h + g]
    if weight is not None:
        qk = _norm(qk, weight, 1e-6)
    qk = _rotated(qk, cos, sin)
    expected_k[slots], expected_v[slots] = qk[:, h:], heads[:, h + g :]

    q = kernels.rotate_and_write(qkv, (cos, sin), slots, (k_cache, v_cache), num_heads=h, norm_weight=weight, eps=1e-6)
    tolerance = {"rtol": 2 * ULP[dtype], "atol": 2 * ULP[dtype]} if with_norm else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(q, qk[:, :h], **tolerance)
    torch.testing.assert_close(k_cache.view(-1, g, D), expected_k, **tolerance)
    assert torch.equal(v_cache.view(-1, g, D), expected_v)


def test_no_kernels_where_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_rows, "unavailable_reason", lambda: "none in this test")
    assert cpu_rows.row_kernels.__wrapped__(torch.float32) is None
    assert cpu_rows.row_kernels.__wrapped__(torch.float16) is None
