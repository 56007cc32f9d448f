"""The bookkeeping kernels decide what the torch forms decide: whole engines, and rows with every kind of end."""

from typing import Any

import pytest
import torch

from engine.runner.fused_rows import FusedRows
from engine.sampling.synthetic import synthetic_accepted
from tests.engine.test_decode_programs import build, drive, models  # noqa: F401  (a fixture)
from tests.gpu.places import places
from tests.reference.row_cases import check_commit

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.coin_rows import accepted_by_coin
from engine.kernels.commit_rows import commit


@pytest.mark.parametrize(("case", "device"), places([1, 2, 3], []))
def test_engines_emit_the_same_tokens(
    case: int,
    device: str,
    models: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depth = case % 2  # on the CPU the programs of fixed shapes have no such kernels
    options = {"device": device, "pipeline_depth": depth, "block_size": 16}
    used: list[str] = []

    def create(config: Any, state: Any, builder: Any, device: Any) -> FusedRows:
        used.append("made")
        return FusedRows(config, state, builder)

    monkeypatch.setattr(FusedRows, "create", lambda *args: None)
    want = drive(build(models, "repeated", **options), case)
    monkeypatch.setattr(FusedRows, "create", create)
    got = drive(build(models, "repeated", **options), case)
    assert used == ["made"]
    assert got == want


@pytest.mark.parametrize(("case", "device"), places([(0, 40), (3, 64), (15, 64)], [(0, 20), (3, 40), (7, 60)]))
@pytest.mark.parametrize("synthetic", [False, True])
def test_commit_equals_verify(case: tuple[int, int], device: str, synthetic: bool) -> None:
    check_commit(commit, case, device, synthetic=synthetic)


@pytest.mark.parametrize(("case", "device"), places([6, 12], [6]))
def test_a_block_of_any_width(case: int, device: str) -> None:
    check_commit(commit, (5, 40), device, synthetic=False, W=case)


@pytest.mark.parametrize(("case", "device"), places([1, 300], [40]))
@pytest.mark.parametrize("length", [1.0, 2.25, 6.5])
def test_coins_of_synthetic_acceptance(case: int, device: str, length: float) -> None:
    generator = torch.Generator().manual_seed(case)
    # As in the slot state: a column of a table.
    seed_S = torch.randint(-(2**63), 2**63 - 1, (500, 6), generator=generator).to(device)[:, 4]
    slots_R = torch.randperm(500, generator=generator)[:case].to(device)
    position_R = torch.randint(0, 2**40, (case,), generator=generator).to(device)
    want = synthetic_accepted(length, seed_S[slots_R], position_R)
    assert torch.equal(accepted_by_coin(length, seed_S, slots_R, position_R), want)
