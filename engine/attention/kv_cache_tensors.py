"""The paged K/V tensors of target and drafter: separate layer lists over the same block ids."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config.engine import EngineConfig
from engine.kv_cache.block_bytes import drafter_kv_heads
from engine.layers.upload import upload
from engine.parallel.sharding import shard_heads
from engine.parallel.tp_group import TpGroup

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCache:
    """Per layer K and V, [num_blocks, block_size, kv_heads_local, head_dim], zeroed: stale rows must be finite.

    target_kv:  (k, v) of each target layer.
    drafter_kv: (k, v) of each drafter layer (empty without a drafter); views of drafter_stack.
    drafter_stack: [2 * drafter layers, slots, kv_heads_local, head_dim], layer l's K at 2l and V at 2l + 1; the context
        rows of all layers are written into it at once. None without a drafter.
    """

    target_kv: tuple[tuple[Tensor, Tensor], ...]
    drafter_kv: tuple[tuple[Tensor, Tensor], ...]
    drafter_stack: Tensor | None

    @classmethod
    def create(cls, config: EngineConfig, tp: TpGroup, *, device: str | None = None) -> "KvCache":
        """Allocates config.num_blocks blocks for this rank on `device` (config.device by default)."""
        dtype, device = DTYPES[config.dtype], device or config.device
        blocks = (config.num_blocks, config.block_size)
        target = config.target
        heads = shard_heads(target.num_heads, target.num_kv_heads, rank=tp.rank, ranks=tp.size)
        shape = (*blocks, heads.num_kv_heads, target.head_dim)
        target_kv = tuple(
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in range(target.num_layers)
        )
        if config.drafter is None:
            return cls(target_kv=target_kv, drafter_kv=(), drafter_stack=None)
        drafter = config.drafter
        local = drafter_kv_heads(config, tp.size)
        stack = torch.zeros(
            2 * drafter.num_layers, blocks[0] * blocks[1], local, drafter.head_dim, dtype=dtype, device=device
        )
        layers = stack.view(2 * drafter.num_layers, *blocks, local, drafter.head_dim)
        drafter_kv = tuple((layers[2 * i], layers[2 * i + 1]) for i in range(drafter.num_layers))
        return cls(target_kv=target_kv, drafter_kv=drafter_kv, drafter_stack=stack)

    def zero_blocks(self, block_ids: tuple[int, ...]) -> None:
        """Zeroes these blocks and the null block in every layer of both models.

        The null block takes the K/V of dropped rows, so a row that is not finite may have left its mark there too.
        """
        index = upload([0, *block_ids], self.target_kv[0][0].device)
        for layers in (self.target_kv, self.drafter_kv):
            for k, v in layers:
                k.index_fill_(0, index, 0.0)
                v.index_fill_(0, index, 0.0)
