"""Log-probabilities of prompt tokens: the raw model's, however the prompt was cut, cached, preempted or shared out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.runner import prompt_scores
from tests.toy import make_drafter, make_target


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("scores")
    target = make_target(root / "target")
    return target, make_drafter(root / "drafter", target)


@pytest.fixture(scope="module")
def reference(models) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()


def engine(models: tuple[Path, Path], **options: Any) -> LLM:
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(models[1]))
    settings = dict(max_model_len=120, max_num_seqs=4, max_num_batched_tokens=32, block_size=8, num_blocks=100)
    settings |= options
    return LLM(str(models[0]), speculative_config=spec, dtype="float32", threads=1, debug_checks=True, **settings)


def prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (40, 1, 9, 33, 2)]


def assert_scored(model: torch.nn.Module, prompt: list[int], entries: Any, num_top: int) -> None:
    assert len(entries) == len(prompt)
    assert entries[0] is None
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for position in range(1, len(prompt)):
        row, entry, token = rows[position - 1], entries[position], prompt[position]
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert entry.rank == 1 + int((row > row[token]).sum())
        best = row.topk(num_top) if num_top else None
        assert list(entry.top_ids) == ([] if best is None else best.indices.tolist())
        assert list(entry.top_logprobs) == pytest.approx([] if best is None else best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(("depth", "programs"), [(0, "eager"), (1, "repeated")])
def test_equal_to_transformers_in_mixed_batches(models, reference, depth, programs, monkeypatch):
    """Chunks of any length, head calls of five rows, neighbours that decode; asked for twice, the cache is not read."""
    monkeypatch.setattr(prompt_scores, "_MAX_LOGITS", 5 * 320)
    texts = prompts(1)
    params = [SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=n, logprobs=1) for n in (2, 0, None, 4, 1)]
    with engine(models, pipeline_depth=depth, decode_programs=programs, draft_len_choices=[0, 7]) as llm:
        first = llm.generate(texts, params)
        again = llm.generate(texts, params)
        plain = llm.generate(texts[0], SamplingParams(max_tokens=1))[0]
        llm.core.check_integrity()
    for text, p, one, two in zip(texts, params, first, again, strict=True):
        if p.prompt_logprobs is None:
            assert one.prompt_logprobs is None
            assert two.metrics.num_cached_tokens == 8
        else:
            assert_scored(reference, text, one.prompt_logprobs, p.prompt_logprobs)
            assert two.prompt_logprobs == one.prompt_logprobs
            assert two.metrics.num_cached_tokens == 0
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert plain.metrics.num_cached_tokens == 32, "scored prompts enter the cache for others"


def test_a_preempted_prompt_is_scored_once(models, reference):
    """A request that loses its blocks, while it decodes or between two chunks of its prompt, repeats nothing."""
    texts = [(text * 40)[:40] for text in prompts(2)]
    params = [SamplingParams(temperature=0.0, max_tokens=40, prompt_logprobs=1, ignore_eos=True)] * len(texts)
    with engine(models, pipeline_depth=1, num_blocks=20, max_model_len=90, max_num_batched_tokens=32) as llm:
        results = llm.generate(texts, params)
        assert llm.core.counters().preemptions > 0
        llm.core.check_integrity()
    for text, result in zip(texts, results, strict=True):
        assert_scored(reference, text, result.prompt_logprobs, 1)


def test_two_ranks_report_the_whole_vocabulary(models, reference):
    text = prompts(3)[3]
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3, n=2)
    with engine(models, tensor_parallel_size=2) as llm:
        result = llm.generate(text, params)[0]
    assert_scored(reference, text, result.prompt_logprobs, 3)


def test_more_alternatives_than_a_message_holds_are_refused(models):
    with engine(models, max_num_batched_tokens=200_000) as llm:
        with pytest.raises(ValueError, match=r"^prompt_logprobs: with max_num_batched_tokens = 200000 at most 1"):
            llm.generate([1, 2], SamplingParams(prompt_logprobs=5))
        assert len(llm.generate([1, 2], SamplingParams(prompt_logprobs=1, max_tokens=1))[0].prompt_logprobs) == 2
