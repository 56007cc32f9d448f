"""The products of many rows equal the torch expressions they stand for; a row's bits do not depend on its place."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.wide_choice import WideCut, argmax_cut, swiglu_cut
from tests.gpu.places import places

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.wide_gemm import wide_argmax, wide_logits, wide_swiglu

TOY = WideCut(rows=16, outputs=32, inputs=32, num_programs=3, num_warps=4)


def _random(*shape: int, device: str, seed: int = 0, scale: float = 1.0) -> Tensor:
    """The interpreter's copies of tiles do not know bfloat16."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return x.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def _same(got: Tensor, want: Tensor) -> None:
    """Bit for bit; the interpreter multiplies by numpy, whose sums depend on the shape around them."""
    tolerance = 1e-5 if got.device.type == "cpu" else 0.0
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


CASES = [(2048, 512, 4096), (300, 1000, 256), (256, 12288, 4096), (129, 130, 64)]


@pytest.mark.parametrize(("case", "device"), places(CASES, [(20, 100, 128), (300, 33, 64)]))
def test_swiglu(case: tuple[int, int, int], device: str) -> None:
    M, N, K = case
    x, weight = _random(M, K, device=device), _random(2 * N, K, device=device, seed=1, scale=2.0 * K**-0.5)
    cut = TOY if device == "cpu" else WideCut(outputs=128)
    got = wide_swiglu(x, weight, cut=cut)
    y = (x.double() @ weight.double().t()).to(x.dtype)
    want = F.silu(y[:, :N]) * y[:, N:]
    tolerance = 1e-4 if device == "cpu" else 2.0**-6
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    _same(wide_swiglu(x.roll(7, 0), weight, cut=cut), got.roll(7, 0))


@pytest.mark.parametrize(("case", "device"), places([(300, 151936, 256), (256, 5000, 4096)], [(20, 200, 128)]))
def test_head(case: tuple[int, int, int], device: str) -> None:
    M, V, K = case
    x, weight = _random(M, K, device=device), _random(V, K, device=device, seed=1, scale=K**-0.5)
    weight[V - 1] = weight[7]  # a tie in every row
    weight[70] = 3 * x[1] / x[1].norm()  # row 1's largest by far, in another tile
    weight[V - 2] = weight[70]
    cut = TOY if device == "cpu" else WideCut(outputs=256)
    logits = wide_logits(x, weight, cut=cut)
    torch.testing.assert_close(logits, (x.double() @ weight.double().t()).float(), rtol=1e-3, atol=1e-3)
    value, index = wide_argmax(x, weight, 1000, cut=cut)
    want_value, want_index = logits.max(dim=1)
    _same(value, want_value)
    assert torch.equal(index, want_index + 1000)
    assert int(index[1]) == 1070  # the lower id of equal logits
    x[2, 3] = float("nan")
    rolled_value, rolled_index = wide_argmax(x.roll(5, 0), weight, 1000, cut=cut)
    keep = torch.arange(M, device=device) != 2
    assert torch.equal(rolled_index.roll(-5, 0)[keep], index[keep])
    _same(rolled_value.roll(-5, 0)[keep], value[keep])
    assert rolled_value.isnan().sum() == 1


def test_small_products_are_left_to_others() -> None:
    for choose in (argmax_cut, swiglu_cut):
        assert choose(rows=2048, K=4096, N=12288) is not None
        assert choose(rows=256, K=4096, N=4096) is None  # fewer tiles than SMs
        assert choose(rows=16, K=4096, N=12288) is None
        assert choose(rows=2048, K=576, N=1536) is None
        assert choose(rows=2048, K=4096, N=12288, item_bytes=4) is None
        assert choose(rows=2048, K=4100, N=12288) is None
