"""Penalties, logit bias, allowed ids and bad words: equal to transformers' processors and to a brute-force reading, the
same with and without drafts, at both depths, in mixed batches, after a preemption and on two ranks."""

import itertools
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.bad_words import bad_word_token_ids
from engine.sampling import filters
from tests.engine.drafting import mixed_truth
from tests.engine.rules_oracle import assert_greedy
from tests.toy import EOS_ID, make_drafter, make_target

NUM_TOKENS = 24
NO_EOS = {"ignore_eos": True}
LETTERS = tuple(range(ord("a") - ord("!"), ord("z") - ord("!") + 1))  # ids of the toy tokenizer, whose first is "!"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("rules")
    target = make_target(root / "target")
    return target, make_drafter(root / "drafter", target)


@pytest.fixture(scope="module")
def reference(models) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()


def engine(models: tuple[Path, Path], draft_len: int | None, **options: Any) -> LLM:
    spec = None
    if draft_len is not None:
        spec = DFlashDecodingConfig(max_draft_len=draft_len, speculative_model=str(models[1]), enable_penalty=True)
    settings = dict(max_model_len=120, max_num_seqs=4, max_num_batched_tokens=64, block_size=8, num_blocks=100)
    settings |= options
    return LLM(str(models[0]), speculative_config=spec, dtype="float32", threads=1, debug_checks=True, **settings)


@pytest.fixture(scope="module")
def plain(models):
    with engine(models, None) as llm:
        yield llm


@pytest.fixture(scope="module")
def known() -> dict[int, list[int]]:
    """What `dflash` proposes, by the requests' seeds; tests replace it."""
    return defaultdict(list)


@pytest.fixture(scope="module", params=[(0, "eager"), (1, "repeated")], ids=str)
def dflash(models, known, request):
    """Proposes the known text with probability 0.8 per token, so that blocks of every length are accepted."""
    depth, programs = request.param
    with engine(models, 7, pipeline_depth=depth, decode_programs=programs, draft_len_choices=[0, 7]) as llm:
        mixed_truth(llm, known, p_right=0.8, seed=1)
        yield llm


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in range(5, 5 + 4 * count, 4)]


def outputs(llm: LLM, texts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [list(result.outputs[0].token_ids) for result in llm.generate(texts, params)]


@pytest.fixture
def speculated(dflash, known):
    """Runs requests whose outputs are known on `dflash`; its blocks were accepted in part."""

    def run(texts: list[list[int]], params: list[SamplingParams], truth: list[list[int]]) -> list[list[int]]:
        known.clear()
        known.update({p.seed: text + tokens for text, tokens, p in zip(texts, truth, params, strict=True)})
        before = dflash.core.counters().num_accepted_tokens
        found = outputs(dflash, texts, params)
        assert dflash.core.counters().num_accepted_tokens - before > 10, "the proposals were meant to be accepted often"
        return found

    return run


def draw_params(rng: random.Random, seed: int, vocabulary: list[int]) -> SamplingParams:
    """Options drawn at random, greedy or seeded; about one in five asks for nothing."""

    def maybe(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.45 else neutral

    letters = "abcdefghijklmnopqrstuvwxyz"
    return SamplingParams(
        temperature=maybe(0.9, 0.0),
        top_k=maybe(20, 0),
        seed=seed,
        max_tokens=NUM_TOKENS,
        min_tokens=maybe(8, 0),
        repetition_penalty=maybe(rng.choice((0.7, 1.2, 1.8)), 1.0),
        presence_penalty=maybe(rng.choice((-1.0, 0.6, 1.5)), 0.0),
        frequency_penalty=maybe(rng.choice((-0.4, 0.3, 1.1)), 0.0),
        logit_bias=maybe({i: rng.uniform(-6, 6) for i in rng.sample(vocabulary, 12)}, None),
        allowed_token_ids=maybe(tuple(rng.sample(vocabulary, 30)), None),
        bad_words=maybe(tuple(rng.choice(letters) + rng.choice(("", rng.choice(letters))) for _ in range(9)), None),
        logprobs=maybe(2, None),
    )


def test_repetition_penalty_equals_transformers(plain, speculated, reference):
    texts = prompts(3, seed=1)
    params = [
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=i, repetition_penalty=r, **NO_EOS)
        for i, r in enumerate((1.15, 1.5, 0.8))
    ]
    truth = []
    for text, p in zip(texts, params, strict=True):
        generated = reference.generate(
            torch.tensor([text]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            repetition_penalty=p.repetition_penalty,
            eos_token_id=None,
            pad_token_id=0,
        )
        truth.append(generated[0, len(text) :].tolist())
    assert outputs(plain, texts, params) == truth
    assert speculated(texts, params, truth) == truth
    unpenalised = [SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=i, **NO_EOS) for i in range(3)]
    assert all(a != b for a, b in zip(outputs(plain, texts, unpenalised), truth, strict=True))


def test_bias_bad_words_and_allowed_ids_equal_transformers(plain, speculated, reference):
    """Few letters are allowed, so that words of two and three tokens come up again and again, inside blocks as well."""
    text = prompts(1, seed=2)[0]
    base = {"temperature": 0.0, "max_tokens": 40, "seed": 0, "allowed_token_ids": LETTERS[:4], **NO_EOS}
    said = outputs(plain, [text], [SamplingParams(**base)])[0]
    decode = plain.tokenizer.decode
    pairs = [decode(list(pair)) for pair, _ in Counter(itertools.pairwise(said)).most_common(2)]
    words = ["z", *pairs, decode([*LETTERS[:3]]), decode([LETTERS[1], LETTERS[0], LETTERS[0]])]
    ids = [list(word) for word in bad_word_token_ids(plain.tokenizer, words)]
    assert [len(word) for word in ids] == [1, 2, 2, 3, 3]
    bias = {LETTERS[0]: 1.5, LETTERS[3]: -0.5}
    params = SamplingParams(**base, bad_words=tuple(words), logit_bias=bias)

    def expected(bad_words_ids: list[list[int]]) -> list[int]:
        generated = reference.generate(
            torch.tensor([text]),
            max_new_tokens=40,
            do_sample=False,
            bad_words_ids=bad_words_ids,
            sequence_bias={(token_id,): value for token_id, value in bias.items()},
            prefix_allowed_tokens_fn=lambda batch, sentence: list(LETTERS[:4]),
            eos_token_id=None,
            pad_token_id=0,
        )
        return generated[0, len(text) :].tolist()

    truth = [expected(ids)]
    assert truth[0] != expected(ids[:3]), "the words of three tokens decide"
    assert truth[0] != expected([ids[0], *ids[3:]]), "the words of two tokens decide"
    assert outputs(plain, [text], [params]) == truth
    assert speculated([text], [params], truth) == truth


@pytest.mark.parametrize("seed", range(3))
def test_drawn_options_in_mixed_batches(plain, speculated, reference, seed):
    """Greedy rows against the brute-force reading; every row the same alone, in a batch, with and without drafts."""
    rng = random.Random(seed)
    texts = prompts(4, seed=100 + seed)
    params = [draw_params(rng, 10 * seed + i, list(range(256))) for i in range(4)]
    alone = [outputs(plain, [text], [p])[0] for text, p in zip(texts, params, strict=True)]
    assert outputs(plain, texts, params) == alone
    assert speculated(texts, params, alone) == alone
    for text, p, output in zip(texts, params, alone, strict=True):
        if p.temperature == 0.0:
            bad_words = bad_word_token_ids(plain.tokenizer, p.bad_words or ())
            assert_greedy(reference, text, output, p, bad_words=bad_words, stop_ids=(EOS_ID,))


def test_every_option_decides_somewhere(plain, reference):
    """Each option alone changes the greedy output, and exactly as the brute-force reading says."""
    text = prompts(2, seed=7)[1]
    base = {"temperature": 0.0, "max_tokens": 40, "seed": 0, **NO_EOS}
    said = outputs(plain, [text], [SamplingParams(**base)])[0]
    for options in (
        {"repetition_penalty": 1.4},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"logit_bias": {said[0]: -50.0}},
        {"allowed_token_ids": tuple(range(50, 90))},
        {"logit_bias": {5: 4.0}, "presence_penalty": -2.0},
        {"bad_words": ("a", "bc"), "logit_bias": {LETTERS[0]: 40.0, LETTERS[1]: 30.0, LETTERS[2]: 30.0}},
    ):
        params = SamplingParams(**base, **options)
        output = outputs(plain, [text], [params])[0]
        bad_words = bad_word_token_ids(plain.tokenizer, params.bad_words or ())
        assert assert_greedy(reference, text, output, params, bad_words=bad_words) > 0, options


@pytest.mark.parametrize(("depth", "prefix_caching"), [(0, True), (1, False)])
def test_preempted_requests_count_on(models, plain, depth, prefix_caching):
    """Emitted tokens still count as output, and the prompt as prompt, when a request is recomputed."""
    texts = [text * 2 for text in prompts(4, seed=20)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.9)[i % 2],
            seed=i,
            max_tokens=44,
            repetition_penalty=1.3,
            frequency_penalty=0.7,
            presence_penalty=0.4,
            bad_words=("ab", "q", "xyz"),
            **NO_EOS,
        )
        for i in range(4)
    ]
    truth = [outputs(plain, [text], [p])[0] for text, p in zip(texts, params, strict=True)]
    with engine(
        models, 7, pipeline_depth=depth, num_blocks=22, max_model_len=100, enable_prefix_caching=prefix_caching
    ) as tight:
        known = {i: text + tokens for i, (text, tokens) in enumerate(zip(texts, truth, strict=True))}
        mixed_truth(tight, known, p_right=0.7, seed=3)
        assert outputs(tight, texts, params) == truth
        assert tight.core.counters().preemptions > 0


def test_logprobs_stay_those_of_the_unchanged_logits(dflash, known, reference):
    text = prompts(1, seed=30)[0]
    params = SamplingParams(
        temperature=0.0, max_tokens=12, seed=0, logprobs=2, repetition_penalty=1.5, logit_bias={9: 40.0}, **NO_EOS
    )
    known[0] = text + [9] * 12
    result = dflash.generate([text], params)[0].outputs[0]
    assert set(result.token_ids) == {9}
    with torch.no_grad():
        rows = reference(torch.tensor([[*text, *result.token_ids]])).logits[0].log_softmax(-1)
    for at, entry in enumerate(result.logprobs):
        row = rows[len(text) + at - 1]
        assert entry.logprob == pytest.approx(row[9].item(), abs=1e-4)
        assert list(entry.top_ids) == row.topk(2).indices.tolist()


def test_two_ranks_decide_alike(models, plain):
    rng = random.Random(77)
    texts = prompts(4, seed=40)
    params = [draw_params(rng, i, list(range(256))) for i in range(3)]
    params.append(
        SamplingParams(
            temperature=0.8,
            top_p=0.9,
            seed=3,
            max_tokens=NUM_TOKENS,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            bad_words=("ab", "q"),
            logit_bias={300: 3.0, 5: -3.0},
        )
    )
    truth = [outputs(plain, [text], [p])[0] for text, p in zip(texts, params, strict=True)]
    with engine(models, 7, tensor_parallel_size=2) as llm:
        assert outputs(llm, texts, params) == truth  # the drafter's own drafts: both ranks must hold the same ones


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"presence_penalty": 0.1},
            "presence_penalty: penalties are off in this deployment; leave it out or send 0, or ",
        ),
        ({"frequency_penalty": -1.0}, "frequency_penalty: penalties are off in this deployment"),
        (
            {"repetition_penalty": 1.1},
            "repetition_penalty: penalties are off in this deployment; leave it out or send 1, or serve with "
            "speculative_config.enable_penalty: true",
        ),
        ({"top_k": 5}, "top_k: this deployment has no such filter; leave it out, or serve with speculative_config.adv"),
        (
            {"top_p": 0.9},
            "top_p: this deployment has no such filter; leave it out, or serve with speculative_config.adv",
        ),
        ({"logit_bias": {320: 1.0}}, "logit_bias: token id 320 is not in the vocabulary, 0 .. 319"),
        ({"allowed_token_ids": [5, 320]}, "allowed_token_ids: token id 320 is not in the vocabulary"),
        (
            {"allowed_token_ids": [LETTERS[0]], "bad_words": ["ba"]},
            "allowed_token_ids: every allowed id may be ruled out by bad",
        ),
        ({"allowed_token_ids": [EOS_ID], "min_tokens": 1}, "allowed_token_ids: every allowed id may be ruled out"),
    ],
)
def test_refused_by_the_engine(stripped, options, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        stripped.generate([1, 2, 3], SamplingParams(**options))
    assert str(error.value).startswith(message)


@pytest.fixture(scope="module")
def stripped(models):
    """An engine without penalties and without filters."""
    spec = DFlashDecodingConfig(
        max_draft_len=7, speculative_model=str(models[1]), advanced_sampling_mode="no_topk_no_topp"
    )
    options = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, block_size=8, num_blocks=30)
    with LLM(str(models[0]), speculative_config=spec, dtype="float32", threads=1, **options) as llm:
        yield llm


def test_what_the_stripped_engine_still_serves(stripped, plain, monkeypatch):
    """min_p does not need the missing filters, whose work is skipped; neutral values ask for nothing."""
    monkeypatch.delattr(filters, "top_k_threshold")
    monkeypatch.delattr(filters, "top_p_threshold")
    params = SamplingParams(
        temperature=0.9, min_p=0.1, seed=5, max_tokens=12, top_p=1.0, top_k=-1, logit_bias={7: 5.0}, bad_words=("a",)
    )
    found = outputs(stripped, [[1, 2, 3]], [params])
    monkeypatch.undo()
    assert found == outputs(plain, [[1, 2, 3]], [params])
