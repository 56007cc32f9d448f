"""A draft never changes what is emitted: DFlash == plain == transformers, on toy targets in float32."""

import itertools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import LLM, DFlashDecodingConfig, SamplingParams
from tests.engine.drafting import after_drafts, mixed_truth, spoil
from tests.toy import EOS_ID, VOCAB_SIZE, make_drafter, make_target

NUM_TOKENS = 40
KINDS = ("llama", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    made = {}
    for kind in KINDS:
        root = tmp_path_factory.mktemp(kind)
        target = make_target(root / "target", kind=kind)
        made[kind] = (target, make_drafter(root / "drafter", target))
    return made


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def reference(target: Path, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    out = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, pad_token_id=EOS_ID)
    return out[0].tolist()


def engine(models: tuple[Path, Path], draft_len: int | None, rejection: bool = False, **options) -> LLM:
    target, drafter = models
    spec = None
    if draft_len is not None:
        spec = DFlashDecodingConfig(
            max_draft_len=draft_len, speculative_model=str(drafter), use_rejection_sampling=rejection
        )
    settings = dict(
        dtype="float32", max_model_len=160, max_num_seqs=4, max_num_batched_tokens=64, block_size=8, num_blocks=120
    )
    settings |= options
    return LLM(str(target), speculative_config=spec, threads=1, debug_checks=True, **settings)


def greedy(count: int, num_tokens: int = NUM_TOKENS) -> list[SamplingParams]:
    return [SamplingParams(temperature=0.0, max_tokens=num_tokens, seed=i) for i in range(count)]


def ids(outputs) -> list[list[int]]:
    return [list(o.prompt_token_ids) + list(o.outputs[0].token_ids) for o in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers(models, kind):
    texts = prompts(4)
    truth = [reference(models[kind][0], p) for p in texts]
    with engine(models[kind], None) as plain:
        assert ids(plain.generate(texts, greedy(4))) == truth
    for draft_len, depth in ((7, 0), (7, 1), (3, 0)):
        with engine(models[kind], draft_len, pipeline_depth=depth) as llm:
            mixed_truth(llm, dict(enumerate(truth)), p_right=0.8, seed=draft_len)
            assert ids(llm.generate(texts, greedy(4))) == truth
            counters = llm.core.counters()
            assert counters.num_accepted_tokens > 20, "the proposals were meant to be accepted often"


@pytest.mark.parametrize(
    ("depth", "chunk", "blocks", "prefix_caching"),
    [(0, 64, 40, True), (1, 64, 40, True), (0, 16, 120, False), (1, 16, 48, True)],
)
def test_greedy_under_pressure(models, depth, chunk, blocks, prefix_caching):
    """Small pools force preemption, small chunks split prompts, repeated prompts hit the prefix cache."""
    base = prompts(6, seed=3)
    texts = [*base, base[0][:20] + base[1], base[2], base[2]]
    with engine(models["llama"], None, num_blocks=400, max_num_seqs=9) as plain:
        truth = ids(plain.generate(texts, greedy(len(texts))))
    with engine(
        models["llama"],
        7,
        pipeline_depth=depth,
        max_num_batched_tokens=max(chunk, 40),
        num_blocks=blocks,
        enable_prefix_caching=prefix_caching,
    ) as llm:
        mixed_truth(llm, dict(enumerate(truth)), p_right=0.7, seed=5)
        assert ids(llm.generate(texts, greedy(len(texts)))) == truth
        llm.core.check_integrity()


@pytest.mark.parametrize("depth", [0, 1])
def test_seeded_sampling_ignores_drafts_and_neighbours(models, depth):
    texts = prompts(5, seed=9)
    params = [
        SamplingParams(temperature=0.9, top_p=0.9, top_k=(0, 40)[i % 2], max_tokens=30, seed=1000 + i) for i in range(5)
    ]
    with engine(models["qwen3"], None) as plain:
        alone = [ids(plain.generate([t], [p]))[0] for t, p in zip(texts, params, strict=True)]
        together = ids(plain.generate(texts, params))
    assert together == alone
    with engine(models["qwen3"], 7, pipeline_depth=depth) as llm:
        mixed_truth(llm, {1000 + i: t for i, t in enumerate(alone)}, p_right=0.75, seed=2)
        assert ids(llm.generate(texts[::-1], params[::-1]))[::-1] == alone
        assert llm.core.counters().num_accepted_tokens > 10


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_rejection_sampling_is_reproducible(models, depth, draft_sampling):
    """A seeded request's tokens depend on neither its neighbours nor the order of the batch; greedy ones stay exact."""
    texts = prompts(5, seed=9)
    params = [
        SamplingParams(temperature=(0.9, 0.0)[i == 2], top_p=0.9, top_k=(0, 40)[i % 2], max_tokens=30, seed=50 + i)
        for i in range(5)
    ]
    options = dict(rejection=True, draft_sampling=draft_sampling, pipeline_depth=depth)
    with engine(models["qwen3"], 7, **options) as llm:
        alone = [ids(llm.generate([t], [p]))[0] for t, p in zip(texts, params, strict=True)]
        assert ids(llm.generate(texts[::-1], params[::-1]))[::-1] == alone
    with engine(models["qwen3"], None) as plain:
        exact = ids(plain.generate(texts, params))
    assert alone[2] == exact[2]
    assert alone != exact


@pytest.mark.parametrize("depth", [0, 1])
def test_spoiled_drafts_accept_nothing(models, depth):
    texts = prompts(3, seed=4)
    with engine(models["llama"], 7, pipeline_depth=depth) as llm:
        with engine(models["llama"], None) as plain:
            truth = ids(plain.generate(texts, greedy(3)))
        spoil(llm)
        assert ids(llm.generate(texts, greedy(3))) == truth
        counters = llm.core.counters()
        assert counters.num_accepted_tokens == 0 and counters.num_draft_tokens > 50


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_id_inside_an_accepted_block(models, depth):
    text = prompts(1, seed=11)[0]
    with engine(models["llama"], None) as plain:
        full = ids(plain.generate([text], greedy(1, 60)))[0]
    output = full[len(text) :]
    for at in (2, 5, 11):
        stop = output[at]
        first = output.index(stop)
        params = SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=(stop,), seed=0)
        with engine(models["llama"], 7, pipeline_depth=depth) as llm:
            mixed_truth(llm, {0: full}, p_right=1.0, seed=0)
            result = llm.generate([text], params)[0].outputs[0]
            assert list(result.token_ids) == output[: first + 1]
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 17])
def test_max_tokens_is_exact(models, depth, max_tokens):
    text = prompts(1, seed=12)[0]
    with engine(models["llama"], None) as plain:
        full = ids(plain.generate([text], greedy(1, 40)))[0]
    with engine(models["llama"], 7, pipeline_depth=depth) as llm:
        mixed_truth(llm, {0: full}, p_right=1.0, seed=0)
        result = llm.generate([text], SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0))[0].outputs[0]
    assert list(result.token_ids) == full[len(text) : len(text) + max_tokens]
    assert result.finish_reason == "length"


def test_runs_to_the_end_of_the_context(models):
    """max_model_len is reached exactly, with drafts that would run past it (peers: query positions past the limit)."""
    text = prompts(1, seed=13, longest=30)[0]
    params = SamplingParams(temperature=0.0, max_tokens=None, seed=0, ignore_eos=True)
    with engine(models["llama"], None, max_model_len=64) as plain:
        full = ids(plain.generate([text], params))[0]
    assert len(full) == 64
    with engine(models["llama"], 7, max_model_len=64) as llm:
        mixed_truth(llm, {0: full}, p_right=1.0, seed=0)
        assert ids(llm.generate([text], params))[0] == full


def test_drafter_position_table_ends_drafting_not_decoding(models, tmp_path):
    """Past the drafter's position table a request decodes on without drafts (peers: illegal access)."""
    target = models["llama"][0]
    short = make_drafter(tmp_path / "short", target, max_position_embeddings=48)
    text = prompts(1, seed=14, longest=20)[0]
    params = SamplingParams(temperature=0.0, max_tokens=80, seed=0, ignore_eos=True)
    with engine((target, short), None) as plain:
        full = ids(plain.generate([text], params))[0]
    with engine((target, short), 7) as llm:
        mixed_truth(llm, {0: full}, p_right=1.0, seed=0)
        result = llm.generate([text], params)[0]
        assert ids([result])[0] == full
        assert 0 < result.metrics.speculative_decoding.num_draft_tokens < 48


def test_chunking_never_changes_the_drafts(models):
    """The drafter's context is complete after any chunking, prefix hit or K = 0 phase: same drafts, token for token."""
    text = prompts(1, seed=15)[0] + prompts(1, seed=16)[0]
    params = SamplingParams(temperature=0.0, max_tokens=24, seed=0, ignore_eos=True)

    def drafts(llm: LLM) -> list[tuple[int, tuple[int, ...]]]:
        seen = []

        def record(slots_S, draft_len):
            state = llm._rank.runner.state
            for slot in slots_S.tolist():
                count = int(state.draft_count[slot])
                if count:
                    at = int(state.committed_len[slot])
                    seen.append((at, tuple(state.draft_tokens[slot, :count].tolist())))

        take_out = after_drafts(llm, record)
        llm.generate([text], params)
        take_out()
        return seen

    with engine(models["llama"], 7, max_num_batched_tokens=128) as whole:
        expected = drafts(whole)
        assert len(expected) >= 20
        hit = drafts(whole)  # the second time the prompt comes from the prefix cache
        assert hit == expected
    with engine(models["llama"], 7, max_num_batched_tokens=40) as chunked:
        assert drafts(chunked) == expected
    with engine(models["llama"], 7, max_num_batched_tokens=128) as paused:
        by_position = dict(expected)
        paused.core.apply_schedule((1, 1), {4: 0})
        step, count = paused.core.step, itertools.count()

        def resume_later():
            if next(count) == 10:
                paused.core.apply_schedule((1, 2), {4: 7})
            return step()

        paused.core.step = resume_later
        late = drafts(paused)
        assert late and all(by_position[at] == tokens for at, tokens in late if at in by_position)
        assert any(at in by_position for at, _ in late)


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_never_changes_the_drafts(models, depth):
    """A request that lost its blocks drafts, at every position, what it drafts when it is left alone."""
    texts = prompts(3, seed=21, longest=40)

    def drafts(llm: LLM) -> dict[tuple[int, int], tuple[int, ...]]:
        state, seen = llm._rank.runner.state, {}

        def record(slots_S, draft_len):
            for slot in slots_S.tolist():
                count = int(state.draft_count[slot])
                if count:
                    key = state.init_of(slot).seed, int(state.committed_len[slot])
                    seen[key] = tuple(state.draft_tokens[slot, :count].tolist())

        after_drafts(llm, record)
        llm.generate(texts, greedy(3))
        return seen

    with engine(models["llama"], 7, pipeline_depth=depth) as roomy:
        expected = drafts(roomy)
        assert roomy.core.counters().preemptions == 0
    small = dict(num_blocks=22, max_model_len=140, enable_prefix_caching=False)
    with engine(models["llama"], 7, pipeline_depth=depth, **small) as tight:
        assert drafts(tight) == expected
        assert tight.core.counters().preemptions > 0


def test_logprobs_are_the_raw_models(models):
    target = models["llama"][0]
    text = prompts(1, seed=17)[0]
    with engine(models["llama"], None) as plain:
        full = ids(plain.generate([text], greedy(1, 20)))[0]
    with engine(models["llama"], 7) as llm:
        mixed_truth(llm, {0: full}, p_right=0.8, seed=0)
        result = llm.generate([text], SamplingParams(temperature=0.0, max_tokens=20, logprobs=3, seed=0))[0].outputs[0]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([full])).logits[0].log_softmax(-1)
    assert len(result.logprobs) == len(result.token_ids)
    for offset, entry in enumerate(result.logprobs):
        row = expected[len(text) + offset - 1]
        assert entry.token_id == full[len(text) + offset]
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        best = row.topk(3)
        assert list(entry.top_ids) == best.indices.tolist()
        assert list(entry.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("draft_len", "rejection", "draft_sampling"),
    [(None, False, None), (7, False, "greedy"), (7, True, "greedy"), (7, True, "probabilistic")],
)
def test_temperature_one_has_the_models_distribution(models, draft_len, rejection, draft_sampling):
    """First two tokens after one prompt, 1,500 seeds: chi-square against exact probabilities."""
    from scipy.stats import chisquare

    target = models["qwen3"][0]
    text = prompts(1, seed=18)[0]
    count = 1500
    params = [SamplingParams(temperature=1.0, max_tokens=3, seed=i, ignore_eos=True) for i in range(count)]
    roomy = dict(max_num_seqs=96, num_blocks=1200, max_num_batched_tokens=2048, draft_sampling=draft_sampling)
    with engine(models["qwen3"], draft_len, rejection=rejection, **roomy) as llm:
        if draft_sampling == "greedy":  # the other drafts must be the draws they claim to be
            guess = ids(llm.generate([text], greedy(1, 3)))[0]
            mixed_truth(llm, {i: guess for i in range(count)}, p_right=0.9, seed=1)
        outputs = llm.generate([text] * count, params)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        first_V = model(torch.tensor([text])).logits[0, -1].softmax(-1)
        following_VV = model(torch.tensor([[*text, t] for t in range(VOCAB_SIZE)])).logits[:, -1].softmax(-1)
    second_V = first_V @ following_VV
    for position, exact_V in ((0, first_V), (1, second_V)):
        observed = torch.bincount(
            torch.tensor([o.outputs[0].token_ids[position] for o in outputs]), minlength=VOCAB_SIZE
        )
        expected = exact_V.double() * count
        common = expected >= 5
        seen = torch.cat([observed[common].double(), observed[~common].sum()[None].double()])
        wanted = torch.cat([expected[common], expected[~common].sum()[None]])
        assert chisquare(seen.numpy(), (wanted * seen.sum() / wanted.sum()).numpy()).pvalue > 1e-3
