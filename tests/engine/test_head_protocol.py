"""`engine.kernels.stream_head` from its source on modelled barriers and copies: a product, and its largest logits."""

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.gemm_choice import PeakCut
from tests.engine.modelled_launch import Launch, sources

FILES = ("stream_copies", "stream_head")
START, NONE = 1000, 2**31 - 1
KINDS = ("any", "below zero", "ties", "equal", "no number", "minus infinity")


@dataclass(frozen=True, kw_only=True)
class Case:
    """kind: of what the logits are."""

    kind: str
    vocab: int
    rows: int
    cut: PeakCut
    K: int = 512


def cases() -> list[Case]:
    cuts = (
        PeakCut(inputs=128, num_stages=3, num_programs=3),
        PeakCut(inputs=64, num_stages=1, num_programs=1),
        PeakCut(inputs=64, num_stages=5, num_programs=3, rows=8, outputs=128),
    )
    # One tile, in part and whole; as many as programs; several of each, the last one in part.
    vocabs = (50, 64, 64 * 3, 64 * 7 + 37)
    return [
        Case(kind=kind, vocab=vocab, rows=(1, 5, 8)[number % 3], cut=cuts[number // 3 % 3])
        for number, (kind, vocab) in enumerate(product(KINDS, vocabs))
    ]


def operands(case: Case) -> tuple[Tensor, Tensor]:
    """x, and a weight that lies between others' rows, which would win in every row if they were read."""
    generator = torch.Generator().manual_seed(case.vocab)
    x = torch.randn(16, case.K, generator=generator).bfloat16()[: case.rows]
    around = torch.full((case.vocab + 256, case.K), math.inf, dtype=torch.bfloat16)
    weight = around[128 : 128 + case.vocab]
    weight.copy_(torch.randn(case.vocab, case.K, generator=generator) * case.K**-0.5)
    if case.kind in ("below zero", "minus infinity"):
        weight.copy_(-weight.abs() - 0.01)
        x.copy_(x.abs() + 0.1)
    if case.kind == "minus infinity":
        x[:, 0] = math.inf
    elif case.kind == "ties":  # the first row's largest, often within a tile and in each
        weight[3 :: max(5, case.vocab // 40)] = 4 * x[0] / x[0].float().norm()
    elif case.kind == "equal":
        weight.zero_()
    elif case.kind == "no number":  # one logit; all others of the row are infinite
        x[case.rows // 2, 3] = math.inf
        weight[case.vocab // 2, 3] = 0.0
    return x, weight


def largest(value_MC: Tensor, id_MC: Tensor) -> tuple[Tensor, Tensor]:
    """(maximum, NaN if any is; the lowest id of the maximum of the others)."""
    broken = value_MC.isnan()
    known = value_MC.masked_fill(broken, -math.inf)
    best = known.amax(1)
    first = id_MC.masked_fill((known != best[:, None]) | broken, NONE).amin(1)
    return torch.where(broken.any(1), math.nan, best), first


def joined(value_MC: Tensor, id_MC: Tensor, vocab_start: int, pdl: bool) -> tuple[Tensor, Tensor]:
    value, first = largest(value_MC, id_MC)
    return value, torch.where(first == NONE, 0, first).long() + vocab_start


def launched(case: Case, seed: int, files: dict[str, str], name: str, *more: int) -> tuple[bool, Any]:
    """(whether it ended with nothing left in flight and every rule held, what it gave)."""
    x, weight = operands(case)
    launch = Launch(seed, files, [x], pdl=seed % 2 == 0, kernel="_head_kernel")
    launch.functions["argmax_of_chunks"] = joined
    found = launch.functions[name](x, weight, *more, cut=case.cut, pdl=seed % 2 == 0)
    brought = all(barrier.missing == 0 and barrier.arrivals == 1 for barrier in launch.barriers)
    return launch.ended and brought and not launch.turns.errors and not launch.turns.coming, found


def right(case: Case, seed: int, files: dict[str, str]) -> bool:
    x, weight = operands(case)
    wanted = x.double() @ weight.double().T
    told, logits = launched(case, seed, files, "stream_logits")
    if not told or not torch.allclose(logits.double(), wanted, rtol=1e-4, atol=1e-4, equal_nan=True):
        return False
    told, (value, index) = launched(case, seed, files, "stream_argmax", START)
    best, first = largest(logits, torch.arange(case.vocab).expand(case.rows, -1))
    known = ~best.isnan()
    return (
        told
        and torch.equal(value.isnan(), ~known)
        and torch.equal(value[known], best[known])
        and torch.equal(index[known], first[known] + START)
        and bool(((index >= START) & (index < START + case.vocab)).all())
    )


@pytest.mark.parametrize("kind", KINDS)
def test_peaks_are_those_of_the_product(kind: str) -> None:
    for seed, case in enumerate(cases()):
        if case.kind == kind:
            assert right(case, seed, sources(FILES)), case


ROOM = "                mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)\n"
ANNOUNCED = "                if step == 0:\n                    _announce(tile_of, stage, tile)\n"
BROUGHT = "                _bring_weights(w_desc, w_units, w_full, stage, tile, step, TILE, BK)\n"
FAULTS = {
    "of equal logits the last": ("sums > best", "sums >= best"),
    "rows behind the vocabulary's end": ("(sums > best) & inside", "sums > best"),
    "no number taken for none": ("broken | ((sums != sums) & inside)", "broken"),
    "a tile's sum before it is whole": ("sums = warpgroup_mma_wait(0, deps=(sums,))", "pass"),
    "room given back before all have read": (
        "tl.debug_barrier()\n            mbarrier.arrive(empty",
        "mbarrier.arrive(empty",
    ),
    "room taken before it is given back": (ROOM, ""),
    "rows of x before they are there": ("    if PDL:\n        gdc_wait()\n    number", "    number"),
    "rows of x of an earlier phase": ("x_full.index(stage), phase", "x_full.index(stage), 0"),
    "a tile announced behind its weights": (ANNOUNCED + BROUGHT, BROUGHT + ANNOUNCED),
    "a tile announced before all see it": ("ONE) + tile)\n    tl.debug_barrier()", "ONE) + tile)"),
    "the end announced before there is room": (
        "    mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)\n    _announce",
        "    _announce",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    files, (text, other) = sources(FILES), FAULTS[fault]
    assert files["stream_head"].count(text) == 1
    files["stream_head"] = files["stream_head"].replace(text, other)
    assert not all(right(case, seed, files) for seed, case in reversed(list(enumerate(cases()))))
