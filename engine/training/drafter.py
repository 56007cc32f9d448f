"""The drafter as a trainable module. Its parameters bear z-lab's names, so its state dict is the checkpoint.

Master weights are float32; products run in the dtype of the block's embeddings. Shapes: R rows, S context tokens,
Q block rows (anchors * W), X = number of taps * target's H, H hidden, h query heads, g KV heads, D head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.config.model import DrafterConfig, TargetConfig
from engine.layers.rotary import RotaryTable
from engine.training.attention import Mask, attend
from engine.training.target import FrozenTarget, TargetLayer


class TrainableDrafter(nn.Module):
    """DFlash (arXiv 2602.06036): hidden_norm(fc(taps)) feeds every layer's K and V; blocks are not causal."""

    def __init__(self, config: DrafterConfig, *, num_positions: int, device: str) -> None:
        super().__init__()
        self.config = config
        H = config.hidden_size
        taps = len(config.target_layer_ids) * (config.target_hidden_size or H)
        self.fc = _Linear(taps, H, bias=False)
        self.hidden_norm = _Norm(H, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.norm = _Norm(H, config.rms_norm_eps)
        self.rotary = RotaryTable(
            config.rope, head_dim=config.head_dim, num_positions=num_positions, dtype=torch.float32
        )
        self.to(device)

    def forward(
        self, taps_RSX: Tensor, positions_RS: Tensor, x_RQH: Tensor, block_positions_RQ: Tensor, mask: Mask
    ) -> Tensor:
        """Final hidden states of the block rows, [R, Q, H]; x = target.embed([anchor, MASK ..] per block)."""
        context_RSH = self.hidden_norm(self.fc(taps_RSX))
        key_rope = self.rotary.table[torch.cat((positions_RS, block_positions_RQ), dim=1)]
        for layer in self.layers:
            x_RQH = layer(x_RQH, context_RSH, key_rope, mask)
        return self.norm(x_RQH)

    @torch.no_grad()
    def randomise(self, seed: int) -> None:
        """Fresh weights: normal with deviation 0.02, output projections smaller by sqrt(2 * layers), norms one."""
        generator = torch.Generator().manual_seed(seed)
        damped = (2 * self.config.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 1:
                weight.fill_(1.0)
            else:
                scale = damped if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02 * scale)

    @torch.no_grad()
    def start_from_target(self, target: FrozenTarget, seed: int) -> None:
        """Layers and final norm from the target's last layers; fc passes the last tap through.

        Raises:
            ValueError: the target's layers have other shapes than the drafter's.
        """
        check_layers_fit(self.config, target.config)
        self.randomise(seed)
        c, H = self.config, self.config.hidden_size
        self.fc.weight[:, -H:] += torch.eye(H, device=self.fc.weight.device)
        first = target.config.num_layers - c.num_layers
        sizes = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        for mine, theirs in zip(self.layers, target.layers[first:], strict=True):
            assert isinstance(mine, _Layer)
            assert isinstance(theirs, TargetLayer)
            attention = mine.self_attn
            mine.input_layernorm.weight.copy_(theirs.input_norm)
            mine.post_attention_layernorm.weight.copy_(theirs.post_norm)
            for name, part in zip("qkv", theirs.qkv.split(sizes), strict=True):
                getattr(attention, f"{name}_proj").weight.copy_(part)
            attention.o_proj.weight.copy_(theirs.o)
            gate, up = theirs.gate_up.chunk(2)
            mine.mlp.gate_proj.weight.copy_(gate)
            mine.mlp.up_proj.weight.copy_(up)
            mine.mlp.down_proj.weight.copy_(theirs.down)
            # The drafter norms each head; the target, which may not, has sharper heads than unit ones.
            attention.q_norm.weight.fill_(1.5)
            attention.k_norm.weight.fill_(1.5)
        self.norm.weight.copy_(target.norm)


def check_layers_fit(drafter: DrafterConfig, target: TargetConfig) -> None:
    """Raises ValueError unless the drafter's layers can start as the target's last ones."""
    for field in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        mine, theirs = getattr(drafter, field), getattr(target, field)
        if mine != theirs:
            raise ValueError(f"init='target' needs equal layers, but the drafter's {field} is {mine}, not {theirs}.")
    if drafter.num_layers > target.num_layers:
        raise ValueError(f"init='target': the drafter has {drafter.num_layers} layers, the target {target.num_layers}.")


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, D, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = D
        self.q_proj = _Linear(H, config.num_heads * D, bias=bias)
        self.k_proj = _Linear(H, config.num_kv_heads * D, bias=bias)
        self.v_proj = _Linear(H, config.num_kv_heads * D, bias=bias)
        self.o_proj = _Linear(config.num_heads * D, H, bias=bias)
        self.q_norm, self.k_norm = _Norm(D, config.rms_norm_eps), _Norm(D, config.rms_norm_eps)

    def forward(self, x_RQH: Tensor, context_RSH: Tensor, key_rope: Tensor, mask: Mask) -> Tensor:
        R, S = context_RSH.shape[:2]
        D = self.head_dim
        both = torch.cat((context_RSH, x_RQH), dim=1)
        q = self.q_norm(self.q_proj(x_RQH).view(R, -1, self.q_proj.out_features // D, D))
        k = self.k_norm(self.k_proj(both).view(R, -1, self.k_proj.out_features // D, D))
        v = self.v_proj(both).view(R, -1, self.k_proj.out_features // D, D)
        q, k = _rotate(q, key_rope[:, S:]), _rotate(k, key_rope)
        mixed = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(R, -1, self.q_proj.out_features))


class _Mlp(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        H, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _Linear(H, inner, bias=False)
        self.up_proj = _Linear(H, inner, bias=False)
        self.down_proj = _Linear(inner, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _Mlp(config)

    def forward(self, x_RQH: Tensor, context_RSH: Tensor, key_rope: Tensor, mask: Mask) -> Tensor:
        x_RQH = x_RQH + self.self_attn(self.input_layernorm(x_RQH), context_RSH, key_rope, mask)
        return x_RQH + self.mlp(self.post_attention_layernorm(x_RQH))


def _rotate(x_RNhD: Tensor, rope_RN2D: Tensor) -> Tensor:
    """Rotation in float32, rounded once to x's dtype."""
    cos, sin = rope_RN2D[:, :, :1], rope_RN2D[:, :, 1:]
    wide = x_RNhD.float()
    return (wide * cos + wide.roll(wide.shape[-1] // 2, -1) * sin).to(x_RNhD.dtype)
