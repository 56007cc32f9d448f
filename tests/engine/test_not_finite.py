"""A request whose K/V are not finite ends alone with "error": neighbours and later owners of its blocks see nothing.

The target's embedding row of one token id is NaN, so a request is broken exactly when it contains that id.
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.attention.reference import paged_attention
from tests.toy import make_drafter, make_target

BAD_ID = 200
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "block_size": 8,
    "num_blocks": 40,
    "threads": 1,
    "debug_checks": True,
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=6, max_tokens=24, ignore_eos=True, logprobs=2),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(target, its twin with a NaN row, drafter). Untied: the NaN is in what the target reads, not in its head."""
    root = tmp_path_factory.mktemp("nan")
    healthy = make_target(root / "healthy", kind="qwen3")
    broken = make_target(root / "broken", kind="qwen3")
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][BAD_ID] = torch.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    return healthy, broken, make_drafter(root / "drafter", healthy)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, BAD_ID, (n,), generator=generator).tolist() for n in (9, 30, 17)]


def build(model, drafter, **options) -> LLM:
    spec = DFlashDecodingConfig(max_draft_len=7, speculative_model=str(drafter))
    return LLM(str(model), speculative_config=spec, **(OPTIONS | options))


def outputs(llm: LLM, items: list[list[int]], params: list[SamplingParams]) -> list[tuple]:
    return [(o.finish_reason, o.token_ids) for r in llm.generate(items, params) for o in r.outputs]


def expected(truth: tuple) -> tuple:
    """What the broken target makes of a request: an error at the first token after BAD_ID came out."""
    reason, ids = truth
    cut = ids.index(BAD_ID) + 1 if BAD_ID in ids else len(ids)
    return (reason, ids) if cut == len(ids) else ("error", ids[:cut])


@pytest.mark.parametrize(
    "options",
    [{"pipeline_depth": 0}, {"pipeline_depth": 1}, {"tensor_parallel_size": 2, "pipeline_depth": 1}],
    ids=["depth 0", "depth 1", "two ranks"],
)
def test_only_requests_with_the_bad_id_fail(models, options, caplog):
    healthy, broken, drafter = models
    with build(healthy, drafter, **options) as llm:
        truth = [expected(t) for t in outputs(llm, prompts(), PARAMS)]
    poisoned = [[*prompts()[0][:4], BAD_ID], [*prompts()[1], BAD_ID, *prompts()[1], 7], [BAD_ID]]
    with build(broken, drafter, **options) as llm:
        for _ in range(2):  # the second round reuses the blocks of the first
            mixed = [item for pair in zip(prompts(), poisoned, strict=True) for item in pair]
            got = outputs(llm, mixed, [p for p in PARAMS for _ in range(2)])
            assert got[0::2] == truth
            assert got[1::2] == [("error", ())] * 3
            assert outputs(llm, prompts(), PARAMS) == truth
        assert "not finite (NaN or infinity) at position 5 " in caplog.text
        assert llm.core.counters().finished["error"] >= 6
        # The plan after the last error carried the zeroing; nothing that is not finite is left behind.
        llm.core.check_integrity()
        for k, v in (*llm._rank.runner.kv.target_kv, *llm._rank.runner.kv.drafter_kv):
            assert torch.isfinite(k).all()
            assert torch.isfinite(v).all()


def test_a_bad_request_takes_its_prefix_blocks_out_of_the_cache_but_not_from_others(models):
    """Three requests share a healthy prefix; one of them goes bad behind it, in the steps of the others."""
    healthy, broken, drafter = models
    prefix = prompts()[1][:24]
    items = [[*prefix, 3, 4], [*prefix, BAD_ID, 4], [*prefix, 5, 6]]
    params = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * 3
    with build(healthy, drafter) as llm:
        truth = [expected(outputs(llm, [item], params[:1])[0]) for item in items]
    with build(broken, drafter) as llm:
        for _ in range(2):
            got = outputs(llm, items, params)
            assert (got[0], got[2]) == (truth[0], truth[2])
            assert got[1] == ("error", ())
        assert llm.core.counters().prefix_cache_hits > 0


def test_the_reference_attention_is_deaf_to_stale_rows(models):
    """The same law where the compiled CPU kernel is not available: blocks are read whole, masked rows included."""
    healthy, broken, _ = models
    with LLM(str(healthy), **OPTIONS) as llm:
        use_reference(llm)
        truth = [expected(t) for t in outputs(llm, prompts(), PARAMS[:1] * 3)]
    with LLM(str(broken), **OPTIONS) as llm:
        use_reference(llm)
        mixed = [prompts()[0], [BAD_ID, 5], prompts()[1], [*prompts()[2], BAD_ID], prompts()[2]]
        for _ in range(2):
            got = outputs(llm, mixed, PARAMS[:1] * 5)
            assert [got[i] for i in (0, 2, 4)] == truth
            assert (got[1], got[3]) == (("error", ()), ("error", ()))


def use_reference(llm: LLM) -> None:
    for layer in llm._rank.runner._target_program._model.layers:
        assert layer.attention is not paged_attention
        layer.attention = paged_attention
