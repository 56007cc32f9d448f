"""Acceptance by decree follows its law and changes nothing else that a step promises."""

import pytest
import torch

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.sampling.synthetic import synthetic_accepted
from tests.toy import make_drafter, make_target


@pytest.mark.parametrize(("length", "low", "share"), [(6.5, 5, 0.5), (1.0, 0, 0.0), (2.25, 1, 0.25), (8.0, 7, 0.0)])
def test_the_law(length, low, share):
    position_R = torch.arange(4000)
    accepted_R = synthetic_accepted(length, torch.full_like(position_R, 7), position_R)
    assert set(accepted_R.tolist()) <= {low, low + 1}
    assert (accepted_R == low + 1).float().mean().item() == pytest.approx(share, abs=0.03)
    assert torch.equal(accepted_R, synthetic_accepted(length, torch.full_like(position_R, 7), position_R))


@pytest.mark.parametrize("decode_programs", ["eager", "repeated"])
def test_an_engine_emits_that_many_tokens_a_step(tmp_path, decode_programs):
    target = make_target(tmp_path / "target")
    spec = DFlashDecodingConfig(
        max_draft_len=7,
        speculative_model=str(make_drafter(tmp_path / "drafter", target)),
        draft_len_schedule={1: 7, 2: 3},
    )
    options = dict(dtype="float32", max_model_len=320, max_num_seqs=2, block_size=8, num_blocks=90, threads=1)
    options |= dict(decode_programs=decode_programs, synthetic_acceptance_length=4.5)
    with LLM(str(target), speculative_config=spec, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=110, ignore_eos=True, seed=3)
        outputs = llm.generate([[5, 6, 7]], params)
        assert len(outputs[0].outputs[0].token_ids) == 110
        counters = llm.core.counters()
        assert 1 + counters.num_accepted_tokens / counters.num_drafts == pytest.approx(4.5, abs=0.45)
        llm.generate([[5, 6, 7], [8, 9]], params)  # three drafts are all that a row of two has
        cells = {cell.draft_len: cell for cell in llm.core.counters().cells}
        assert cells[3].accepted == cells[3].at_risk
    with pytest.raises(ValueError, match=r"synthetic_acceptance_length: must lie between 1 and .* = 8, got 9"):
        LLM(str(target), speculative_config=spec, **(options | {"synthetic_acceptance_length": 9}))
