"""The CPU's bookkeeping kernels decide what the torch forms decide: whole engines, and rows with every kind of end."""

import weakref

import pytest
import torch

from engine.layers.cpu_jit import unavailable_reason
from engine.runner.cpu_bookkeeping import CpuBookkeeping
from engine.runner.fused_rows import FusedRows
from engine.sampling import sampler
from tests.engine.test_decode_programs import build, drive, models  # noqa: F401  (a fixture)
from tests.reference.row_cases import check_commit, random_rows

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=f"torch's kernels: {unavailable_reason()}")


@pytest.mark.parametrize("seed", [1, 2])
def test_engines_emit_the_same_tokens(seed, models, monkeypatch):  # noqa: F811
    options = {"pipeline_depth": seed % 2, "rejection": seed == 2}
    calls = []
    with monkeypatch.context() as patch:
        for name in ("target_rows", "commit", "store_drafts"):
            patch.setattr(CpuBookkeeping, name, noted(calls, name, getattr(CpuBookkeeping, name)))
        with build(models, "eager", **options) as llm:
            got = drive(llm, seed)
    assert {*calls} == {"target_rows", "commit", "store_drafts"}
    monkeypatch.setattr(FusedRows, "create", lambda *args: None)
    with build(models, "eager", **options) as llm:
        want = drive(llm, seed)
    assert got == want


def noted(calls, name, function):
    def run(*args, **options):
        calls.append(name)
        return function(*args, **options)

    return run


@pytest.mark.parametrize("case", [(0, 40), (1, 50), (3, 64), (15, 64)])
@pytest.mark.parametrize("synthetic", [False, True])
def test_commit_equals_verify(case: tuple[int, int], synthetic: bool) -> None:
    check_commit(CpuBookkeeping().commit, case, "cpu", synthetic=synthetic)


def test_places_of_results_are_kept_for_few_shapes() -> None:
    kernels, places = CpuBookkeeping(), []
    for rows in range(1, 60):
        slots, given, slots_R, drawn_RQ, peak_RQ, _ = random_rows(3, rows, "cpu")
        options = {"width": 3, "block_size": 16, "block_width": 8}
        target = kernels.target_rows(slots, slots_R, width=3, block_size=16)
        made = kernels.commit(
            slots,
            slots_R,
            given,
            drawn_RQ.flatten(),
            peak_RQ.flatten(),
            synthetic_R=None,
            mask_id=1,
            positions=64,
            **options,
        )
        places += [weakref.ref(target.ids_N), weakref.ref(made.packed)]
        del target, made
    kept = sum(place() is not None for place in places)
    assert 2 <= kept <= 40


@pytest.mark.parametrize("size", [8, 9, 1000, 49152])
def test_peaks_are_the_first_of_the_largest(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(9, size, generator=generator)
    x[1] = x[1].round()  # ties
    x[2] = float("-inf")
    x[3, -1] = x[4, 0] = 99.0
    x[5, size // 2] = float("inf")
    x[6, 3] = x[7, -1] = float("nan")
    x[8, size // 3 :] = x[8].max() + 1
    value, index = sampler.argmax_pair(x, 7)
    assert bool(value[6:8].isnan().all())
    want = x.max(dim=1)
    sound = [0, 1, 2, 3, 4, 5, 8]
    assert torch.equal(value[sound], want.values[sound])
    assert torch.equal(index[sound], want.indices[sound] + 7)
    assert bool(((index[6:8] >= 7) & (index[6:8] < 7 + size)).all())
    for rows in (1, 2):
        assert torch.equal(sampler.argmax_pair(x[:rows], 7)[1], index[:rows])
