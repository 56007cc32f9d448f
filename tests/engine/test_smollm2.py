"""The real model and the real drafter: lossless against stored `transformers` tokens, the reference's acceptance."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.request import EngineRequest
from tests.engine.drafting import spoil
from tests.reference.dflash_loop import ReferenceDrafter, dflash_generate

REFERENCE = Path(__file__).parent.parent / "data" / "greedy_smollm2_f32.json"
CASES = json.loads(REFERENCE.read_text())["cases"]
NUM_TOKENS = 48
# Two of each set; the whole file is the slow test below and `benchmarks/lossless.py`.
SUBSET = CASES[0:40:20] + CASES[5:60:20]


@pytest.fixture(scope="module")
def make(smollm2_dir, smollm2_drafter_dir):
    def build(draft_len: int, dtype: str = "float32", **options) -> LLM:
        spec = None
        if draft_len:
            spec = DFlashDecodingConfig(max_draft_len=draft_len, speculative_model=str(smollm2_drafter_dir))
        # One thread: tests run side by side, and a team of threads waits at every barrier for one that has no core.
        settings = dict(max_model_len=640, max_num_seqs=8, max_num_batched_tokens=512, num_blocks=400, threads=1)
        return LLM(str(smollm2_dir), speculative_config=spec, dtype=dtype, **(settings | options))

    return build


def outputs(llm: LLM, cases, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, detokenize=False)
    return [list(o.outputs[0].token_ids) for o in llm.generate([c["prompt_token_ids"] for c in cases], params)]


def accepted_per_step(llm: LLM, prompt: list[int], num_tokens: int, stop_after: int | None = None) -> list[int]:
    """Accepted drafts of every decode step; stop_after: abort after so many steps, in the middle of the text."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    llm.core.add_request(EngineRequest(request_id="probe", prompt_token_ids=tuple(prompt), params=params))
    accepted = []
    while llm.core.has_work():
        accepted += [d.num_accepted for d in llm.core.step() if d.is_decode_step and d.token_ids]
        if stop_after is not None and len(accepted) == stop_after:
            llm.core.abort("probe")
    return accepted


@pytest.mark.parametrize(("draft_len", "depth"), [(0, 0), (15, 0), (15, 1)])
def test_float32_equals_transformers(make, draft_len, depth):
    with make(draft_len, pipeline_depth=depth) as llm:
        found = outputs(llm, SUBSET)
        assert found == [c["token_ids"][:NUM_TOKENS] for c in SUBSET]
        if draft_len:
            counters = llm.core.counters()
            assert counters.num_accepted_tokens / counters.num_drafts > 0.4, "acceptance is far below the drafter's"


def test_acceptance_is_the_reference_loops(make, smollm2_dir, smollm2_drafter_dir):
    """Every step accepts what a loop of HF modules without any cache accepts; also warm, and after an abort."""
    prompt = CASES[21]["prompt_token_ids"]
    num_tokens = 60
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    drafter = ReferenceDrafter(smollm2_drafter_dir)
    expected = dflash_generate(model, drafter, prompt, max_new_tokens=num_tokens, draft_len=15)
    with make(15, max_num_seqs=2) as llm:
        cold = accepted_per_step(llm, prompt, num_tokens)
        assert cold == expected.accepted and len(cold) >= 8
        assert sum(cold) > 10
        before = llm.core.counters().prefix_cache_hits
        assert accepted_per_step(llm, prompt, num_tokens) == cold, "a warm prefix cache changed acceptance"
        assert llm.core.counters().prefix_cache_hits > before
        assert accepted_per_step(llm, prompt, num_tokens, stop_after=5) == cold[:5]
        assert accepted_per_step(llm, prompt, num_tokens) == cold, "an abort in mid-text left something behind"


def test_bfloat16_is_bit_for_bit_at_one_shape(make):
    """Part 1 of lossless: real drafts against the same program with every draft spoiled."""
    cases = CASES[1:60:20]
    with make(7, dtype="bfloat16", max_num_seqs=1) as llm:
        real = outputs(llm, cases)
        accepted = llm.core.counters().num_accepted_tokens
    with make(7, dtype="bfloat16", max_num_seqs=1) as llm:
        spoil(llm)
        assert outputs(llm, cases) == real
        assert llm.core.counters().num_accepted_tokens == 0
    assert accepted > 10


def test_bfloat16_stays_within_the_margin(make, smollm2_dir):
    """Part 2: teacher-forced through `transformers` in bfloat16, emitted tokens are at most a rounding below the
    maximum, and DFlash shows no more flips than plain decoding."""
    cases = CASES[2:60:20]
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16).eval()

    known: dict[tuple[int, ...], torch.Tensor] = {}  # the forced pass is most of the test, and many texts are the same

    def below_the_maximum(prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """How far each of the tokens' logits lies below the largest, [N]."""
        text = (*prompt, *tokens)
        if text not in known:
            with torch.no_grad():
                logits_NV = model(torch.tensor([text]), logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
            known[text] = logits_NV.amax(dim=1) - logits_NV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return known[text]

    def flips_and_margin(draft_len: int) -> tuple[int, float]:
        with make(draft_len, dtype="bfloat16") as llm:
            found = outputs(llm, cases)
        below = [below_the_maximum(c["prompt_token_ids"], ids) for c, ids in zip(cases, found, strict=True)]
        below_N = torch.cat(below)
        return int((below_N > 0).sum()), float(below_N.max())

    plain_flips, plain_margin = flips_and_margin(0)
    flips, margin = flips_and_margin(15)
    # Two bfloat16 steps at the size of these logits (16 to 32): 0.25.
    assert plain_margin <= 0.25 and margin <= 0.25
    assert flips <= max(plain_flips, 2)


@pytest.mark.slow
@pytest.mark.parametrize("draft_len", [0, 15])
def test_float32_equals_transformers_everywhere(make, draft_len):
    with make(draft_len) as llm:
        assert outputs(llm, CASES, 128) == [c["token_ids"] for c in CASES]
