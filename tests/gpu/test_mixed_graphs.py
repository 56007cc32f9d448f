"""Prompts among the decode rows, with the kernels that a GPU uses: tokens, K/V, and no wait for the device."""

from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.runner.fused_rows import FusedRows
from tests.engine.mixed_steps import arrivals, context_rows, run
from tests.engine.test_decode_programs import build
from tests.engine.test_mixed_steps import ALWAYS, CHANGING, kinds
from tests.gpu.places import places
from tests.gpu.test_decode_graphs import exact_float32, models  # noqa: F401  (fixtures)


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize(("seed", "schedules"), [(1, ALWAYS), (2, CHANGING)])
def test_tokens_equal_the_cpus(
    models: Any,  # noqa: F811
    seed: int,
    schedules: dict[int, dict[int, int]],
    block_size: int,
) -> None:
    requests = arrivals(seed, kinds(20, seed=seed))
    options = {"block_size": block_size, "max_num_batched_tokens": 26, "pipeline_depth": 1}
    with build(models, "eager", **options) as llm:
        want = run(llm, requests, schedules=schedules)
    with build(models, "graphs", device="cuda", **options) as llm:
        run(llm, requests, schedules=ALWAYS)  # what is allocated once is
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = run(llm, requests, schedules=schedules)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        llm.core.check_integrity()
    assert len(got.mixed) > 8
    assert (got.tokens, got.reasons) == (want.tokens, want.reasons)


@pytest.mark.gpu
@pytest.mark.parametrize("last_step", [9, 17])
def test_kv_is_what_the_prompts_own_programs_write(models: Any, last_step: int) -> None:  # noqa: F811
    requests = arrivals(9, kinds(12, seed=9))
    found = []
    for mixes in (True, False):
        options = {"max_num_batched_tokens": 26, "enable_prefix_caching": False, "block_size": 16}
        with build(models, "graphs", device="cuda", pipeline_depth=1, **options) as llm:
            llm._rank.runner._decode_programs.mixes = mixes
            result = run(llm, requests, schedules={0: {5: 7}}, last_step=last_step)
            llm.core.check_integrity()  # reads what is in flight
            state = llm._rank.runner.state
            # Not every slot that is not finished: start-up runs steps in slots that no request had since.
            slots = sorted(seq.slot for seq in llm.core._scheduler.running.values() if seq.is_decoding)
            lens = state.committed_len[slots].tolist()
            found.append((slots, lens, state.draft_tokens[slots].tolist(), context_rows(llm, slots)))
        assert bool(result.mixed) == mixes
    (*state, own), (*other_state, other) = found
    assert state == other_state and sum(lens) > 40
    for a, b in zip(own, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("count", "device"), places([14], [8]))
def test_tokens_with_the_bookkeeping_kernels(count: int, device: str, models: Any) -> None:  # noqa: F811
    """The same programs, called: in the interpreter on the CPU, where they have no such kernels otherwise."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    lengths = [8, 7, 1, 9, 6]
    params = [
        SamplingParams(temperature=t, top_p=0.9, seed=i, max_tokens=lengths[i % 5], ignore_eos=True, min_tokens=i % 2)
        for i, t in enumerate([0.0, 0.8] * count)
    ][:count]
    requests = arrivals(3, params, longest=33)
    options = {"device": device, "max_num_batched_tokens": 26, "block_size": 16}
    with build(models, "eager", **options) as llm:
        want = run(llm, requests, schedules=ALWAYS)
    with build(models, "repeated", **options) as llm:
        runner = llm._rank.runner
        if device == "cpu":
            runner._fused = FusedRows(llm.config, runner.state, runner._fixed_builder)
            runner._draft_program._fused = runner._fused
            runner._record(lambda phase: None, None)
        got = run(llm, requests, schedules=ALWAYS)
        made = [pair for pair in runner._decode_programs._pairs.values() if pair._step and pair.shape.takes_pieces]
        assert all(pair._step.inputs.context.groups[0].shares_keys for pair in made) and made
        upload = runner._decode_programs.upload
        assert int(upload.host(made[0].shape).number_1) == upload.number, "each upload was taken once"
        assert upload.number > 8
    assert len(got.mixed) >= 3
    assert (got.tokens, got.reasons) == (want.tokens, want.reasons)
