"""A launched step is read only in `collect`: later launches change nothing of it, and a device is never waited for."""

import time

import msgspec
import pytest
import torch

from engine import LLM, DFlashDecodingConfig, SamplingParams
from engine.request import EngineRequest
from tests.toy import make_drafter, make_target

PROMPTS = [list(range(40, 52)), list(range(90, 121)), [7, 8, 9], list(range(20, 45))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True, logprobs=0, min_tokens=4, stop_token_ids=[5]),
    SamplingParams(
        temperature=0.8,
        seed=4,
        max_tokens=20,
        ignore_eos=True,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={9: 2.0, 300: -3.0},
        allowed_token_ids=list(range(300)),
        bad_words=["a", "bc", "def"],
        prompt_logprobs=1,
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("launch")
    target = make_target(root / "target")
    return target, make_drafter(root / "drafter", target)


def build(models, **options) -> LLM:
    target, drafter = models
    return LLM(
        str(target),
        speculative_config=DFlashDecodingConfig(max_draft_len=7, speculative_model=str(drafter), enable_penalty=True),
        dtype="float32",
        max_model_len=96,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        block_size=8,
        num_blocks=40,
        threads=1,
        **options,
    )


def outputs(llm: LLM) -> list[tuple]:
    return [(o.finish_reason, o.token_ids, o.logprobs) for r in llm.generate(PROMPTS, PARAMS) for o in r.outputs]


def test_reading_a_step_after_the_next_launch_changes_nothing(models):
    with build(models, pipeline_depth=0) as llm:
        truth = outputs(llm)
    assert all(len(entry) == 20 for entry in (truth[0][1], truth[0][2], truth[1][1]))
    with build(models, pipeline_depth=1) as llm:
        assert outputs(llm) == truth


def test_results_carry_their_times_and_choices_their_own_seeds(models):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 30)]
    last = SamplingParams(temperature=1.0, max_tokens=8, seed=2**63 - 1, n=2, ignore_eos=True)
    with build(models) as llm:
        started = time.perf_counter()
        short, long, twice = llm.generate(PROMPTS[:3], [*params, last])
        elapsed = time.perf_counter() - started
        for result in (short, long, twice):
            assert 0 < result.metrics.time_to_first_token_s <= result.metrics.duration_s < elapsed
        assert short.metrics.time_to_first_token_s == short.metrics.duration_s < long.metrics.duration_s
        for index, seed in enumerate((2**63 - 1, -(2**63))):
            alone = llm.generate(PROMPTS[2], msgspec.structs.replace(last, n=1, seed=seed))[0]
            assert alone.outputs[0].token_ids == twice.outputs[index].token_ids


@pytest.mark.gpu
def test_a_launch_never_waits_for_the_device(models):
    """With torch's own detector: any synchronising call inside `launch` is an error."""
    with build(models, device="cpu") as llm:
        truth = outputs(llm)
    with build(models, device="cuda", pipeline_depth=1) as llm:
        runner = llm._rank.runner
        assert outputs(llm)[0][1] == truth[0][1]  # compiles and allocates whatever is made once
        launch = runner.launch

        def strict(plan) -> None:
            torch.cuda.set_sync_debug_mode("error")
            try:
                launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.launch = strict
        assert [o[1] for o in outputs(llm)] == [o[1] for o in truth]


def test_an_interrupted_launch_leaves_its_thread_as_it_was(models, monkeypatch):
    """Also where the interrupt comes as inference mode begins, which then is on already."""
    enter = torch.inference_mode.__enter__

    def interrupted(mode: torch.inference_mode) -> None:
        enter(mode)
        raise KeyboardInterrupt

    with build(models, decode_programs="repeated") as llm:
        llm.core.add_request(EngineRequest(request_id="r", prompt_token_ids=(5, 6, 7), params=PARAMS[0]))
        llm.core.step()
        assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
        monkeypatch.setattr(torch.inference_mode, "__enter__", interrupted)
        was_interrupted = False
        try:  # not `pytest.raises`, which keeps the frames
            llm.core.step()
        except KeyboardInterrupt:
            was_interrupted = True
        monkeypatch.undo()
        assert was_interrupted and not torch.is_inference_mode_enabled()
