"""Which rows reach a product as they lie, and which the copy engine's as a copy: launches are noted, none is made."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.layers import cuda_cuts
from engine.layers.cuda_rows import CudaRows

H = 4096


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """x of every product that the copy engine feeds."""
    found: list[Tensor] = []
    kernel = SimpleNamespace(stream_gemm=lambda x, *_, **__: found.append(x))
    monkeypatch.setitem(sys.modules, "engine.kernels.stream_gemm", kernel)
    monkeypatch.setattr(cuda_cuts, "copy_engine", lambda: True)
    return found


@pytest.mark.parametrize(
    ("apart", "copied"), [(H, False), (H + 8, False), (H + 2, True), (2 * H + 4, True)], ids=["whole", "8", "2", "4"]
)
def test_rows_an_odd_number_of_bytes_apart_are_copied(brought: list[Tensor], apart: int, copied: bool) -> None:
    """As where ranks of three pad the state of a single tapped layer to 4,098 numbers."""
    x = torch.randn(8, apart).bfloat16()[:, :H]
    weight = torch.empty(H, H, dtype=torch.bfloat16, device="meta")
    made = CudaRows(pdl=False).linear(x, weight, None, None, torch.zeros(H, dtype=torch.int32))
    assert made is not None and made.shape == (8, H)
    (given,) = brought
    assert torch.equal(given, x)
    assert given.stride(0) * given.element_size() % 16 == 0 and given.stride(1) == 1
    assert (given.data_ptr() != x.data_ptr()) == copied


def test_the_other_kernel_takes_rows_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Tensor] = []
    kernel = SimpleNamespace(row_gemm=lambda x, *_, **__: found.append(x))
    monkeypatch.setitem(sys.modules, "engine.kernels.row_gemm", kernel)
    monkeypatch.setattr(cuda_cuts, "copy_engine", lambda: False)
    x = torch.randn(8, H + 2).bfloat16()[:, :H]
    weight = torch.empty(H, H, dtype=torch.bfloat16, device="meta")
    assert CudaRows(pdl=False).linear(x, weight, None, None, torch.zeros(H, dtype=torch.int32)) is not None
    (given,) = found
    assert given.data_ptr() == x.data_ptr() and given.stride() == x.stride()
