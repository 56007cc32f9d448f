"""The bookkeeping kernels decide what the torch forms decide: whole engines, and rows with every kind of end."""

from typing import Any

import pytest

from engine.runner.fused_rows import FusedRows
from tests.engine.test_decode_programs import build, drive, models  # noqa: F401  (a fixture)
from tests.gpu.places import places
from tests.reference.row_cases import check_commit

pytest.importorskip("triton", reason="the package triton is not installed")

from engine.kernels.commit_rows import commit


@pytest.mark.parametrize("programs", ["repeated", "graphs"])
@pytest.mark.parametrize(("case", "device"), places([1, 2, 3], []))
def test_engines_emit_the_same_tokens(
    case: int,
    device: str,
    programs: str,
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
    want = drive(build(models, programs, **options), case)
    monkeypatch.setattr(FusedRows, "create", create)
    got = drive(build(models, programs, **options), case)
    assert used == ["made"]
    assert got == want


@pytest.mark.parametrize(("case", "device"), places([(0, 40), (3, 64), (15, 64)], [(0, 20), (3, 40), (7, 60)]))
@pytest.mark.parametrize("length", [None, 1.0, 2.25, 6.5])
def test_commit_equals_verify(case: tuple[int, int], device: str, length: float | None) -> None:
    check_commit(commit, case, device, synthetic=length is not None, coin_of=length or 1.0)


@pytest.mark.parametrize(("case", "device"), places([6, 12], [6]))
def test_a_block_of_any_width(case: int, device: str) -> None:
    check_commit(commit, (5, 40), device, synthetic=False, W=case, coin_of=1.0)
