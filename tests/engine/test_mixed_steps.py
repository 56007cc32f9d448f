"""Law: prompts that run as rows beside decode rows change no token, and leave the K/V that their own programs leave.

Requests arrive while others decode; the programs of fixed shapes are called, in float32, and every run is compared with
the eager engine, which knows no pieces. Counts say that mixed steps were really taken.
"""

import random
import re

import pytest
import torch

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.row_buckets import row_buckets
from engine.runner import decode_programs, pieces
from engine.runner.runner import ModelRunner
from engine.step import PrefillChunk, StepPlan
from tests.engine.drafting import mixed_truth
from tests.engine.mixed_steps import Arrival, Run, arrivals, context_rows, run
from tests.engine.test_decode_programs import build
from tests.engine.test_not_finite import BAD_ID
from tests.engine.test_not_finite import models as models_with_a_bad_id  # noqa: F401  (a fixture)
from tests.toy import make_drafter, make_target

ALWAYS = {0: {5: 2}}
CHANGING = {0: {5: 2}, 6: {2: 7, 5: 2}, 11: {5: 7}, 17: {5: 0}, 21: {5: 7}, 30: {5: 2}}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixed")
    target = make_target(root / "target", kind="qwen3")
    return target, make_drafter(root / "drafter", target)


def kinds(count: int, *, greedy: bool = False, seed: int = 0) -> list[SamplingParams]:
    """max_tokens of 1 and more, stops that often end a request at once, minimum lengths; drawn in many ways."""
    rng, made = random.Random(seed), []
    for index in range(count):
        common = dict(max_tokens=1 if index % 5 == 4 else rng.randrange(8, 26), seed=index, ignore_eos=True)
        if index % 4 == 1:
            common |= dict(
                stop_token_ids=list(range(0, 256, 2)), min_tokens=min(rng.choice((0, 0, 4)), common["max_tokens"])
            )
        if greedy or index % 3 == 0:
            made.append(SamplingParams(temperature=0.0, **common))
        elif index % 3 == 1:
            made.append(SamplingParams(temperature=0.8, **common))
        else:
            made.append(SamplingParams(temperature=0.9, top_k=rng.choice((0, 20)), top_p=0.9, min_p=0.01, **common))
    return made


def both(models, requests: list[Arrival], *, schedules=ALWAYS, **options) -> tuple[Run, Run]:
    """What the eager engine and the one with programs make of the requests."""
    with build(models, "eager", **options) as llm:
        want = run(llm, requests, schedules=schedules)
    with build(models, "repeated", **options) as llm:
        got = run(llm, requests, schedules=schedules)
        llm.core.check_integrity()
    for index, request in enumerate(requests):
        own, other = got.tokens[index], want.tokens[index]
        if request.abort_after is None:
            assert (own, got.reasons[index]) == (other, want.reasons[index]), index
        else:
            common = min(len(own), len(other))
            assert own[:common] == other[:common]
    return want, got


def chunks(result: Run) -> list[tuple[int, int, bool]]:
    """(prompts of the step, tokens of the chunk behind its last whole piece, samples) of mixed steps."""
    return [
        (len(plan.prefill), len(chunk.token_ids) % (plan.draft_len + 1), chunk.samples)
        for plan in result.mixed
        for chunk in plan.prefill
    ]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("greedy", [True, False])
def test_tokens_of_arriving_requests(models, depth, greedy):
    """Several prompts at once, chunks that end in the middle of a piece, first tokens that stop or are the only one."""
    requests = arrivals(1, kinds(16, greedy=greedy, seed=depth))
    options = dict(pipeline_depth=depth, max_num_batched_tokens=26, debug_checks=depth == 0)
    _, got = both(models, requests, **options)
    found = chunks(got)
    assert len(got.mixed) > 8
    assert any(num > 1 for num, _, _ in found), "several prompts in one step"
    assert {True, False} == {samples for _, _, samples in found}
    assert {0, 1, 2} == {rest for _, rest, _ in found}
    firsts = [i for i, tokens in enumerate(got.tokens) if len(tokens) == 1]
    assert {got.reasons[i] for i in firsts} == {"stop", "length"}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("greedy", [True, False])
def test_prompts_that_come_together_to_an_idle_engine(models, depth, greedy):
    """Rows of one program with no decode row beside them, while the budget cuts the last of them; alone, a prompt is
    none. The second burst finds what the first left in the slots."""
    sampling = kinds(9, greedy=greedy, seed=20 + depth)
    requests = arrivals(13, sampling, every=0, longest=30)
    for index, request in enumerate(requests):
        request.step = (0, 0, 0, 0, 200, 300, 300, 300, 300)[index]
    options = dict(pipeline_depth=depth, max_num_batched_tokens=60, debug_checks=depth == 0)
    _, got = both(models, requests, **options)
    bursts = [plan for plan in got.mixed if not plan.decode_slots]
    assert len(bursts) == 2 and all(len(plan.prefill) > 2 for plan in bursts)
    assert any(not chunk.samples for plan in bursts for chunk in plan.prefill)
    alone = [plan for plan in got.plans if len(plan.prefill) == 1 and not plan.decode_slots]
    assert alone and not {plan.step_id for plan in alone} & {plan.step_id for plan in got.mixed}


@pytest.mark.parametrize("depth", [0, 1])
def test_draft_lengths_change_between_steps(models, depth):
    requests = arrivals(2, kinds(16, seed=2), every=3)
    _, got = both(models, requests, schedules=CHANGING, pipeline_depth=depth, max_num_batched_tokens=40)
    assert {plan.draft_len for plan in got.mixed} == {2, 7}
    assert any(plan.verify_len < plan.draft_len for plan in got.mixed)
    assert any(plan.prefill and plan.decode_slots and plan.draft_len == 0 for plan in got.plans)


def test_cached_prefixes_and_clients_that_hang_up(models):
    """Prompts that begin behind a hit, or whose client is gone before or in the middle of their first tokens."""
    prefix = [7 * n % 200 for n in range(30)]
    requests = arrivals(3, kinds(14, greedy=True, seed=3), every=3)
    for index, request in enumerate(requests):
        if index % 3 != 2:
            request.prompt = [*prefix[: 8 * (1 + index % 4)], *request.prompt[:13]]
        if index % 4 == 3:
            request.abort_after = index % 3
    _, got = both(models, requests, pipeline_depth=1, max_num_batched_tokens=30)
    starts = [chunk.start for plan in got.mixed for chunk in plan.prefill]
    assert len(got.mixed) > 8 and any(start % 8 == 0 and start > 0 for start in starts)
    assert sum(n > 0 for n in got.num_cached) > 2 and "abort" in got.reasons


def test_preempted_requests_come_back_as_pieces(models):
    params = [SamplingParams(temperature=0.0, max_tokens=40, seed=i, ignore_eos=True) for i in range(6)]
    requests = [
        Arrival(step=2 * i, prompt=[(31 * i + n) % 200 for n in range(20)], params=p) for i, p in enumerate(params)
    ]
    options = dict(pipeline_depth=1, max_num_batched_tokens=48, num_blocks=28, enable_prefix_caching=False)
    _, got = both(models, requests, **options)
    resumed = [len(chunk.token_ids) for plan in got.mixed for chunk in plan.prefill if chunk.start == 0]
    assert any(length > 20 for length in resumed), "with what they had emitted"


@pytest.mark.parametrize(
    ("draft_sampling", "rejection", "mixes"),
    [("greedy", True, True), ("coupled", False, True), ("probabilistic", True, False)],
)
def test_sampled_drafts_and_rejection_sampling(models, draft_sampling, rejection, mixes):
    """A piece verifies no draft; drafts behind it are chosen as its request asks."""
    requests = arrivals(4, kinds(12, seed=4))
    options = dict(rejection=rejection, draft_sampling=draft_sampling, max_num_batched_tokens=26)
    _, got = both(models, requests, **options)
    assert len(got.mixed) > 5 if mixes else not got.mixed


def test_requests_that_look_between_the_programs_are_not_mixed(models):
    rng = random.Random(6)
    asks = [{}, {}, {"logprobs": 1}, {}, {}, {}, {"logit_bias": {5: 2.0}}, {}, {}, {}, {"prompt_logprobs": 1}, {}, {}]
    params = [SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, **ask) for ask in asks]
    requests = [
        Arrival(step=2 * i, prompt=[rng.randrange(200) for _ in range(rng.randrange(2, 20))], params=p)
        for i, p in enumerate(params)
    ]
    _, got = both(models, requests)
    with_both = [plan for plan in got.plans if plan.decode_slots and plan.prefill]
    assert 0 < len(got.mixed) < len(with_both)
    asking = {init.slot for plan in got.plans for init in plan.new_slots if init.num_logprobs >= 0 or init.rules}
    assert asking, "they are among the others"


def test_accepted_drafts_beside_prompts(models):
    """With proposals that are often right, rows beside pieces commit blocks of all lengths."""
    requests = arrivals(7, [SamplingParams(temperature=0.0, max_tokens=30, seed=i, ignore_eos=True) for i in range(10)])
    with build(models, "eager") as llm:
        want = run(llm, requests, schedules={0: {5: 7}})
    truth = {i: [*request.prompt, *want.tokens[i]] for i, request in enumerate(requests)}
    with build(models, "repeated", pipeline_depth=1) as llm:
        mixed_truth(llm, truth, p_right=0.85, seed=1)
        got = run(llm, requests, schedules={0: {5: 7}})
        assert llm.core.counters().num_accepted_tokens > 80
    assert got.tokens == want.tokens and len(got.mixed) > 5


def test_a_prompt_whose_logits_are_not_finite_ends_alone(models_with_a_bad_id):  # noqa: F811
    _, broken, drafter = models_with_a_bad_id
    requests = arrivals(8, [SamplingParams(temperature=0.0, max_tokens=14, seed=i, ignore_eos=True) for i in range(12)])
    for request in requests[2::3]:
        request.prompt = [*request.prompt[:9], BAD_ID, *request.prompt[9:]]
    _, got = both((broken, drafter), requests, max_num_batched_tokens=26)
    assert all(got.reasons[i] == "error" and not got.tokens[i] for i in range(2, 12, 3))
    bad = [plan for plan in got.mixed if any(BAD_ID in chunk.token_ids for chunk in plan.prefill)]
    assert len(bad) >= 2


@pytest.mark.parametrize(
    ("last_step", "every", "budget"), [(9, 2, 26), (14, 2, 26), (23, 2, 26), (2, 0, 90), (3, 0, 60)]
)
def test_kv_of_both_models_is_what_the_prompts_own_programs_write(models, last_step, every, budget):
    """Few steps in, after a burst: what its prompts left is all there is."""
    requests = arrivals(9, kinds(12, seed=9), every=every, longest=45 if every else 25)
    if not every:
        requests = [Arrival(step=0, prompt=r.prompt, params=r.params) for r in requests]
    rows = []
    for mixes in (True, False):
        with build(models, "repeated", max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
            llm._rank.runner._decode_programs.mixes = mixes
            result = run(llm, requests, schedules={0: {5: 7}}, last_step=last_step)
            state = llm._rank.runner.state
            slots = [slot for slot in range(5) if not bool(state.finished[slot])]
            rows.append((state.committed_len.tolist(), state.draft_tokens[slots].tolist(), context_rows(llm, slots)))
        assert bool(result.mixed) == mixes
    (lens, drafts, own), (other_lens, other_drafts, other) = rows
    assert (lens, drafts) == (other_lens, other_drafts) and sum(lens) > 60
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ([0, 1], dict(max_num_seqs=2, max_num_batched_tokens=16, block_size=1, num_blocks=240)),
        ([0, 4], dict(max_num_seqs=7, max_num_batched_tokens=23, block_size=16, num_blocks=40, draft_block_width=6)),
        ([0, 2, 5], dict(max_num_seqs=3, max_num_batched_tokens=200, block_size=4, num_blocks=60)),
    ],
    ids=str,
)
def test_other_shapes_at_the_limits_of_what_is_mixed(models, monkeypatch, lengths, shape):
    """Chunks far behind, or more than the largest program holds, run as before; all that could be mixed is."""
    monkeypatch.setattr(pieces, "_FARTHEST_START", 20)
    monkeypatch.setattr(pieces, "PROMPT_TOKENS", 24)
    monkeypatch.setattr(decode_programs, "saves_time", lambda *_: True)
    target, drafter = models
    longest = lengths[-1]
    requests = arrivals(12, kinds(14, seed=12), longest=60)
    for index, request in enumerate(requests[::3]):
        request.prompt = [(7 * n) % 200 for n in range((1, longest + 1, 2 * (longest + 1), 40, 17)[index])]
    found = []
    for programs in ("eager", "repeated"):
        spec = DFlashDecodingConfig(max_draft_len=longest, speculative_model=str(drafter))
        options = dict(dtype="float32", max_model_len=96, draft_len_choices=lengths, threads=1, **shape)
        with LLM(str(target), speculative_config=spec, decode_programs=programs, **options) as llm:
            found.append(run(llm, requests, schedules={0: {shape["max_num_seqs"]: longest}}))
            llm.core.check_integrity()
    want, got = found
    assert (got.tokens, got.reasons) == (want.tokens, want.reasons)
    mixed = {plan.step_id for plan in got.mixed}
    both_kinds = [plan for plan in got.plans if plan.decode_slots and plan.prefill]
    largest = max(row_buckets(pieces.most_rows(shape["max_num_seqs"], longest)))
    for plan in both_kinds:
        is_far = any(chunk.start > 20 for chunk in plan.prefill)
        fits = len(plan.decode_slots) + pieces.num_pieces(plan.prefill, longest) <= largest
        assert (plan.step_id in mixed) == (fits and not is_far), plan
    assert 2 < len(mixed) < len(both_kinds)


@pytest.mark.slow
def test_two_ranks(models):
    requests = arrivals(10, kinds(8, seed=10))
    _, got = both(models, requests, tensor_parallel_size=2, max_num_batched_tokens=26, pipeline_depth=1)
    assert len(got.mixed) > 3


def test_steps_without_a_program_large_enough_are_not_mixed(models, monkeypatch):
    """In a runner of few pairs, as one whose memory is measured has them."""
    target, drafter = models
    made = ModelRunner.__init__

    def with_few_pairs(self, **arguments):
        made(self, **arguments, only_pairs=[(1, 0), (5, 2), (5, 0), (5, 7)])

    monkeypatch.setattr(ModelRunner, "__init__", with_few_pairs)
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(drafter))
    options = dict(dtype="float32", max_model_len=96, max_num_seqs=5, num_blocks=80, block_size=8, threads=1)
    with LLM(str(target), speculative_config=spec, decode_programs="repeated", **options) as llm:
        programs = llm._rank.runner._decode_programs
        assert programs._mixed_buckets == {2: [5], 7: [5]}
        cases = [(2, 12, True), (2, 13, False), (7, 32, True), (7, 33, False), (1, 2, False)]
        for draft_len, num_tokens, takes in cases:
            chunk = PrefillChunk(slot=1, start=0, token_ids=(0,) * num_tokens, samples=True)
            plan = StepPlan(step_id=1, verify_len=0, draft_len=draft_len, decode_slots=(0,), prefill=(chunk,))
            assert programs.takes_mixed(plan) == takes, plan


def test_programs_of_many_tokens_are_recorded_first(models):
    """Most rows are those of short drafts; were these first, every longer program would take memory of its own."""
    with build(models, "repeated") as llm, torch.inference_mode():
        programs, phases = llm._rank.runner._decode_programs, []
        programs.record(phases.append)
    shapes = [tuple(map(int, re.search(r"\((\d+) rows, (\d+) drafts\)", phase).groups())) for phase in phases]
    tokens = [rows * (width + 1) for rows, width in shapes]
    assert set(shapes) == set(programs._pairs) and len(shapes) == len(programs._pairs)
    assert tokens == sorted(tokens, reverse=True) and shapes != sorted(shapes, reverse=True)
