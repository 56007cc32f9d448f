"""KV blocks come from what is left of a GPU's memory; over-committing is refused with the arithmetic."""

from dataclasses import replace

import pytest
import torch

from engine import DFlashDecodingConfig
from engine.attention.kv_cache_tensors import KvCache
from engine.config.engine import EngineConfig
from engine.config.resolve import resolve_engine_config
from engine.kv_cache.block_bytes import bytes_per_block
from engine.parallel.tp_group import TpGroup
from engine.runner import memory_probe
from engine.runner import runner as runner_module
from engine.runner.memory_probe import (
    CACHED_BATCHES,
    MemoryUse,
    given_blocks_fit,
    launch_largest_steps,
    measured_config,
)
from engine.runner.runner import ModelRunner
from engine.runner.target_program import TargetProgram
from engine.sampling.processors import LogitsStage
from engine.weights.loader import load_drafter, load_target
from tests.toy import make_drafter, make_target

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    target = make_target(tmp_path_factory.mktemp("probe"))
    return resolve_engine_config(
        model=str(target), max_model_len=200, max_num_seqs=3, max_num_batched_tokens=100, threads=1
    )


def use_of(free: int) -> MemoryUse:
    return MemoryUse(
        total=100 * GIB,
        free=free,
        largest=7 * GIB,
        per_pair=GIB // 8,
        num_pairs=9,
        per_size=GIB // 16,
        num_sizes=17,
    )


def blocks_of(config, monkeypatch, free: int) -> int:
    monkeypatch.setattr(memory_probe, "measure", lambda *args, **kwargs: use_of(free))
    return measured_config(config, target=None, drafter=None, tp=TpGroup.solo(), device=CPU).num_blocks


def test_blocks_fill_what_is_left(config, monkeypatch):
    """free - a tenth of the total - the largest programs - the other pairs and sizes; no more than can be of use."""
    left = 300 * bytes_per_block(config) + 1
    assert blocks_of(config, monkeypatch, left + 10 * GIB + 7 * GIB + 8 * (GIB // 8) + 16 * (GIB // 16)) == 300
    assert blocks_of(config, monkeypatch, 60 * GIB) == CACHED_BATCHES * (3 * 13 + 1)
    without_cache = replace(config, enable_prefix_caching=False)
    assert blocks_of(without_cache, monkeypatch, 60 * GIB) == 3 * 13 + 1


def test_too_little_is_refused_with_the_arithmetic(config, monkeypatch):
    barely = 19 * GIB + 14 * bytes_per_block(config)
    assert blocks_of(config, monkeypatch, barely) == 14
    with pytest.raises(
        ValueError, match=r"one request of 200 tokens needs 14 blocks x \d+ bytes .* 100.00 GiB of GPU "
    ):
        blocks_of(config, monkeypatch, barely - 1)
    with pytest.raises(ValueError, match=r"81.00 GiB taken .* - 19.00 GiB for .* leave -?\d.*Lower max_model_len, "):
        blocks_of(config, monkeypatch, 19 * GIB)


def runner_of(config: EngineConfig, pairs: list[tuple[int, int]], drafter=None) -> ModelRunner:
    tp = TpGroup.solo()
    return ModelRunner(
        config=config,
        target=load_target(config, tp),
        drafter=drafter,
        kv=KvCache.create(config, tp),
        tp=tp,
        device=CPU,
        only_pairs=pairs,
    )


def test_the_largest_steps_write_to_the_null_block_alone(config):
    config = replace(config, num_blocks=2, decode_programs="repeated")
    runner = runner_of(config, [(3, 0)])
    assert list(runner._decode_programs._pairs) == [(3, 0)]
    assert list(runner._prompt_programs._programs) == [32, 100]
    launch_largest_steps(runner, config)
    for k, v in runner.kv.target_kv:
        assert k[0].any() and v[0].any() and not k[1].any() and not v[1].any()
    assert runner.state.committed_len.tolist() == [34, 34, 34, 0]


@pytest.mark.parametrize("penalties", [False, True])
def test_the_largest_steps_run_what_no_program_holds(tmp_path, monkeypatch, penalties):
    """All prompt tokens in one ragged forward, scored; all columns of the widest verify with changed logits."""
    target = make_target(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    config = resolve_engine_config(
        model=str(target),
        speculative_config=DFlashDecodingConfig(
            max_draft_len=3, speculative_model=str(drafter), enable_penalty=penalties
        ),
        max_model_len=60,
        max_num_seqs=3,
        max_num_batched_tokens=100,
        threads=1,
        num_blocks=30,
    )
    config = replace(config, num_blocks=2, decode_programs="repeated")
    forwards, scored, changed = [], [], []
    run, run_decode = TargetProgram.run, TargetProgram.run_decode
    score, apply = runner_module.score_prompts, LogitsStage.apply

    def noting_run(self, inputs, *rest):
        forwards.append(inputs.ids_N.shape[0])
        return run(self, inputs, *rest)

    def noting_run_decode(self, inputs):
        forwards.append(inputs.ids_N.shape[0])
        return run_decode(self, inputs)

    def noting_score(hidden_NH, **rest):
        scores = score(hidden_NH, **rest)
        scored.extend(part.top_ids_Mn.shape for chunk in scores for part in chunk.parts)
        return scores

    def noting_apply(self, logits_MV, **rest):
        changed.append(logits_MV.shape[0])
        return apply(self, logits_MV, **rest)

    runner = runner_of(config, [(3, 3)], load_drafter(config, TpGroup.solo()))
    monkeypatch.setattr(TargetProgram, "run", noting_run)
    monkeypatch.setattr(TargetProgram, "run_decode", noting_run_decode)
    monkeypatch.setattr(runner_module, "score_prompts", noting_score)
    monkeypatch.setattr(LogitsStage, "apply", noting_apply)
    launch_largest_steps(runner, config)
    assert forwards == [3 * 33, 3 * 4]
    assert scored == [(32, 20)] * 3
    assert changed == [3, 3 * 4]


def test_a_given_cache_that_does_not_fit_is_refused_with_the_arithmetic(config, monkeypatch):
    config = replace(config, num_blocks=1000)
    needed = 1000 * bytes_per_block(config)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed - 1, 8 * GIB))
    with (
        pytest.raises(ValueError, match=r"8.00 GiB of GPU memory - .* taken .* - 1000 blocks x \d+ bytes = .* leave -"),
        given_blocks_fit(config, CPU),
    ):
        raise AssertionError("nothing may be allocated")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed + GIB, 8 * GIB))
    with given_blocks_fit(config, CPU):
        pass
    refused = r"leave 1.00 GiB, too little for activations and recorded programs"
    with pytest.raises(ValueError, match=refused), given_blocks_fit(config, CPU):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")
