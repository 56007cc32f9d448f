"""Matrices in 8 bits on the CPU kernel: exact arithmetic on rounded operands, rows independent, a shape that suits."""

import pytest
import torch
from torch import Tensor

from engine.layers.cpu_int8_gemm import Int8Matrix, pack_int8, suits_int8
from engine.layers.cpu_jit import obstacle
from engine.layers.cpu_quantise_ir import WEIGHT_MAX, activation_max
from engine.layers.linear import Linear

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=f"kernel: {obstacle()}")

ROWS = 23
SHAPES = [(16, 8), (5, 16), (33, 72), (130, 576), (48, 2880)]  # out, in


def _operands(out: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out * 1000 + inner)
    x, weight, bias = (torch.randn(s, generator=generator) for s in ((ROWS, inner), (out, inner), (out,)))
    x[3] *= 1e-6
    x[4] *= 1e6
    x[5] = 0.0
    weight[1] = 0.0
    return x.bfloat16(), weight.bfloat16(), bias.bfloat16()


@pytest.mark.parametrize(("out", "inner"), SHAPES)
def test_sums_are_those_of_the_rounded_operands(out: int, inner: int) -> None:
    x, weight, bias = _operands(out, inner)
    rounded = Int8Matrix(weight, None, out_dtype=torch.float32, threads=1).unpacked().double()
    scale = weight.double().abs().amax(dim=1, keepdim=True) / WEIGHT_MAX
    assert bool(((rounded - weight.double()).abs() <= 0.501 * scale).all())
    # An activation is off by half a step of its row, and each such error meets one weight.
    step = x.double().abs().amax(dim=1, keepdim=True) / activation_max(inner)
    slack = 0.51 * step * rounded.abs().sum(dim=1) + 1e-5 * (x.double().abs() @ rounded.abs().T)
    exact = x.double() @ rounded.T
    for b in (None, bias):
        matrix = Int8Matrix(weight, b, out_dtype=torch.float32, threads=2)
        for rows in (1, 2, 3, 5, 6, ROWS):
            want = exact[:rows] + (0.0 if b is None else b.double())
            assert bool(((matrix.matmul(x[:rows]).double() - want).abs() <= slack[:rows] + 1e-6 * want.abs()).all())


def test_largest_operands_do_not_leave_int32() -> None:
    inner = 2880
    matrix = Int8Matrix(torch.ones(16, inner).bfloat16(), None, out_dtype=torch.float32, threads=1)
    got = matrix.matmul(torch.stack((torch.ones(inner), -torch.ones(inner))).bfloat16())
    assert torch.allclose(got, torch.tensor([[float(inner)], [-float(inner)]]).expand(2, 16), rtol=1e-3)


def test_a_row_does_not_depend_on_the_others_or_on_threads() -> None:
    x, weight, bias = _operands(130, 576)
    alone, team = (Int8Matrix(weight, bias, out_dtype=torch.bfloat16, threads=t) for t in (1, 2))
    single = torch.cat([alone.matmul(row) for row in x.split(1)])
    for rows in range(1, ROWS + 1):
        assert torch.equal(team.matmul(x[:rows]), single[:rows]), rows
    assert torch.equal(team.matmul(x.flip(0)).flip(0), single)
    many = x.repeat(20, 1)  # more than one call of the kernel
    assert torch.equal(team.matmul(many), single.repeat(20, 1))


def test_a_row_that_is_not_finite_stays_so_and_harms_no_other() -> None:
    x, weight, _ = _operands(33, 72)
    x[0, 7], x[1, 3] = float("nan"), float("inf")
    matrix = Int8Matrix(weight, None, out_dtype=torch.float32, threads=1)
    got = matrix.matmul(x)
    assert not bool(got[:2, 2:].isfinite().any())  # column 1 has zero weights
    assert torch.equal(got[2:], matrix.matmul(x[2:]))


def test_linear_rounds_only_what_suits() -> None:
    x, weight, _ = _operands(33, 72)
    for inner, is_rounded in ((72, True), (71, False)):
        layer = Linear(inner, 33, dtype=torch.bfloat16)
        layer.weight.data.copy_(weight[:, :inner])
        assert layer.prepare(int8=True)
        assert torch.equal(layer.plain_weight().bfloat16(), weight[:, :inner]) != is_rounded
        near = x[:, :inner].float() @ weight[:, :inner].float().T
        assert torch.allclose(layer.forward(x[:, :inner]).float(), near, atol=0.02 * float(near.abs().max()))
    assert not suits_int8(4)
    assert not suits_int8(1 << 15)  # so many inputs leave an activation too few bits
    float_layer = Linear(72, 33, dtype=torch.float32)
    float_layer.prepare(int8=True)
    assert float_layer.plain_weight().dtype == torch.float32


def test_pack_pads_outputs_with_zeros() -> None:
    packed, scale = pack_int8(torch.full((5, 8), 2.0).bfloat16())
    assert packed.shape == (1, 4, 16, 2)
    assert bool((packed[:, :, 5:] == 0).all()) and bool((scale[5:] == 0).all())
