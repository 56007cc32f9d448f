"""Mixed steps in the shapes that large models have: heads of 128, bfloat16, the kernels that few rows of them take."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from tests.engine.mixed_steps import Arrival, run
from tests.toy import make_drafter, make_target

pytestmark = pytest.mark.gpu
FAR = 0.5  # float32 logits apart: bfloat16 moves them by less, a token of other K/V lies several below the largest


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("large")
    heads = dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, head_dim=128)
    target = make_target(
        root / "target", kind="qwen3", intermediate_size=6144, vocab_size=8192, initializer_range=0.03, **heads
    )
    drafter = make_drafter(root / "drafter", target, head_dim=128, block_size=16)
    return target, drafter


@pytest.mark.parametrize(("rows", "draft_len"), [(2, 15), (2, 7), (4, 7), (16, 7)])
def test_every_token_is_among_the_likeliest_of_transformers(models, rows, draft_len):
    """Requests that arrive two at a time, with prompts of one to 100 tokens, into batches of up to `rows`."""
    rng = random.Random(rows)
    requests = [
        Arrival(
            step=4 * (number // 2),
            prompt=[rng.randrange(8000) for _ in range(rng.choice((1, 17, 40, 100)))],
            params=SamplingParams(temperature=0.0, max_tokens=rng.randrange(8, 40), ignore_eos=True),
        )
        for number in range(3 * rows + 6)
    ]
    spec = DFlashDecodingConfig(
        max_draft_len=draft_len, speculative_model=str(models[1]), draft_len_schedule={rows: draft_len}
    )
    options = dict(dtype="bfloat16", device="cuda", max_model_len=256, block_size=16, num_blocks=rows * 16 + 17)
    options |= dict(max_num_seqs=rows, max_num_batched_tokens=128, draft_len_choices=[0, draft_len], pipeline_depth=1)
    with LLM(str(models[0]), speculative_config=spec, decode_programs="graphs", **options) as llm:
        found = run(llm, requests, schedules={})
        llm.core.check_integrity()
    assert len(found.mixed) >= 3
    reference = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).to("cuda").eval()
    for request, tokens in zip(requests, found.tokens, strict=True):
        assert len(tokens) == request.params.max_tokens
        ids = torch.tensor([[*request.prompt, *tokens]], device="cuda")
        with torch.no_grad():
            logits = reference(ids).logits[0, len(request.prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        below = logits.amax(dim=1) - chosen
        assert below.max() < FAR, (request.prompt, tokens, below.tolist())
        typical = (logits.amax(dim=1) - logits.mean(dim=1)).min()
        assert typical > 4 * FAR, "the reference knows no token from another"
