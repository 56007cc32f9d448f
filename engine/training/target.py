"""The frozen target for training: packed rows in one pass (taps), one token per sequence over a cache (responses).

The serving model works on a paged cache and flattened rows; here whole documents are known, so attention runs over
packed rows. Both read the same checkpoint. Shapes: R rows, S tokens of a row, B sequences, H hidden, V vocabulary,
T cache length, h query heads, g KV heads, D head size, X = number of taps * H.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from engine.config.model import TargetConfig, parse_target_config
from engine.layers.rotary import RotaryTable, rotate
from engine.training.attention import Mask, attend
from engine.training.decode_attention import decode_attention
from engine.weights.checkpoint import weight_files

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [.., h, D], k and v [.., g, D] -> [.., h, D]


@dataclass(frozen=True, kw_only=True)
class DecodeCache:
    """K and V of every layer, [layers, B, g, T, D]."""

    k: Tensor
    v: Tensor


class FrozenTarget(nn.Module):
    """A Llama, Qwen2 or Qwen3 decoder without gradients."""

    def __init__(self, config: TargetConfig, *, num_positions: int, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.config, self.dtype, self.device_name = config, dtype, device
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        H, V = config.hidden_size, config.vocab_size
        self.embedding = nn.Parameter(torch.empty(V, H, **options), False)
        self.head = self.embedding if config.tie_word_embeddings else nn.Parameter(torch.empty(V, H, **options), False)
        self.norm = nn.Parameter(torch.empty(H, **options), False)
        self.rotary = RotaryTable(
            config.rope, head_dim=config.head_dim, num_positions=num_positions, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(TargetLayer(config, dtype, device) for _ in range(config.num_layers))

    @classmethod
    def load(cls, directory: str | Path, *, num_positions: int, dtype: torch.dtype, device: str) -> "FrozenTarget":
        """The target of a model directory.

        Raises:
            ValueError: a config this engine does not implement, or a tensor that is missing or has another shape.
        """
        config = parse_target_config(directory)
        weights: dict[str, Tensor] = {}
        for path in weight_files(Path(directory)):
            weights.update(load_file(path))
        model = cls(config, num_positions=num_positions, dtype=dtype, device=device)
        _fill(model.embedding, weights, "model.embed_tokens.weight")
        _fill(model.norm, weights, "model.norm.weight")
        if not config.tie_word_embeddings:
            _fill(model.head, weights, "lm_head.weight")
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, TargetLayer)
            layer.fill(weights, f"model.layers.{index}.")
        return model

    @torch.no_grad()
    def taps(self, ids_RS: Tensor, positions_RS: Tensor, mask: Mask, tap_layers: tuple[int, ...]) -> Tensor:
        """Residual stream after each of `tap_layers`, side by side, [R, S, X]. Later layers are not run."""
        x = F.embedding(ids_RS, self.embedding)
        cos, sin = _rows(self.rotary.table, positions_RS)

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            return attend(q, k, v, mask).transpose(1, 2)

        found = []
        last = max(tap_layers)
        for index, layer in enumerate(self.layers):
            if index > last:
                break
            assert isinstance(layer, TargetLayer)
            x = layer.forward(x, cos, sin, mix)
            if index in tap_layers:
                found.append(x)
        return torch.cat(found, dim=-1)

    @torch.no_grad()
    def states_and_taps(
        self, ids_RS: Tensor, positions_RS: Tensor, mask: Mask, tap_layers: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """(final states, normed, that the head turns into logits [R, S, H]; `taps`)."""
        last = self.config.num_layers - 1
        H = self.config.hidden_size
        found = self.taps(ids_RS, positions_RS, mask, (*tap_layers, last) if last not in tap_layers else tap_layers)
        taps = found[..., : len(tap_layers) * H]
        return self._normed(found[..., -H:].contiguous()), taps

    @torch.no_grad()
    def logits(self, ids_RS: Tensor, positions_RS: Tensor, mask: Mask) -> Tensor:
        """Logits of every position, float32 [R, S, V]; for checks and small inputs."""
        x = self.taps(ids_RS, positions_RS, mask, (self.config.num_layers - 1,))
        return F.linear(self._normed(x), self.head).float()

    def new_cache(self, num_seqs: int, length: int) -> DecodeCache:
        c = self.config
        shape = (c.num_layers, num_seqs, c.num_kv_heads, length, c.head_dim)
        k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device_name) for _ in range(2))
        return DecodeCache(k=k, v=v)

    @torch.no_grad()
    def decode(self, ids_B: Tensor, position_B: Tensor, cache: DecodeCache) -> Tensor:
        """Writes each token's K/V at its position and returns the next token's logits, [B, V] in the model's dtype."""
        x = F.embedding(ids_B, self.embedding)
        cos, sin = _rows(self.rotary.table, position_B)
        row_B = torch.arange(ids_B.shape[0], device=ids_B.device)
        length_B = position_B + 1
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, TargetLayer)
            k_cache, v_cache = cache.k[index], cache.v[index]

            def mix(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor = k_cache, v_cache: Tensor = v_cache) -> Tensor:
                k_cache[row_B, :, position_B] = k
                v_cache[row_B, :, position_B] = v
                return decode_attention(q.contiguous(), k_cache, v_cache, length_B)

            x = layer.forward(x, cos, sin, mix)
        return F.linear(self._normed(x), self.head)

    def _normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.norm, self.config.rms_norm_eps)


class TargetLayer(nn.Module):
    """One decoder layer; q, k, v and gate, up are one product each."""

    def __init__(self, config: TargetConfig, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.config = config
        H, D, h, g = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device), False)

        self.input_norm, self.post_norm = new(H), new(H)
        self.qkv, self.o = new((h + 2 * g) * D, H), new(H, h * D)
        self.qkv_bias = new((h + 2 * g) * D) if config.qkv_bias else None
        self.o_bias = new(H) if config.o_bias else None
        self.q_norm = new(D) if config.qk_norm else None
        self.k_norm = new(D) if config.qk_norm else None
        self.gate_up, self.down = new(2 * config.intermediate_size, H), new(H, config.intermediate_size)

    def fill(self, weights: dict[str, Tensor], prefix: str) -> None:
        c = self.config
        attention = prefix + "self_attn."
        _fill(self.input_norm, weights, prefix + "input_layernorm.weight")
        _fill(self.post_norm, weights, prefix + "post_attention_layernorm.weight")
        sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        for name, part in zip("qkv", self.qkv.split(sizes), strict=True):
            _fill(part, weights, f"{attention}{name}_proj.weight")
        if self.qkv_bias is not None:
            for name, part in zip("qkv", self.qkv_bias.split(sizes), strict=True):
                _fill(part, weights, f"{attention}{name}_proj.bias")
        _fill(self.o, weights, attention + "o_proj.weight")
        if self.o_bias is not None:
            _fill(self.o_bias, weights, attention + "o_proj.bias")
        if self.q_norm is not None and self.k_norm is not None:
            _fill(self.q_norm, weights, attention + "q_norm.weight")
            _fill(self.k_norm, weights, attention + "k_norm.weight")
        for name, part in zip(("gate", "up"), self.gate_up.chunk(2), strict=True):
            _fill(part, weights, f"{prefix}mlp.{name}_proj.weight")
        _fill(self.down, weights, prefix + "mlp.down_proj.weight")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mix: Mix) -> Tensor:
        c = self.config
        H, D, h, g = c.hidden_size, c.head_dim, c.num_heads, c.num_kv_heads
        lead = x.shape[:-1]
        qkv = F.linear(F.rms_norm(x, (H,), self.input_norm, c.rms_norm_eps), self.qkv, self.qkv_bias)
        q, k, v = qkv.view(*lead, h + 2 * g, D).split((h, g, g), dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q = F.rms_norm(q, (D,), self.q_norm, c.rms_norm_eps)
            k = F.rms_norm(k, (D,), self.k_norm, c.rms_norm_eps)
        mixed = mix(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + F.linear(mixed.reshape(*lead, h * D), self.o, self.o_bias)
        gate, up = F.linear(F.rms_norm(x, (H,), self.post_norm, c.rms_norm_eps), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


def _rows(table_P2D: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, signed sin) of positions of any shape, each [.., 1, D]."""
    rows = table_P2D[positions]
    return rows[..., :1, :], rows[..., 1:, :]


def _fill(into: Tensor, weights: dict[str, Tensor], name: str) -> None:
    found = weights.get(name)
    if found is None or found.shape != into.shape:
        have = "is missing" if found is None else f"has shape {list(found.shape)}"
        raise ValueError(f"target: tensor '{name}' {have}; config.json says {list(into.shape)}.")
    into.data.copy_(found)
