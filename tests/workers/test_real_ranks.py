"""The default factory: a toy target and its drafter at tensor parallel size 2, through Ray, equals `transformers`."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.request import EngineRequest
from engine.sampling_params import SamplingParams
from tests.reference.paged import engine_config
from tests.reference.toy import make_drafter, make_target
from tests.workers.ray_cluster import local_ray
from workers.engine_group import EngineGroup
from workers.errors import EngineDeadError


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray():
        yield


async def test_two_ranks_with_a_drafter_give_the_targets_greedy_tokens(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", "llama")
    make_drafter(tmp_path / "drafter", target)
    config = engine_config(
        tmp_path / "target", tmp_path / "drafter", tensor_parallel_size=2, draft_len_schedule=((8, 3),),
        draft_len_choices=(0, 3, 5), debug_checks=True,
    )  # fmt: skip
    prompts = [[1, 17, 40, 99, 5], [1, 8], [1, *range(30, 50)]]
    group = await EngineGroup.start(config, step_times_budget_s=1.0)
    try:
        measured = {(entry.batch_bucket, entry.draft_len) for entry in group.client.step_times}
        assert (1, 0) in measured and measured <= {(rows, k) for rows in (1, 2, 4, 8) for k in (0, 3, 5)}
        assert all(entry.seconds > 0 for entry in group.client.step_times)
        got = []
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            request = EngineRequest(request_id=str(index), prompt_token_ids=tuple(prompt), params=params)
            got.append([token async for delta in group.client.submit(request) for token in delta.token_ids])
        # Another process changes the schedule, as a speculation controller does.
        ack = await group.rank0.apply_schedule.remote((1, 1), {8: 5})
        assert ack.applied and (await group.client.stats()).schedule == {8: 5}
        await group.rank0.reset_gate.remote()
        with pytest.raises(ValueError, match="max_draft_len"):
            await group.rank0.apply_schedule.remote((1, 2), {8: 99})
        await group.client.check_integrity()
        counters, stats = await group.client.counters(), await group.client.stats()
    finally:
        await group.close()
    for prompt, tokens in zip(prompts, got, strict=True):
        expected = target.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens == expected[0, len(prompt) :].tolist()
    assert counters.num_draft_tokens > 0
    assert counters.generation_tokens == 3 * 24 + 2, "two tokens were the readiness request's"
    assert stats.num_running == stats.num_waiting == 0


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_that_dies_in_the_midst_of_steps_is_named(tmp_path: Path, victim: int) -> None:
    """As in service, without the checks that compare the ranks in every step."""
    target = make_target(tmp_path / "target", "llama")
    make_drafter(tmp_path / "drafter", target)
    config = engine_config(
        tmp_path / "target", tmp_path / "drafter", tensor_parallel_size=2, draft_len_schedule=((8, 3),),
        draft_len_choices=(0, 3, 5),
    )  # fmt: skip
    group = await EngineGroup.start(config)
    pids = group.processes
    tokens: list[int] = []
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)

    async def decode_until_one_dies() -> None:
        for index in range(1000):
            request = EngineRequest(request_id=str(index), prompt_token_ids=(1, 17, 40, 99, 5), params=params)
            async for delta in group.client.submit(request):
                tokens.extend(delta.token_ids)
                if index == 0 and len(tokens) > 20:
                    os.kill(pids[victim], signal.SIGKILL)

    try:
        with pytest.raises(EngineDeadError, match=rf"rank {victim} \(pid {pids[victim]}\) died"):
            await decode_until_one_dies()
    finally:
        await group.close()
    expected = target.generate(
        torch.tensor([[1, 17, 40, 99, 5]]), max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert tokens[:20] == expected[0, 5:25].tolist()
