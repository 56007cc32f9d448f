"""Fills models from safetensors. A rank reads only the slices it keeps; padding stays zero."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from engine.attention.backend import attention_of
from engine.attention.context import Attention
from engine.attention.kv_cache_tensors import DTYPES
from engine.config.engine import EngineConfig
from engine.layers.linear import Linear
from engine.models.decoder import DecoderLayer, LayerSpec
from engine.models.dflash import DFlashDrafter
from engine.models.draft_head import DraftHead
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup

LOAD_FORMATS = ("auto", "safetensors", "dummy")
# Tensors some checkpoints carry although config.json determines them.
_DERIVED = "rotary_emb.inv_freq"


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """One checkpoint tensor's slice and where it goes.

    shape: the whole tensor's shape, checked. rows, columns: half-open ranges read from it (columns None for vectors).
    target: the destination view, shaped as the slice or broadcast from it.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int] | None
    target: Tensor


class Checkpoint:
    """The safetensors files of a directory: one `model.safetensors`, or shards behind `model.safetensors.index.json`.

    bytes_read counts what was copied out of the files.

    Raises:
        ValueError: no safetensors file, or an index naming a missing file.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.bytes_read = 0
        index = Path(directory) / "model.safetensors.index.json"
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            self._file_of = {name: os.path.join(directory, file) for name, file in weight_map.items()}
            missing = sorted({path for path in self._file_of.values() if not os.path.isfile(path)})
            if missing:
                raise ValueError(f"{index}: names files that do not exist: {missing}. Fetch the checkpoint again.")
        else:
            self._file_of = {}
            for path in sorted(Path(directory).glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    self._file_of.update(dict.fromkeys(file.keys(), str(path)))
        if not self._file_of:
            raise ValueError(f"{directory}: no *.safetensors file with weights. Only safetensors checkpoints are read.")

    def refuse_unknown(self, known: set[str]) -> None:
        """A weight nobody reads means another model than config.json says (a bias, a scale, a second head).

        Raises:
            ValueError: naming the first such tensor.
        """
        unknown = sorted(name for name in self._file_of if name not in known and not name.endswith(_DERIVED))
        if unknown:
            raise ValueError(
                f"{self.directory}: tensor '{unknown[0]}' belongs to no part of the model that config.json describes "
                f"({len(unknown)} such tensors); this version would ignore it."
            )

    def fill(self, placements: list[Placement]) -> None:
        """Reads every placement, file by file, and checks names and shapes.

        Raises:
            ValueError: a tensor is missing or has another shape than the config says.
        """
        by_file: dict[str, list[Placement]] = {}
        for placement in placements:
            if placement.name not in self._file_of:
                raise ValueError(f"{self.directory}: tensor '{placement.name}' is missing from the checkpoint.")
            by_file.setdefault(self._file_of[placement.name], []).append(placement)
        for path, wanted in by_file.items():
            with safe_open(path, framework="pt") as file:
                for placement in wanted:
                    self._fill_one(file.get_slice(placement.name), placement)

    def _fill_one(self, source: object, placement: Placement) -> None:
        shape = tuple(source.get_shape())  # type: ignore[attr-defined]
        if shape != placement.shape:
            raise ValueError(
                f"{self.directory}: tensor '{placement.name}' has shape {list(shape)}, "
                f"config.json says {list(placement.shape)}."
            )
        (first, last), columns = placement.rows, placement.columns
        if first == last or (columns is not None and columns[0] == columns[1]):
            return
        part = source[first:last] if columns is None else source[first:last, columns[0] : columns[1]]  # type: ignore[index]
        self.bytes_read += part.numel() * part.element_size()
        placement.target.copy_(part)


def load_target(
    config: EngineConfig, tp: TpGroup, *, device: str | None = None, attention: Attention | None = None
) -> TargetModel:
    """The rank's target shard with its weights. device: defaults to config.device; attention: to the device's.

    Raises:
        ValueError: an unknown load_format, or a checkpoint that does not fit its config.
    """
    model = TargetModel(
        config.target,
        tp=tp,
        dtype=DTYPES[config.dtype],
        device=device or config.device,
        num_positions=num_positions(config),
        attention=attention or attention_of(device or config.device),
    )
    _load(model, list(target_placements(model)), config.model_dir, config.load_format, "load_format")
    owns_head = config.drafter is not None and config.drafter.draft_vocab_size > 0
    if config.drafter_weights == "int8" and not owns_head:
        model.add_draft_head()
    prepare_linears(model, exact=True)
    return model


def load_drafter(
    config: EngineConfig, tp: TpGroup, *, device: str | None = None, attention: Attention | None = None
) -> DFlashDrafter:
    """The rank's share of the drafter with its weights; see `load_target`."""
    assert config.drafter is not None and config.drafter_dir is not None
    layer_tp = tp if config.drafter_tensor_parallel else TpGroup.solo()
    model = DFlashDrafter(
        config.drafter,
        tp=tp,
        layer_tp=layer_tp,
        hidden_state_gather=config.hidden_state_gather,
        dtype=DTYPES[config.dtype],
        device=device or config.device,
        num_positions=num_positions(config),
        attention=attention or attention_of(device or config.device, config.drafter_attention),
    )
    placements = list(drafter_placements(model, fuse_rank_zero=layer_tp.rank == 0))
    _load(model, placements, config.drafter_dir, config.drafter_load_format, "drafter load_format")
    model.finish_loading()
    prepare_linears(model, exact=config.drafter_weights == "model")
    return model


def num_positions(config: EngineConfig) -> int:
    """Rows of the rotary tables: every position a block table can address."""
    return config.max_blocks_per_seq * config.block_size


def _load(model: nn.Module, placements: list[Placement], directory: str, load_format: str, field: str) -> None:
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"{field} must be one of {', '.join(LOAD_FORMATS)}, got '{load_format}'.")
    if load_format == "dummy":
        _fill_randomly(placements)
    else:
        checkpoint = Checkpoint(directory)
        known = {placement.name for placement in placements}
        if isinstance(model, TargetModel) and model.config.tie_word_embeddings:
            known.add("lm_head.weight")  # some checkpoints store the tied head as well
        checkpoint.refuse_unknown(known)
        checkpoint.fill(placements)


def prepare_linears(model: nn.Module, *, exact: bool) -> None:
    """Hands the model's matrices to the CPU kernel where there is one. exact: False rounds them to 8 bits, on CUDA
    those that gain by it."""
    for module in model.modules():
        if isinstance(module, Linear) and not module.is_prepared and module.int8_weight is None:
            module.prepare(int8=not exact)


def _fill_randomly(placements: list[Placement]) -> None:
    """Random weights for speed tests: the whole tensor is drawn, then cut, so the ranks hold one model."""
    for seed, placement in enumerate(placements):
        if not placement.target.is_floating_point():
            continue  # a vocabulary map: the one it was made with
        if len(placement.shape) == 1:
            placement.target.fill_(0.0 if placement.name.endswith(".bias") else 1.0)
            continue
        device = placement.target.device  # an 8B model is drawn in a second there, in minutes on the host
        generator = torch.Generator(device).manual_seed(seed)
        whole = torch.randn(placement.shape, generator=generator, device=device) * 0.02
        assert placement.columns is not None
        placement.target.copy_(whole[slice(*placement.rows), slice(*placement.columns)])


def target_placements(model: TargetModel) -> Iterator[Placement]:
    """Every checkpoint tensor of the target, in transformers' names."""
    config, H = model.config, model.config.hidden_size
    vocab = (0, config.vocab_size)
    yield _matrix("model.embed_tokens.weight", (config.vocab_size, H), vocab, model.embedding.data)
    if not config.tie_word_embeddings:
        mine = (model.vocab.start, model.vocab.start + model.vocab.real)
        yield _matrix("lm_head.weight", (config.vocab_size, H), mine, model.head.weight.data)
    yield _vector("model.norm.weight", H, (0, H), model.norm.weight.data)
    full_heads = (config.num_heads, config.num_kv_heads)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        prefix = f"model.layers.{index}."
        yield from _layer_placements(
            layer, model.spec, prefix, full_heads, config.intermediate_size, model.tp.rank == 0
        )


def drafter_placements(model: DFlashDrafter, *, fuse_rank_zero: bool) -> Iterator[Placement]:
    """Every checkpoint tensor of the drafter, in z-lab's names. fuse_rank_zero: this rank adds the output bias."""
    config, H = model.config, model.config.hidden_size
    taps = len(config.target_layer_ids) * model.tap_hidden_size
    part = model.fc_shard
    rows = (part.start, part.start + part.real) if model.hidden_state_gather == "fused" else (0, H)
    yield _matrix("fc.weight", (H, taps), rows, model.fc.weight.data)
    yield _vector("hidden_norm.weight", H, (0, H), model.hidden_norm.weight.data)
    yield _vector("norm.weight", H, (0, H), model.norm.weight.data)
    full_heads = (config.num_heads, config.num_kv_heads)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        yield from _layer_placements(
            layer, model.spec, f"layers.{index}.", full_heads, config.intermediate_size, fuse_rank_zero
        )
    if model.embedding is not None:
        vocab = (0, config.vocab_size)
        yield _matrix("embed_tokens.weight", (config.vocab_size, H), vocab, model.embedding.data)
    if model.head is not None:
        yield from _head_placements(model.head, H)


def _head_placements(head: DraftHead, hidden_size: int) -> Iterator[Placement]:
    size = head.draft_vocab_size
    mine = (head.vocab.start, head.vocab.start + head.vocab.real)
    yield _matrix("lm_head.weight", (size, hidden_size), mine, head.linear.weight.data)
    for name, values in (("d2t", head.d2t), ("t2d", head.t2d)):
        if values is not None:
            yield _vector(name, values.shape[0], (0, values.shape[0]), values)


def _layer_placements(
    layer: DecoderLayer,
    spec: LayerSpec,
    prefix: str,
    full_heads: tuple[int, int],
    intermediate: int,
    adds_output_bias: bool,
) -> Iterator[Placement]:
    """A decoder layer's tensors. Row-parallel biases are added by one rank only, before the all-reduce."""
    H, D, heads, mlp = spec.hidden_size, spec.head_dim, spec.heads, spec.mlp
    attention = prefix + "self_attn."
    yield _vector(prefix + "input_layernorm.weight", H, (0, H), layer.input_norm.weight.data)
    yield _vector(prefix + "post_attention_layernorm.weight", H, (0, H), layer.post_norm.weight.data)

    first_row = 0
    for name, full, first, real, local in (
        ("q_proj", full_heads[0], heads.first_head, heads.real_heads, heads.num_heads),
        ("k_proj", full_heads[1], heads.first_kv_head, heads.real_kv_heads, heads.num_kv_heads),
        ("v_proj", full_heads[1], heads.first_kv_head, heads.real_kv_heads, heads.num_kv_heads),
    ):
        rows = (first * D, (first + real) * D)
        yield _matrix(f"{attention}{name}.weight", (full * D, H), rows, layer.qkv.weight.data[first_row:])
        if layer.qkv.bias is not None:
            yield _vector(f"{attention}{name}.bias", full * D, rows, layer.qkv.bias.data[first_row:])
        first_row += local * D
    columns = (heads.first_head * D, (heads.first_head + heads.real_heads) * D)
    yield _matrix(attention + "o_proj.weight", (H, full_heads[0] * D), (0, H), layer.o.weight.data, columns=columns)
    if layer.o.bias is not None:
        yield _vector(attention + "o_proj.bias", H, (0, H if adds_output_bias else 0), layer.o.bias.data)
    if layer.qk_norm_weight is not None:
        weight = layer.qk_norm_weight.data
        yield _norm(attention + "q_norm.weight", D, weight[: heads.num_heads])
        yield _norm(attention + "k_norm.weight", D, weight[heads.num_heads :])

    part = (mlp.start, mlp.start + mlp.real)
    gate_up = layer.gate_up.weight.data
    yield _matrix(prefix + "mlp.gate_proj.weight", (intermediate, H), part, gate_up)
    yield _matrix(prefix + "mlp.up_proj.weight", (intermediate, H), part, gate_up[mlp.size :])
    yield _matrix(prefix + "mlp.down_proj.weight", (H, intermediate), (0, H), layer.down.weight.data, columns=part)


def _matrix(
    name: str, shape: tuple[int, int], rows: tuple[int, int], target: Tensor, *, columns: tuple[int, int] | None = None
) -> Placement:
    columns = columns or (0, shape[1])
    view = target[: rows[1] - rows[0], : columns[1] - columns[0]]
    return Placement(name=name, shape=shape, rows=rows, columns=columns, target=view)


def _vector(name: str, size: int, rows: tuple[int, int], target: Tensor) -> Placement:
    return Placement(name=name, shape=(size,), rows=rows, columns=None, target=target[: rows[1] - rows[0]])


def _norm(name: str, size: int, target_hD: Tensor) -> Placement:
    return Placement(name=name, shape=(size,), rows=(0, size), columns=None, target=target_hD)
