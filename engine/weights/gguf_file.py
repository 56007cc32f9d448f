"""A GGUF file turned into a model directory: config, generation config, tokenizer and safetensors weights.

Quantised tensors are dequantised to float32, which is exact for every value a GGUF block can hold; float tensors keep
their type. Tensors pass through one at a time, so a conversion needs the memory of the largest one.
"""

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize

from engine.weights.gguf_tokenizer import tokenizer_files
from engine.weights.progress import Progress

# Raise when a conversion of the same file comes out differently: it is part of the cache key.
CONVERTER_VERSION = 1

WEIGHTS_NAME = "model.safetensors"

# GGUF architecture -> (model class, model_type, rows of q and k are interleaved by llama.cpp's converter).
_ARCHITECTURES: dict[str, tuple[str, str, bool]] = {
    "llama": ("LlamaForCausalLM", "llama", True),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", False),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", False),
}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_FLOAT_TYPES = {
    GGMLQuantizationType.F32: ("F32", 4),
    GGMLQuantizationType.F16: ("F16", 2),
    GGMLQuantizationType.BF16: ("BF16", 2),
}
_CONFIG_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A tensor on its way: `shape` outermost first; `interleaved_heads` > 0 when its rows must be put back in order."""

    source: ReaderTensor
    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    interleaved_heads: int


def convert_gguf(path: Path, out_dir: Path, progress: Progress) -> None:
    """Write `config.json`, `generation_config.json`, the tokenizer files and `model.safetensors` into `out_dir`.

    Raises:
        ValueError: not a GGUF file, or one of an architecture, tensor or tokenizer kind this converter does not know;
            the message names it.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a GGUF file: {error}") from error
    metadata = _Metadata(reader, path)
    tensors = _plan(reader, metadata)
    config = model_config(metadata, tensors)
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", generation_config(metadata))
    for file_name, content in tokenizer_files(metadata.get, vocab_size=config["vocab_size"]).items():
        (out_dir / file_name).write_text(content, encoding="utf-8")
    total = sum(tensor.num_bytes for tensor in tensors)
    with progress.stage(f"converting {path.name}", total) as task, (out_dir / WEIGHTS_NAME).open("wb") as stream:
        _write_safetensors(stream, tensors, task.advance)


class _Metadata:
    """Typed access to a GGUF file's key/value pairs."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._reader = reader
        self.path = path
        self.architecture = str(self.need("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ValueError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; supported are "
                f"{', '.join(sorted(_ARCHITECTURES))}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.path}: the GGUF metadata lacks {key!r}")
        return value

    def model(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def need_model(self, key: str) -> Any:
        return self.need(f"{self.architecture}.{key}")


def model_config(metadata: _Metadata, tensors: list[_Tensor]) -> dict[str, Any]:
    """The `config.json` that describes the converted weights, in transformers' names."""
    model_class, model_type, _ = _ARCHITECTURES[metadata.architecture]
    by_name = {tensor.name: tensor for tensor in tensors}
    hidden_size = int(metadata.need_model("embedding_length"))
    num_heads = int(metadata.need_model("attention.head_count"))
    head_dim = int(metadata.model("attention.key_length", hidden_size // num_heads))
    rotary_dim = int(metadata.model("rope.dimension_count", head_dim))
    if rotary_dim != head_dim:
        raise ValueError(
            f"{metadata.path}: rotary embedding over {rotary_dim} of {head_dim} head dimensions is not supported"
        )
    if int(metadata.model("attention.value_length", head_dim)) != head_dim:
        raise ValueError(f"{metadata.path}: value heads of another size than key heads are not supported")
    embedding = by_name.get("model.embed_tokens.weight")
    if embedding is None:
        raise ValueError(f"{metadata.path}: the tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": int(metadata.need_model("feed_forward_length")),
        "num_hidden_layers": int(metadata.need_model("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(metadata.model("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": int(metadata.need_model("context_length")),
        "rms_norm_eps": _shortest(metadata.need_model("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.model("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata),
        "tie_word_embeddings": "lm_head.weight" not in by_name,
        "dtype": _CONFIG_DTYPES[by_name.get("lm_head.weight", embedding).dtype],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in by_name
    if model_type == "llama":
        config["mlp_bias"] = False
    _check_shapes(metadata, config, by_name)
    return config


def generation_config(metadata: _Metadata) -> dict[str, Any]:
    """The ids generation starts and ends with; both end tokens when the file names an end of turn as well."""
    eos = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    eos_ids = list(dict.fromkeys(int(token_id) for token_id in eos if token_id is not None))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    kind = metadata.model("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{metadata.path}: rope scaling {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(metadata.need_model("rope.scaling.factor"))}
    original = metadata.model("rope.scaling.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _shortest(value: Any) -> float:
    """A float32 as the shortest decimal that names it: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _check_shapes(metadata: _Metadata, config: dict[str, Any], by_name: dict[str, _Tensor]) -> None:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    inter = config["intermediate_size"]
    expected: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        expected |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (q_rows, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv_rows, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, q_rows),
            f"{prefix}mlp.gate_proj.weight": (inter, hidden),
            f"{prefix}mlp.up_proj.weight": (inter, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inter),
        }
    for name, shape in expected.items():
        if name not in by_name:
            raise ValueError(f"{metadata.path}: the tensor for {name!r} is missing")
        if by_name[name].shape != shape:
            raise ValueError(f"{metadata.path}: {name!r} has shape {by_name[name].shape}, expected {shape}")


def _plan(reader: GGUFReader, metadata: _Metadata) -> list[_Tensor]:
    _, _, interleaved = _ARCHITECTURES[metadata.architecture]
    num_heads = int(metadata.need_model("attention.head_count"))
    num_kv_heads = int(metadata.model("attention.head_count_kv", num_heads))
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if interleaved else {}
    planned = []
    for tensor in reader.tensors:
        match = _LAYER_TENSOR.fullmatch(tensor.name)
        if tensor.name in _GLOBAL_NAMES:
            name, kind = _GLOBAL_NAMES[tensor.name], ""
        elif match is not None and match[2] in _LAYER_NAMES:
            name, kind = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}", match[2]
        else:
            raise ValueError(
                f"{metadata.path}: the tensor {tensor.name!r} has no counterpart in {metadata.architecture!r} "
                "checkpoints that this converter knows; use the model's safetensors checkpoint instead"
            )
        dtype, item_bytes = _FLOAT_TYPES.get(tensor.tensor_type, ("F32", 4))
        shape = tuple(int(size) for size in reversed(tensor.shape))
        planned.append(
            _Tensor(
                source=tensor,
                name=name,
                dtype=dtype,
                shape=shape,
                num_bytes=int(np.prod(shape)) * item_bytes,
                interleaved_heads=heads.get(kind, 0),
            )
        )
    return planned


def _values(tensor: _Tensor) -> np.ndarray:
    """The tensor's values, little-endian, C order; bfloat16 as raw 16-bit words."""
    data = tensor.source.data
    if tensor.source.tensor_type not in _FLOAT_TYPES:
        data = dequantize(data, tensor.source.tensor_type)
    elif tensor.dtype == "BF16":
        data = data.view(np.uint16)
    data = data.reshape(tensor.shape)
    if tensor.interleaved_heads:
        data = _restore_rows(data, tensor.interleaved_heads)
    return np.ascontiguousarray(data)


def _restore_rows(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order of llama.cpp's converter, which turns rotate-half pairs (i, i + d/2) into neighbours."""
    half = data.shape[0] // num_heads // 2
    return data.reshape(num_heads, half, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)


def _write_safetensors(stream: BinaryIO, tensors: list[_Tensor], advance: Callable[[int], None]) -> None:
    """Header first, then the tensors one after another: nothing but the current one is held."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        if tensor.name in header:
            raise ValueError(f"two tensors of the GGUF file map to {tensor.name!r}")
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.num_bytes],
        }
        offset += tensor.num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begin at a multiple of 8 bytes
    stream.write(struct.pack("<Q", len(encoded)))
    stream.write(encoded)
    for tensor in tensors:
        values = _values(tensor)
        assert values.nbytes == tensor.num_bytes, (tensor.name, values.nbytes, tensor.num_bytes)
        stream.write(values.data)
        advance(tensor.num_bytes)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
