"""Rotary position embedding: tables per rope type, rows gathered once per step and shared by all layers.

Shapes: N rows, P positions, D head size.
Sources: default (arXiv 2104.09864), linear interpolation (2306.15595), YaRN (2309.00071), Llama 3.1's frequency bands.
"""

import math

import torch
from torch import Tensor, nn

from engine.config.rope import RopeConfig
from engine.layers.cuda_rows import cuda_rows


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each of the D/2 planes, float32 [D/2], and the factor on cos and sin.

    Raises:
        ValueError: a rope type without an implementation.
    """
    parameters = dict(rope.parameters)
    base = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / base
    if rope.rope_type == "default":
        return plain, 1.0
    if rope.rope_type == "linear":
        return plain / parameters["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(plain, parameters), 1.0
    if rope.rope_type == "yarn":
        return _yarn(base, rope.theta, head_dim, parameters)
    raise ValueError(f"rope_type '{rope.rope_type}' is not supported by this version.")


def _llama3(plain: Tensor, parameters: dict[str, float]) -> Tensor:
    """Short wavelengths stay, long ones are divided by the factor, the band between is blended linearly."""
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)  # rotations over the old context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * plain / factor + keep * plain


def _yarn(base: Tensor, theta: float, head_dim: int, parameters: dict[str, float]) -> tuple[Tensor, float]:
    """Interpolates planes with few rotations over the old context, keeps those with many; cos and sin are scaled."""
    factor = parameters["factor"]
    old_len = parameters["original_max_position_embeddings"]

    def plane_of(rotations: float) -> float:
        return head_dim * math.log(old_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = plane_of(parameters.get("beta_fast", 32.0)), plane_of(parameters.get("beta_slow", 1.0))
    if parameters.get("truncate", 1.0):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    frequencies = interpolated / (factor * base) + (1.0 - interpolated) / base
    return frequencies, _yarn_scale(factor, parameters)


def _yarn_scale(factor: float, parameters: dict[str, float]) -> float:
    if "attention_factor" in parameters:
        return parameters["attention_factor"]

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(parameters["mscale"]) / scale(parameters["mscale_all_dim"])
    return scale(1.0)


class RotaryTable(nn.Module):
    """cos and signed sin of positions 0 .. num_positions-1, [P, 2, D] in the model's dtype.

    The angles are float32 products, as in `transformers`, and the cosines are rounded to the dtype once. The first half
    of the sines is negated: x * cos + swap_halves(x) * sin is then the whole rotation.
    """

    table: Tensor

    def __init__(
        self, rope: RopeConfig, *, head_dim: int, num_positions: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        super().__init__()
        frequencies, scale = inverse_frequencies(rope, head_dim)
        angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(-1) * frequencies
        cos, sin = angles.cos() * scale, angles.sin() * scale
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), dim=1)
        self.register_buffer("table", table.to(dtype=dtype, device=device), persistent=False)

    def rows(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [N, 1, D]. Positions must lie inside the table."""
        on_gpu = cuda_rows(self.table)
        if on_gpu is not None:
            rows_N2D = on_gpu.gather_rows(self.table, positions_N)
        else:
            rows_N2D = self.table.index_select(0, positions_N)
        return rows_N2D[:, :1], rows_N2D[:, 1:]


def rotate(x_NhD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotates each head by its row's position; halves are paired (d, d + D/2)."""
    return torch.addcmul(x_NhD * cos_N1D, x_NhD.roll(x_NhD.shape[-1] // 2, -1), sin_N1D)
