"""`engine.kernels.stream_gemm` from its source on modelled barriers and copies equals a product in float64."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.gemm_choice import StreamCut
from engine.layers.int8_weight import in_stream_order
from tests.engine.modelled_launch import Launch, Scaled, sources

EPS, SPARE = 1e-5, 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """steps: of a share. fused: what surrounds the product."""

    cut: StreamCut
    steps: int
    tiles: int
    fused: str
    rows: int = 16

    @property
    def K(self) -> int:
        return self.steps * self.cut.num_splits * self.cut.inputs

    @property
    def N(self) -> int:
        return self.tiles * (32 if "swiglu" in self.fused else 64)


def cases(splits: int) -> list[Case]:
    found = []
    fusions = ("norm and bias", "residual and next norm", "swiglu", "8 bits, swiglu")
    # (units, steps, stages): some do not fill the programs' units, or have fewer steps than stages.
    shapes = ((1, 5, 3), (3, 4, 3), (1, 2, 4), (3, 2, 5))
    for number, (fused, (units, steps, stages)) in enumerate(product(fusions, shapes)):
        cut = StreamCut(
            num_splits=splits,
            units=units,
            inputs=256 if number % 4 == 1 else 128,
            num_stages=stages,
            staggered=number % 2 == 0,
        )
        found.append(Case(cut=cut, steps=steps, tiles=4 - splits // 2, fused=fused, rows=(16, 5, 1)[number % 3]))
    return found


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def close(found: Tensor, wanted: Tensor, rounding: float) -> bool:
    return torch.allclose(found.double(), wanted, rtol=rounding, atol=rounding)


def right(case: Case, seed: int, files: dict[str, str]) -> bool:
    """Whether a launch ends, with nothing left in flight, every rule held and every number right."""
    M, K, N, fused = case.rows, case.K, case.N, case.fused
    swiglu, norm = "swiglu" in fused, fused != "residual and next norm"
    exact = fused == "norm and bias"  # to float32, without a rounding on the way
    x, weight = random(16, K, seed=1)[:M], random(N * (2 if swiglu else 1), K, seed=2, scale=K**-0.5)
    scale = None
    if fused == "8 bits, swiglu":
        whole = torch.randint(-127, 128, weight.shape, generator=torch.Generator().manual_seed(3))
        scale = 1e-3 * (1 + torch.rand(len(weight), generator=torch.Generator().manual_seed(4)))
        wanted = x.double() @ (whole.double() * scale.double()[:, None]).T
        weight = in_stream_order(whole.to(torch.int8))
    else:
        wanted = x.double() @ weight.double().T
    bias = random(N, seed=5) if fused == "norm and bias" else None
    residual = random(16, N + SPARE, seed=6)[:M, :N] if fused == "residual and next norm" else None
    next_norm = random(N, seed=7) if residual is not None else None
    squares = torch.rand(M, 3, generator=torch.Generator().manual_seed(8)) * K
    if norm:
        wanted = wanted * torch.rsqrt(squares.double().sum(1, keepdim=True) / K + EPS)
    if bias is not None:
        wanted = wanted + bias.double()
    if swiglu:
        wanted = F.silu(wanted[:, :N]) * wanted[:, N:]
    if residual is not None:
        wanted = wanted + residual.double()
    out = torch.full((16, N + SPARE), float("nan"), dtype=torch.float32 if exact else torch.bfloat16)
    count = torch.zeros(case.tiles, dtype=torch.int32)
    before: dict[str, Any] = {"pdl": seed % 2 == 0, "kernel": "_stream_kernel"}
    launch = Launch(seed, files, [x, squares] + ([] if residual is None else [residual]), **before)
    made = launch.functions["stream_gemm"](
        Scaled(x_MK=x, squares_MP=squares, eps=EPS) if norm else x,
        weight,
        out[:M, :N],
        cut=case.cut,
        scale=scale,
        count=count,
        bias=bias,
        swiglu=swiglu,
        residual_MN=residual,
        next_norm=None if next_norm is None else (next_norm, EPS),
        pdl=seed % 2 == 0,
    )
    told = launch.ended and not launch.turns.errors and not launch.turns.coming and not count.any()
    brought = all(barrier.missing == 0 and barrier.arrivals == 1 for barrier in launch.barriers)
    kept = out[M:].isnan().all() and out[:, N:].isnan().all()
    result = out[:M, :N]
    if not (told and brought and kept and close(result, wanted, 1e-5 if exact else 2**-6)):
        return False
    if made is None or next_norm is None:
        return made is next_norm
    parts = result.double().unflatten(1, (case.tiles, -1)).square().sum(2)
    scaled = (result.float() * next_norm.float()).bfloat16()
    return torch.equal(made.x_MK, scaled) and close(made.squares_MP, parts, 1e-5)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_tiles_equal_the_product(splits: int) -> None:
    for seed, case in enumerate(cases(splits)):
        assert right(case, seed // 2, sources()), case


FAULTS = {
    "a share's sum before it is whole": ("stream_multiply", "sums = warpgroup_mma_wait(0, deps=(sums,))", "pass"),
    "room given back before all have read": (
        "stream_multiply",
        "tl.debug_barrier()\n            mbarrier.arrive",
        "mbarrier.arrive",
    ),
    "a share counted before all have stored it": (
        "stream_multiply",
        "tl.debug_barrier()\n            last =",
        "last =",
    ),
    "another tile's shares forgotten": (
        "stream_multiply",
        "forget(part_ptr + (tile *",
        "forget(part_ptr + (tile // 2 *",
    ),
    "shares forgotten before they are added": (
        "stream_multiply",
        "                y = gl.zeros([TILE, BM], gl.float32, LONG)\n",
        "                forget(part_ptr + tile * (SPLITS * BM * TILE) + gl.arange(0, 32, None) * 32)\n"
        "                y = gl.zeros([TILE, BM], gl.float32, LONG)\n",
    ),
    "counters left as they are": ("stream_multiply", "gl.store(count_ptr + tile, 0)", "pass"),
    "halves loaded before all have stored": (
        "stream_multiply",
        "y_tile.store(y)\n                tl.debug_barrier()",
        "y_tile.store(y)",
    ),
    "pieces of a weight in the order of halves": (
        "stream_copies",
        "(stage * BOXES + box) * HALVES + half",
        "(stage * HALVES + half) * BOXES + box",
    ),
    "bytes of half of x": ("stream_copies", "BM * BK * 2", "BM * BK"),
    "rows of x before they are there": ("stream_copies", "    if PDL:\n        gdc_wait()\n", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    files = sources()
    name, text, other = FAULTS[fault]
    assert files[name].count(text) == 1
    files[name] = files[name].replace(text, other)
    assert not all(right(case, 0, files) for case in cases(2))
