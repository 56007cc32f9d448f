"""Draws under penalties, biases and bad words have exactly the distribution that those give, inside blocks as well."""

import itertools

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.bad_words import bad_word_token_ids
from tests.engine.drafting import mixed_truth
from tests.engine.rules_oracle import changed_logits
from tests.toy import make_drafter, make_target

COUNT = 800
PROMPT = [70, 71, 72, 73, 74, 75]
ALLOWED = tuple(range(64, 76))  # ids of "a" to "l" in the toy tokenizer, some of which the prompt holds
RULES = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "logit_bias": {64: 1.5, 66: -1.0, 70: 2.0},
    "allowed_token_ids": ALLOWED,
    "bad_words": ("b", "ag", "gal"),
}


@pytest.mark.parametrize("rejection", [False, True], ids=["exact match", "rejection sampling"])
def test_the_first_three_tokens(tmp_path, rejection):
    """Chi-square of 800 seeds with drafts that are right half of the time; the third token of a block counts two."""
    target = make_target(tmp_path / "target")
    spec = DFlashDecodingConfig(
        max_draft_len=3,
        speculative_model=str(make_drafter(tmp_path / "drafter", target)),
        enable_penalty=True,
        use_rejection_sampling=rejection,
    )
    params = [SamplingParams(seed=i, max_tokens=3, ignore_eos=True, **RULES) for i in range(COUNT)]
    options = dict(max_model_len=32, max_num_seqs=48, max_num_batched_tokens=512, block_size=8, num_blocks=300)
    with LLM(str(target), speculative_config=spec, dtype="float32", threads=1, **options) as llm:
        bad_words = bad_word_token_ids(llm.tokenizer, RULES["bad_words"])
        guess = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, **RULES))[0]
        known = PROMPT + list(guess.outputs[0].token_ids)
        mixed_truth(llm, {i: known for i in range(COUNT)}, p_right=0.8, seed=1)
        found = [result.outputs[0].token_ids for result in llm.generate([PROMPT] * COUNT, params)]
        assert llm.core.counters().num_accepted_tokens > COUNT // 8
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    paths = {(): 1.0}
    for position in range(3):
        prefixes = list(paths)
        with torch.no_grad():
            raw_NV = model(torch.tensor([PROMPT + list(prefix) for prefix in prefixes])).logits[:, -1].float()
        marginal = dict.fromkeys(ALLOWED, 0.0)
        longer: dict[tuple[int, ...], float] = {}
        for prefix, raw_V in zip(prefixes, raw_NV, strict=True):
            logits_V = changed_logits(raw_V, prompt=PROMPT, output=prefix, params=params[0], bad_words=bad_words)
            for token_id, probability in zip(ALLOWED, logits_V.softmax(-1)[list(ALLOWED)].tolist(), strict=True):
                longer[(*prefix, token_id)] = paths[prefix] * probability
                marginal[token_id] += paths[prefix] * probability
        paths = longer
        assert abs(sum(marginal.values()) - 1.0) < 1e-9
        compare([tokens[position] for tokens in found], marginal)
    compare(found, paths)


def compare(found: list, exact: dict) -> None:
    """Chi-square over the outcomes expected at least five times, the rest as one."""
    common = {outcome for outcome, probability in exact.items() if probability * len(found) >= 5}
    impossible = [outcome for outcome in found if exact[outcome] == 0.0]
    assert not impossible
    rest = sum(probability for outcome, probability in exact.items() if outcome not in common)
    expected = [exact[outcome] * len(found) for outcome in common] + ([rest * len(found)] if rest > 0 else [])
    counts = [found.count(outcome) for outcome in common]
    counts += [len(found) - sum(counts)] if rest > 0 else []
    assert len(counts) > 3
    assert chisquare(counts, expected).pvalue > 1e-3


def test_the_allowed_ids_are_letters(tmp_path):
    """The bad words above are made of allowed ids, of one, two and three tokens."""
    from engine.tokenizer import Tokenizer
    from tests.toy import make_tokenizer

    make_tokenizer(tmp_path)
    words = bad_word_token_ids(Tokenizer.load(tmp_path), RULES["bad_words"])
    assert [len(word) for word in words] == [1, 2, 3]
    assert set(itertools.chain(*words)) < set(ALLOWED)
