"""Checkpoints of a toy size and machines, for tests of what a configuration resolves to."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engine.config.decoding import DFlashDecodingConfig
from engine.config.engine import EngineConfig
from engine.config.machine import Accelerator, Machine
from engine.config.resolve import resolve_engine_config

CPU = Machine(cores=6, memory_bytes=8 << 30, accelerator=None)
H200 = Machine(
    cores=16,
    memory_bytes=128 << 30,
    accelerator=Accelerator(name="H200", memory_bytes=139 << 30, compute_capability=(9, 0)),
)
B200 = Machine(
    cores=16,
    memory_bytes=128 << 30,
    accelerator=Accelerator(name="B200", memory_bytes=180 << 30, compute_capability=(10, 0)),
)
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
DRAFTER = {
    **TARGET,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 2]},
}
NUM_PARAMETERS = 1000  # of each checkpoint


def write_checkpoint(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"w": np.zeros((10, NUM_PARAMETERS // 10), np.float32)}, directory / "model.safetensors")
    return directory


def spec(drafter: Path | None, **options: Any) -> DFlashDecodingConfig:
    return DFlashDecodingConfig(**{"max_draft_len": 7, "speculative_model": drafter, **options})


def resolve(target: Path, speculative_config: DFlashDecodingConfig | None = None, **options: Any) -> EngineConfig:
    options.setdefault("machine", CPU)
    return resolve_engine_config(model=str(target), speculative_config=speculative_config, **options)
