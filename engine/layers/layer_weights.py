"""The tensors of a decoder layer as the CUDA kernels take them. Shapes: h query heads, g KV heads, D head size."""

from dataclasses import dataclass

from torch import Tensor

from engine.layers.int8_weight import Int8Weight


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """A decoder layer's tensors; see `engine.models.decoder.DecoderLayer`. qk_norm: [h + g, D] or None.

    qkv_count and its like: their `engine.layers.linear.split_counters`. qkv_int8 and its like: in 8 bits.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qkv_count: Tensor
    qk_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    o_count: Tensor
    post_norm: Tensor
    gate_up: Tensor
    gate_up_count: Tensor
    down: Tensor
    down_count: Tensor
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_int8: Int8Weight | None = None
    o_int8: Int8Weight | None = None
    gate_up_int8: Int8Weight | None = None
    down_int8: Int8Weight | None = None
