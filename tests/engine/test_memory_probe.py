"""KV blocks come from what is left of a GPU's memory; over-committing is refused with the arithmetic."""

from dataclasses import replace

import pytest
import torch

from engine.attention.kv_cache_tensors import KvCache
from engine.config.resolve import resolve_engine_config
from engine.kv_cache.block_bytes import bytes_per_block
from engine.parallel.tp_group import TpGroup
from engine.runner import memory_probe
from engine.runner.memory_probe import CACHED_BATCHES, MemoryUse, launch_largest_prefill, measured_config
from engine.runner.runner import ModelRunner
from engine.weights.loader import load_target
from tests.toy import make_target

GIB = 1 << 30
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    target = make_target(tmp_path_factory.mktemp("probe"))
    return resolve_engine_config(
        model=str(target), max_model_len=200, max_num_seqs=3, max_num_batched_tokens=100, threads=1
    )


def use_of(free: int) -> MemoryUse:
    return MemoryUse(total=100 * GIB, free=free, largest=7 * GIB, per_pair=GIB // 8, num_pairs=9)


def blocks_of(config, monkeypatch, free: int) -> int:
    monkeypatch.setattr(memory_probe, "measure", lambda *args, **kwargs: use_of(free))
    return measured_config(config, target=None, drafter=None, tp=TpGroup.solo(), device=CPU).num_blocks


def test_blocks_fill_what_is_left(config, monkeypatch):
    """free - a tenth of the total - the largest programs - the other pairs; no more than can be of use."""
    left = 300 * bytes_per_block(config) + 1
    assert blocks_of(config, monkeypatch, left + 10 * GIB + 7 * GIB + 8 * (GIB // 8)) == 300
    assert blocks_of(config, monkeypatch, 60 * GIB) == CACHED_BATCHES * (3 * 13 + 1)
    without_cache = replace(config, enable_prefix_caching=False)
    assert blocks_of(without_cache, monkeypatch, 60 * GIB) == 3 * 13 + 1


def test_too_little_is_refused_with_the_arithmetic(config, monkeypatch):
    barely = 18 * GIB + 14 * bytes_per_block(config)
    assert blocks_of(config, monkeypatch, barely) == 14
    with pytest.raises(
        ValueError, match=r"one request of 200 tokens needs 14 blocks x \d+ bytes .* 100.00 GiB of GPU "
    ):
        blocks_of(config, monkeypatch, barely - 1)
    with pytest.raises(ValueError, match=r"82.00 GiB taken .* - 18.00 GiB for .* leave -?\d.*Lower max_model_len, "):
        blocks_of(config, monkeypatch, 18 * GIB)


def test_the_largest_prefill_writes_to_the_null_block_alone(config):
    config = replace(config, num_blocks=2, decode_programs="repeated")
    tp = TpGroup.solo()
    kv = KvCache.create(config, tp)
    runner = ModelRunner(
        config=config, target=load_target(config, tp), drafter=None, kv=kv, tp=tp, device=CPU, only_pairs=[(3, 0)]
    )
    assert list(runner._decode_programs._pairs) == [(3, 0)]
    launch_largest_prefill(runner, config)
    for k, v in kv.target_kv:
        assert k[0].any() and v[0].any() and not k[1].any() and not v[1].any()
    assert runner.state.committed_len.tolist() == [33, 33, 33, 0]
