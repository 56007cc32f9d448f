"""The kernels make of pieces of prompts, and of the rows between them, what the torch forms make."""

import pytest
import torch

from engine.runner.decode_programs import Variant
from engine.runner.results import pack
from tests.gpu.places import places
from tests.reference.piece_cases import Case, check_decision, check_inputs

pytest.importorskip("triton", reason="the package triton is not installed")

WIDTHS = [1, 2, 3, 7, 15]


@pytest.mark.parametrize(("width", "device"), places(WIDTHS, [1, 2, 7]))
def test_rows_of_the_target(width: int, device: str) -> None:
    for seed in range(1 if device == "cpu" else 4):
        case = Case(width, device, seed=seed)
        (want, want_inputs), (got, got_inputs) = case.inputs(fused=False), case.inputs(fused=True)
        check_inputs(case, got_inputs)
        for name in ("drafts_RK", "k_R", "committed_R", "finished_R"):
            assert torch.equal(getattr(got, name), getattr(want, name)), name
        assert torch.equal(got_inputs.ids_N, want_inputs.ids_N)
        assert torch.equal(got_inputs.positions_N, want_inputs.positions_N)
        assert torch.equal(got_inputs.context.slot_mapping_N, want_inputs.context.slot_mapping_N)
        (got_group,), (want_group,) = got_inputs.context.groups, want_inputs.context.groups
        assert torch.equal(got_group.kv_len_R, want_group.kv_len_R)
        assert torch.equal(got_group.q_start_R, want_group.q_start_R)


@pytest.mark.parametrize(("width", "device"), places(WIDTHS, [1, 2, 7]))
@pytest.mark.parametrize("variant", [Variant.GREEDY, Variant.DRAW])
@pytest.mark.parametrize("synthetic", [None, 2.5])
def test_decisions(width: int, device: str, variant: Variant, synthetic: float | None) -> None:
    for seed in range(1 if device == "cpu" else 8):  # the interpreter is slow
        torch_form = Case(width, device, seed=seed, synthetic=synthetic)
        kernels = Case(width, device, seed=seed, synthetic=synthetic)
        before = kernels.written()
        want, want_fed = torch_form.decide(variant, fused=False)
        got, got_fed = kernels.decide(variant, fused=True)
        if variant is Variant.GREEDY:
            check_decision(kernels, before, got, pack(got), got_fed)
        for own, other in zip(kernels.written(), torch_form.written(), strict=True):
            assert torch.equal(own, other)
        assert torch.equal(pack(got), pack(want))
        assert torch.equal(got_fed[1], want_fed[1])
        written_N = want_fed[1] > 0
        assert torch.equal(got_fed[0][written_N], want_fed[0][written_N])
