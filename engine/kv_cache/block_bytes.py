"""What a KV block takes on one rank, from the two models' shapes: arithmetic, no torch."""

from engine.config.engine import EngineConfig
from engine.parallel.sharding import shard_heads


def drafter_kv_heads(config: EngineConfig, ranks: int) -> int:
    """KV heads of the drafter on each rank, padding included; all of them when the drafter is replicated."""
    assert config.drafter is not None
    ranks = ranks if config.drafter_tensor_parallel else 1
    return shard_heads(config.drafter.num_heads, config.drafter.num_kv_heads, rank=0, ranks=ranks).num_kv_heads


def bytes_per_block(config: EngineConfig) -> int:
    """Bytes of one block on one rank: K and V of every layer of both models."""
    target = config.target
    heads = shard_heads(target.num_heads, target.num_kv_heads, rank=0, ranks=config.tensor_parallel_size)
    per_token = target.num_layers * heads.num_kv_heads * target.head_dim
    if config.drafter is not None:
        per_token += (
            config.drafter.num_layers * drafter_kv_heads(config, config.tensor_parallel_size) * config.drafter.head_dim
        )
    return 2 * per_token * config.block_size * (4 if config.dtype == "float32" else 2)
