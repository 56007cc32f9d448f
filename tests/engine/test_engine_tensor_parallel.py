"""Two ranks decode what one does: same tokens, same drafts, one hidden-state gather a step of the stated size."""

import pytest
import torch

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.request import EngineRequest
from tests.engine.drafting import after_drafts
from tests.reference import toy as reference_toy
from tests.toy import make_drafter, make_target

SHAPES = {
    "8 heads": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "9 heads padded to 12": {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 45, "head_dim": 8},
}
NUM_STEPS = 120
BASE = dict(
    dtype="float32",
    max_model_len=160,
    max_num_seqs=3,
    max_num_batched_tokens=48,
    block_size=8,
    threads=1,
    debug_checks=True,  # the ranks compare their tokens in every step
)


@pytest.fixture(scope="module", params=list(SHAPES))
def models(request, tmp_path_factory):
    """A target, and a drafter fitted to its greedy text so that drafts are really accepted."""
    root = tmp_path_factory.mktemp("tp")
    target = make_target(root / "target", **SHAPES[request.param])
    drafter = make_drafter(root / "drafter", target, head_dim=8)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    reference_toy.fit_drafter(drafter, model, workload()[:3], text_len=60, steps=60)
    return target, drafter


def workload() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 250, (n,), generator=generator).tolist() for n in (9, 14, 21, 30, 17, 12, 26, 8)]


def trace(llm: LLM) -> dict:
    """Decode the workload round after round with aborts and preemption for NUM_STEPS steps; tokens and drafts seen."""
    drafts = []

    def record(slots_S, draft_len):
        drafts.append(llm._rank.runner.state.draft_tokens[slots_S, :draft_len].tolist())

    after_drafts(llm, record)
    tokens: dict[str, list[int]] = {}
    steps = count = 0
    before = llm._rank.tp.hidden_gathers.calls, llm._rank.tp.hidden_gathers.bytes
    while steps < NUM_STEPS:
        while len([r for r in tokens if r in llm.core._sequences]) < 4:
            prompt = workload()[count % 8]
            params = SamplingParams(temperature=(0.0, 0.0, 0.7)[count % 3], max_tokens=60, seed=count, ignore_eos=True)
            request = EngineRequest(request_id=f"r{count}", prompt_token_ids=tuple(prompt), params=params)
            tokens[request.request_id] = []
            llm.core.add_request(request)
            count += 1
        for delta in llm.core.step():
            tokens[delta.request_id] += delta.token_ids
        steps += 1
        if steps % 17 == 0:
            llm.core.abort(f"r{count - 2}")
    gathers = llm._rank.tp.hidden_gathers
    for request_id in tokens:
        llm.core.abort(request_id)
    while llm.core.has_work():
        llm.core.step()
    llm.core.check_integrity()
    counters = llm.core.counters()
    return {
        "tokens": tokens,
        "drafts": drafts,
        "accepted": counters.num_accepted_tokens,
        "preemptions": counters.preemptions,
        "gathers": (gathers.calls - before[0], gathers.bytes - before[1]),
        "steps": steps,
    }


def run(models, rejection: bool, **options) -> dict:
    target, drafter = models
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(drafter), use_rejection_sampling=rejection)
    with LLM(str(target), speculative_config=spec, num_blocks=27, **(BASE | options)) as llm:
        rows = []
        if options.get("tensor_parallel_size", 1) > 1:
            drafter_module = llm._rank.runner._draft_program._drafter
            real = drafter_module.context_features

            def count_rows(taps_NTH):
                rows.append(taps_NTH.shape)
                return real(taps_NTH)

            drafter_module.context_features = count_rows
        result = trace(llm)
        result["rows"] = rows
        return result


@pytest.mark.parametrize(
    ("gather", "rejection", "draft_sampling"), [("taps", False, "coupled"), ("fused", True, "probabilistic")]
)
def test_two_ranks_equal_one(models, gather, rejection, draft_sampling):
    one = run(models, rejection, draft_sampling=draft_sampling)
    two = run(models, rejection, draft_sampling=draft_sampling, tensor_parallel_size=2, hidden_state_gather=gather)
    assert one["accepted"] > 15 and one["preemptions"] > 0, "the run was meant to accept drafts and to preempt"
    assert two["tokens"] == one["tokens"]
    assert two["drafts"] == one["drafts"]
    calls, num_bytes = two["gathers"]
    assert calls == len(two["rows"]) == two["steps"]
    hidden = two["rows"][0][2]
    taps = two["rows"][0][1] if gather == "taps" else 1
    share = -(-hidden // 2)
    assert num_bytes == sum(shape[0] for shape in two["rows"]) * taps * share * 4


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["taps", "fused"])
def test_two_ranks_of_smollm2_equal_one(smollm2_dir, smollm2_drafter_dir, gather):
    models = smollm2_dir, smollm2_drafter_dir
    one = run(models, False)
    two = run(models, False, tensor_parallel_size=2, hidden_state_gather=gather)
    assert one["accepted"] > 15 and one["preemptions"] > 0, "the run was meant to accept drafts and to preempt"
    assert two["tokens"] == one["tokens"]
    assert two["drafts"] == one["drafts"]
    assert two["gathers"][0] == len(two["rows"]) == two["steps"]


def test_two_ranks_equal_one_without_checks(models):
    """The compiled bookkeeping of the CPU, which debug_checks leaves out, under two ranks."""
    target, drafter = models
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(drafter))
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    tokens = []
    for size in (1, 2):
        options = BASE | dict(tensor_parallel_size=size, debug_checks=False)
        with LLM(str(target), speculative_config=spec, num_blocks=100, **options) as llm:
            tokens.append([output.outputs[0].token_ids for output in llm.generate(workload()[:3], params)])
            assert llm.core.counters().num_accepted_tokens > 5
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("models", ["8 heads"], indirect=True)
def test_a_lost_follower_is_an_error_not_a_hang(models):
    target, drafter = models
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(drafter))
    with LLM(str(target), speculative_config=spec, num_blocks=60, tensor_parallel_size=2, **BASE) as llm:
        llm._followers[0].kill()
        llm._followers[0].wait()
        with pytest.raises(RuntimeError, match="rank ended with exit code -9"):
            llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
        with pytest.raises(RuntimeError, match="failed earlier and is closed"):
            llm.generate([1, 2, 3], SamplingParams(max_tokens=4))


@pytest.mark.parametrize("models", ["8 heads"], indirect=True)
def test_a_refused_prompt_leaves_the_engine_clean(models):
    target, _ = models
    with LLM(str(target), num_blocks=60, **BASE) as llm:
        with pytest.raises(ValueError, match="prompt_token_ids: the prompt is empty"):
            llm.generate([[1, 2, 3], []], SamplingParams(max_tokens=4))
        assert not llm.core.has_work()
        llm.core.check_integrity()
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=4))[0].outputs[0].token_ids) == 4
