"""Law: a rank reads only the slices it keeps; a checkpoint that does not fit its config is refused by tensor name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.attention.kv_cache_tensors import KvCache
from engine.kv_cache.block_bytes import bytes_per_block
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.weights.loader import Checkpoint, drafter_placements, load_drafter, load_target, target_placements
from tests.reference.paged import engine_config
from tests.reference.toy import make_drafter, make_target


class Rank(TpGroup):
    """A rank that makes no collective: enough to build and fill a shard."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank=rank, size=size, backend="none" if size > 1 else None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("pair")
    target = make_target(
        directory / "target", "qwen2", num_attention_heads=9, num_key_value_heads=3, hidden_size=54, vocab_size=131
    )
    make_drafter(directory / "drafter", target)
    return directory / "target", directory / "drafter"


def build_target(pair: tuple[Path, Path], tp: TpGroup) -> tuple[TargetModel, int]:
    model = TargetModel(engine_config(pair[0]).target, tp=tp, dtype=torch.float32, num_positions=16)
    checkpoint = Checkpoint(str(pair[0]))
    checkpoint.fill(list(target_placements(model)))
    return model, checkpoint.bytes_read


def build_drafter(pair: tuple[Path, Path], tp: TpGroup, gather: str) -> tuple[DFlashDrafter, int]:
    config = engine_config(*pair).drafter
    assert config is not None
    model = DFlashDrafter(
        config,
        tp=tp,
        layer_tp=tp,
        hidden_state_gather=gather,
        dtype=torch.float32,
        num_positions=16,  # type: ignore[arg-type]
    )
    checkpoint = Checkpoint(str(pair[1]))
    checkpoint.fill(list(drafter_placements(model, fuse_rank_zero=tp.rank == 0)))
    return model, checkpoint.bytes_read


def replicated_bytes(directory: Path, names: Callable[[str, Tensor], bool]) -> int:
    weights = load_file(directory / "model.safetensors")
    return sum(w.numel() * w.element_size() for name, w in weights.items() if names(name, w))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_read_each_sharded_byte_once(pair: tuple[Path, Path], size: int) -> None:
    whole = replicated_bytes(pair[0], lambda name, w: True)
    shared = replicated_bytes(pair[0], lambda name, w: name.endswith("norm.weight") or "embed_tokens" in name)
    read = [build_target(pair, Rank(rank, size))[1] for rank in range(size)]
    assert sum(read) == whole + (size - 1) * shared
    if size == 2:
        assert max(read) < 0.75 * whole


@pytest.mark.parametrize("gather", ["taps", "fused"])
def test_drafter_ranks_read_each_sharded_byte_once(pair: tuple[Path, Path], gather: str) -> None:
    replicated = ("norm.weight",) if gather == "fused" else ("norm.weight", "fc.weight")
    whole = replicated_bytes(pair[1], lambda name, w: True)
    shared = replicated_bytes(pair[1], lambda name, w: name.endswith(replicated))
    read = sum(build_drafter(pair, Rank(rank, 2), gather)[1] for rank in range(2))
    assert read == whole + shared


def test_padding_is_zero_and_parts_join(pair: tuple[Path, Path]) -> None:
    """9/3 heads at 4 ranks: 12/4; the last rank holds padding only, the others the checkpoint's rows in order."""
    models = [build_target(pair, Rank(rank, 4))[0] for rank in range(4)]
    layers = [model.layers[1] for model in models]
    weights = load_file(pair[0] / "model.safetensors")
    D = 54 // 9
    q = torch.cat([layer.qkv.weight[: 3 * D] for layer in layers])
    assert torch.equal(q[: 9 * D], weights["model.layers.1.self_attn.q_proj.weight"]) and not q[9 * D :].any()
    v_bias = torch.cat([layer.qkv.bias[4 * D :] for layer in layers])
    assert torch.equal(v_bias[: 3 * D], weights["model.layers.1.self_attn.v_proj.bias"]) and not v_bias[3 * D :].any()
    down = torch.cat([layer.down.weight for layer in layers], dim=1)
    assert torch.equal(down[:, :80], weights["model.layers.1.mlp.down_proj.weight"])
    head = torch.cat([model.head.weight for model in models])
    assert torch.equal(head[:131], weights["lm_head.weight"]) and not head[131:].any()
    logits = models[3].logits(torch.randn(2, 54))
    assert logits.shape == (2, 33) and logits[:, -1].isneginf().all() and logits[:, :-1].isfinite().all()


def test_sharded_files(pair: tuple[Path, Path], tmp_path: Path) -> None:
    weights = load_file(pair[0] / "model.safetensors")
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((pair[0] / "config.json").read_text())
    one, many = (build_target((path, path), TpGroup.solo())[0] for path in (pair[0], tmp_path))
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(a, b), name
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"names files that do not exist: .*b\.safetensors"):
        load_target(engine_config(tmp_path), TpGroup.solo())


TARGET_EDITS: list[tuple[dict[str, Tensor | None], str]] = [
    ({"model.layers.2.mlp.up_proj.weight": None}, "tensor 'model.layers.2.mlp.up_proj.weight' is missing"),
    ({"lm_head.weight": None}, "tensor 'lm_head.weight' is missing"),
    ({"model.norm.weight": torch.ones(50)}, r"'model.norm.weight' has shape \[50\], config.json says \[54\]"),
    (
        {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)},
        "'model.layers.0.mlp.up_proj.weight_scale' belongs to no",
    ),
]
DRAFTER_EDITS: list[tuple[dict[str, Tensor | None], str]] = [
    ({"fc.weight": torch.zeros(54, 108)}, r"'fc.weight' has shape \[54, 108\], config.json says \[54, 162\]"),
    ({"hidden_norm.weight": None}, "tensor 'hidden_norm.weight' is missing"),
    ({"d2t": torch.zeros(9)}, "the weight files hold one of d2t and t2d"),
    ({"embed_tokens.weight": torch.zeros(130, 54)}, r"'embed_tokens.weight' has shape \[130, 54\]"),
    ({"lm_head.weight": torch.zeros(130, 54)}, r"'lm_head.weight' has shape \[130, 54\]"),
    ({"mask_embedding": torch.zeros(54)}, "tensor 'mask_embedding' belongs to no part of the model"),
]


def rewrite(source: Path, to: Path, edits: dict[str, Tensor | None]) -> None:
    weights = load_file(source / "model.safetensors") | edits
    save_file({name: w for name, w in weights.items() if w is not None}, to / "model.safetensors")
    (to / "config.json").write_text((source / "config.json").read_text())


@pytest.mark.parametrize(("edits", "message"), TARGET_EDITS, ids=lambda value: str(value)[:50])
def test_wrong_target(pair: tuple[Path, Path], tmp_path: Path, edits: dict[str, Tensor | None], message: str) -> None:
    rewrite(pair[0], tmp_path, edits)
    with pytest.raises(ValueError, match=message):
        load_target(engine_config(tmp_path), TpGroup.solo())


@pytest.mark.parametrize(("edits", "message"), DRAFTER_EDITS, ids=lambda value: str(value)[:50])
def test_wrong_drafter(pair: tuple[Path, Path], tmp_path: Path, edits: dict[str, Tensor | None], message: str) -> None:
    rewrite(pair[1], tmp_path, edits)
    with pytest.raises(ValueError, match=message):
        load_drafter(engine_config(pair[0], tmp_path), TpGroup.solo())


def test_no_weights_and_unknown_format(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((pair[0] / "config.json").read_text())
    with pytest.raises(ValueError, match=r"no \*.safetensors file with weights"):
        load_target(engine_config(tmp_path), TpGroup.solo())
    with pytest.raises(ValueError, match="load_format must be one of auto, safetensors, dummy, got 'pickle'"):
        load_target(engine_config(tmp_path, load_format="pickle"), TpGroup.solo())
    dummy = load_target(engine_config(tmp_path, load_format="dummy"), TpGroup.solo())
    assert dummy.layers[0].qkv.plain_weight().std() > 0.01


@pytest.mark.parametrize("drafter_tensor_parallel", [True, False])
def test_bytes_per_block_is_what_the_cache_takes(pair: tuple[Path, Path], drafter_tensor_parallel: bool) -> None:
    for size in (1, 2):
        config = engine_config(
            *pair, dtype="bfloat16", tensor_parallel_size=size, drafter_tensor_parallel=drafter_tensor_parallel
        )
        kv = KvCache.create(config, Rank(size - 1, size))
        tensors = [t for layer in (*kv.target_kv, *kv.drafter_kv) for t in layer]
        assert sum(t.numel() * t.element_size() for t in tensors) == config.num_blocks * bytes_per_block(config)
