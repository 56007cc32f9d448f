"""Laws of the captured programs, on a GPU: the tokens of the CPU engine, and no wait for the device in the loop."""

from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.request import EngineRequest
from engine.runner.memory_probe import CACHED_BATCHES, measure
from engine.runner.recorder import GraphRecorder
from tests.engine.test_decode_programs import build, drive
from tests.engine.test_shadow_scoring import check_real_drafter
from tests.toy import make_drafter, make_target

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("graphs")
    shape = dict(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    target = make_target(root / "target", kind="qwen3", **shape)
    return target, make_drafter(root / "drafter", target, head_dim=32)


@pytest.fixture(autouse=True)
def exact_float32():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_schedules_equal_the_cpu(models, seed, block_size):
    """Odd max_num_seqs, bucket crossings, slot reuse, aborts in flight, all sampling variants."""
    with build(models, "eager", block_size=block_size) as llm:
        truth = drive(llm, seed)
    with build(models, "graphs", block_size=block_size, device="cuda", pipeline_depth=1) as llm:
        found = drive(llm, seed)
    common = truth.keys() & found.keys()
    assert len(common) >= 8
    for name in common:
        (tokens, logprobs, reason), (own_tokens, own_logprobs, own_reason) = truth[name], found[name]
        assert (own_tokens, own_reason) == (tokens, reason), name
        assert own_logprobs == pytest.approx(logprobs, abs=2e-3)


@pytest.mark.parametrize("width", [8, 11])
def test_narrow_blocks_draft_what_the_cpu_drafts(models, width, tmp_path):
    """Of one greedy request, where every step's drafts are known; K is 7."""
    wide = models[0], make_drafter(tmp_path / "drafter", models[0], head_dim=32, block_size=16)

    def drafts(decode_programs: str, **options: Any) -> list[list[int]]:
        found: list[list[int]] = []
        with build(wide, decode_programs, draft_block_width=width, block_size=16, **options) as llm:
            state = llm._rank.runner.state
            llm.core.add_request(EngineRequest(request_id="r", prompt_token_ids=(5, 6, 7), params=GREEDY))
            while llm.core.has_work():
                llm.core.step()
                found.append(state.draft_tokens[0, :7].tolist())
        return found

    want = drafts("repeated")
    assert len(set(map(tuple, want))) > 5
    assert drafts("graphs", device="cuda", pipeline_depth=0) == want


def test_the_loop_never_waits_for_the_device(models):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 23, 40, 3, 17, 30)]
    more: list[dict[str, Any]] = [{}, {}, {"logprobs": 2}, {}, {"logit_bias": {9: 2.0}}, {"prompt_logprobs": 1}]
    params = [
        SamplingParams(temperature=t, top_p=p, seed=i, max_tokens=12 + 3 * i, ignore_eos=True, min_tokens=i % 2, **own)
        for i, (own, (t, p)) in enumerate(
            zip(more, ((0.0, 1.0), (0.8, 1.0), (0.0, 1.0), (0.9, 0.7), (0.0, 1.0), (0.0, 1.0)), strict=True)
        )
    ]
    with build(models, "graphs", device="cuda", pipeline_depth=1) as llm:
        first = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            second = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert second == first


def test_captured_programs_report_drafts_for_scoring(models):
    check_real_drafter(models, 0, device="cuda", decode_programs="graphs", pipeline_depth=1, debug_checks=False)


def test_blocks_are_measured_where_nobody_said_how_many(models):
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with build(models, "eager") as llm:
        truth = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    with build(models, "graphs", device="cuda", num_blocks=None) as llm:
        config, rank = llm.config, llm._rank
        assert config.num_blocks == CACHED_BATCHES * (config.max_num_seqs * config.max_blocks_per_seq + 1)
        runner = rank.runner
        use = measure(
            config,
            target=runner._target,
            drafter=runner._draft_program._drafter,
            tp=rank.tp,
            device=torch.device("cuda", 0),
        )
        free = torch.cuda.mem_get_info()[0]
        assert 0 < use.largest < 4 << 30 and use.per_pair < 1 << 28
        assert use.num_sizes > 1 and use.per_size < 1 << 28
        assert use.for_blocks > 0.5 * use.total and free >= use.free - (1 << 28), "the probe gives back what it took"
        assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == truth


def test_a_borrowed_tensor_is_the_memory_and_does_not_hold_it():
    recorder = GraphRecorder(torch.device("cuda", 0))
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool):
        tensor = torch.ones(3, 5, device="cuda", dtype=dtype)[:, 1:4]
        borrowed = recorder.borrow(tensor)
        assert borrowed.dtype == dtype and borrowed.shape == tensor.shape and borrowed.stride() == tensor.stride()
        tensor.zero_()
        assert borrowed.data_ptr() == tensor.data_ptr() and not borrowed.any()
    assert recorder.borrow(torch.empty(4, 0, device="cuda")).shape == (4, 0)
    before = torch.cuda.memory_allocated()
    big = torch.zeros(1 << 22, device="cuda")
    recorder.borrow(big)
    del big
    assert torch.cuda.memory_allocated() == before


def test_programs_recorded_in_turn_share_memory_and_pass_results_on():
    recorder = GraphRecorder(torch.device("cuda", 0))
    source, out = torch.zeros(1 << 20, device="cuda"), torch.zeros(2, device="cuda")
    kept: dict[str, torch.Tensor] = {}
    runs = []
    for index in range(2):

        def first() -> None:
            kept["x"] = source * 2 + 1

        def second(index: int = index) -> None:
            out[index] = kept["x"].sum()

        runs.append((recorder.record(first), recorder.record(second)))
        kept["x"] = recorder.borrow(kept["x"])
    source.fill_(3.0)
    for run_first, run_second in runs[::-1]:
        run_first()
        run_second()
    assert out.tolist() == [7.0 * (1 << 20)] * 2 and recorder.num_graphs == 4
