"""The linear layer: right sums in every shape, rows independent of each other, torch where there is no kernel."""

import importlib.util
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.layers import cpu_gemm, cpu_jit
from engine.layers import linear as linear_module
from engine.layers.cpu_gemm import PackedMatrix, pack_weight, unpack_weight
from engine.layers.cpu_jit import obstacle, unavailable_reason
from engine.layers.linear import Linear

MAX_ROWS = 70
SHAPES = [(1, 1), (16, 1), (5, 3), (33, 7), (48, 130), (100, 64), (257, 96)]  # out, in: tails in both directions
DTYPES = [torch.bfloat16, torch.float32]
EPS = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}  # half a unit in the last place

needs_kernel = pytest.mark.skipif(obstacle() is not None, reason=f"kernel: {obstacle()}")


def _operands(out: int, inner: int, dtype: torch.dtype, *, rows: int = MAX_ROWS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out * 1000 + inner)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in ((rows, inner), (out, inner), (out,)))


def _assert_within_rounding(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """One rounding of the output and at most in + 1 roundings of float32 sums, against float64."""
    wide_x, wide_w = x.double(), weight.double()
    exact, magnitude = wide_x @ wide_w.T, wide_x.abs() @ wide_w.abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    sums = (x.shape[-1] + 1) * EPS[torch.float32] * magnitude
    bound = sums + (EPS[y.dtype] * (exact.abs() + sums) if y.dtype == torch.bfloat16 else 0.0)
    assert bool(((y.double() - exact).abs() <= bound).all())


def _layer(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, out_dtype=out_dtype)
    layer.weight.data.copy_(weight)
    if layer.bias is not None and bias is not None:
        layer.bias.data.copy_(bias)
    return layer


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_kernel_equals_float64_within_one_rounding(
    out: int, inner: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    x, weight, bias = _operands(out, inner, dtype)
    for b in (None, bias):
        matrix = PackedMatrix(weight, b, out_dtype=out_dtype, threads=2)
        for rows in (1, 2, 3, 6, 7, 13, MAX_ROWS):
            y = matrix.matmul(x[:rows])
            assert y.dtype == out_dtype
            assert y.shape == (rows, out)
            _assert_within_rounding(y, x[:rows], weight, b)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "inner"), [(33, 7), (160, 72)])
def test_a_row_does_not_depend_on_the_others_or_on_threads(out: int, inner: int, dtype: torch.dtype) -> None:
    x, weight, bias = _operands(out, inner, dtype)
    alone, team = (PackedMatrix(weight, bias, out_dtype=dtype, threads=t) for t in (1, 2))
    single = torch.cat([alone.matmul(row) for row in x.split(1)])
    for rows in range(1, MAX_ROWS + 1):
        assert torch.equal(team.matmul(x[:rows]), single[:rows]), rows
        assert torch.equal(alone.matmul(x[:rows]), single[:rows]), rows
    assert torch.equal(team.matmul(x.flip(0)).flip(0), single)


@needs_kernel
def test_more_threads_than_panels() -> None:
    x, weight, _ = _operands(5, 3, torch.bfloat16)
    one, many = (PackedMatrix(weight, None, out_dtype=torch.float32, threads=t).matmul(x) for t in (1, 5))
    assert torch.equal(one, many)


@needs_kernel
def test_large_inputs_take_the_same_path_bit_for_bit() -> None:
    rows = cpu_gemm.MAX_SELF_WIDENED // 512 + 3  # torch widens x from here on
    x, weight, _ = _operands(40, 512, torch.bfloat16, rows=rows)
    matrix = PackedMatrix(weight, None, out_dtype=torch.bfloat16, threads=2)
    assert torch.equal(matrix.matmul(x), torch.cat([matrix.matmul(part) for part in x.split(50)]))


@needs_kernel
def test_rounding_is_that_of_torch_for_ties_infinities_and_nan() -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, 3.4e38, 3.39e38, 1e-40, -0.0, float("inf"), float("nan"), -2.5])
    matrix = PackedMatrix(torch.ones(1, 1), None, out_dtype=torch.bfloat16, threads=1)
    y = matrix.matmul(values.unsqueeze(1)).squeeze(1)
    assert torch.equal(y.isnan(), values.isnan())
    assert torch.equal(y.nan_to_num(), values.bfloat16().nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_packing_is_lossless(out: int, inner: int, dtype: torch.dtype) -> None:
    _, weight, _ = _operands(out, inner, dtype, rows=1)
    assert torch.equal(unpack_weight(pack_weight(weight), out), weight)


@needs_kernel
def test_prepare_hands_over_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "unavailable_reason", lambda: None)
    x, weight, bias = _operands(48, 130, torch.bfloat16)
    layer = _layer(weight, bias, torch.float32)
    before = layer.forward(x)
    assert layer.prepare(threads=2)
    assert not hasattr(layer, "weight")
    assert layer.bias is None
    assert torch.equal(layer.plain_weight(), weight)
    after = layer.forward(x.view(7, 10, 130))
    assert after.dtype == torch.float32
    assert after.shape == (7, 10, 48)
    torch.testing.assert_close(after.view(70, 48), before, rtol=1e-5, atol=1e-5)
    assert layer.forward(x[:0]).shape == (0, 48)
    assert torch.equal(layer.forward(x.repeat(1, 2)[:, :130]), after.view(70, 48))  # not contiguous
    with pytest.raises(ValueError, match=r"the weight takes torch\.bfloat16"):
        layer.forward(x.float())
    with pytest.raises(ValueError, match=r"\[\.\.\., 130\]"):
        layer.forward(x[:, :129])


def test_prepare_refuses_a_senseless_thread_count() -> None:
    with pytest.raises(ValueError, match="threads is 0"):
        Linear(2, 2, dtype=torch.float32).prepare(threads=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_without_the_kernel_torch_computes_the_same(
    dtype: torch.dtype, out_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "unavailable_reason", lambda: "no kernel in this test")
    x, weight, bias = _operands(100, 64, dtype)
    layer = _layer(weight, bias, out_dtype)
    assert not layer.prepare(threads=2)
    assert layer.plain_weight() is layer.weight
    y = layer.forward(x.view(7, 10, 64))
    assert y.dtype == (out_dtype or dtype)
    assert y.shape == (7, 10, 100)
    torch.testing.assert_close(
        y.view(70, 100).double(), x.double() @ weight.double().T + bias.double(), rtol=8e-3, atol=2e-2
    )


def test_the_choice_says_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = unavailable_reason.__wrapped__  # without the cache: the choice is made once per process
    monkeypatch.setenv("DFLASH_CPU_KERNELS", "torch")
    assert choose() == "DFLASH_CPU_KERNELS=torch"
    monkeypatch.setenv("DFLASH_CPU_KERNELS", "fast")
    with pytest.raises(ValueError, match="use auto, llvm or torch"):
        choose()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("DFLASH_CPU_KERNELS", "auto")
    assert choose() is not None
    monkeypatch.setenv("DFLASH_CPU_KERNELS", "llvm")
    with pytest.raises(ValueError, match="DFLASH_CPU_KERNELS=llvm: "):
        choose()


@needs_kernel
def test_a_kernel_that_does_not_compile_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(cpu_jit, "compile_ir", broken)
    assert obstacle() == "llvmlite does not compile: no such instruction"


@needs_kernel
@pytest.mark.parametrize(
    ("supported", "choice", "dtype", "out_dtype", "int8", "limit"),
    [
        (True, "auto", torch.bfloat16, None, False, 16),
        (True, "llvm", torch.bfloat16, None, False, None),
        (True, "auto", torch.float32, None, False, None),
        (True, "auto", torch.bfloat16, torch.float32, False, None),
        (True, "auto", torch.bfloat16, None, True, 16),
        (True, "llvm", torch.bfloat16, None, True, None),
        (True, "auto", torch.bfloat16, torch.float32, True, None),
        (False, "auto", torch.bfloat16, None, False, None),
    ],
)
def test_with_bfloat16_instructions_torch_takes_many_rows(
    supported: bool,
    choice: str,
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    int8: bool,
    limit: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_jit, "has_bfloat16_instructions", lambda: supported)
    monkeypatch.setenv("DFLASH_CPU_KERNELS", choice)
    monkeypatch.setattr(linear_module, "unavailable_reason", lambda: None)
    x, weight, bias = _operands(48, 136, dtype)
    layer = _layer(weight, bias, out_dtype)
    assert layer.prepare(threads=2, int8=int8)
    assert hasattr(layer, "weight") == (layer.bias is not None) == (limit is not None)
    assert torch.equal(layer.plain_weight(), weight) == (limit is not None or not int8)
    by_kernel = layer.matrix.matmul
    rows_seen: list[int] = []

    def seen(x: Tensor) -> Tensor:
        rows_seen.append(x.numel() // 136)
        return by_kernel(x)

    monkeypatch.setattr(layer.matrix, "matmul", seen)
    for shape in ((1,), (16,), (4, 4), (17,), (1, MAX_ROWS), (2, 9)):
        rows = x[: math.prod(shape)]
        y, kernel = layer.forward(rows.view(*shape, 136)).view(-1, 48), by_kernel(rows)
        is_taken = limit is None or len(rows) <= limit
        assert layer.kernel_takes(len(rows)) == is_taken
        assert (rows_seen == [len(rows)]) == is_taken
        assert torch.equal(y, kernel if is_taken else F.linear(rows, weight, bias))
        rows_seen.clear()
