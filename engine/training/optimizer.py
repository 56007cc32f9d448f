"""Parameters in one flat buffer, and the two optimisers that step over it.

All matrices of one shape lie side by side, so Muon's iterations run on a batch of them and a data-parallel all-reduce
is one call. Muon: momentum, then the nearest orthogonal matrix by a quintic Newton-Schulz iteration (K. Jordan et al.,
2024), scaled so that a step's root mean square is 0.2 * learning rate, about AdamW's (J. Liu et al., arXiv 2502.16982).
Vectors always take AdamW without decay.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

OptimizerKind = Literal["adamw", "muon"]
_NS_STEPS = 5
_NS = (3.4445, -4.7750, 2.0315)
_MUON_RMS = 0.2
_BETAS = (0.9, 0.95)
_EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class ShapeGroup:
    """`count` parameters of one shape from element `start` of the flat buffer on."""

    shape: tuple[int, ...]
    start: int
    count: int

    def view(self, flat: Tensor) -> Tensor:
        """[count, *shape]"""
        size = self.count
        for n in self.shape:
            size *= n
        return flat[self.start : self.start + size].view(self.count, *self.shape)


class ParameterArena:
    """Moves a module's parameters and gradients into flat float32 buffers; the module's tensors become views."""

    def __init__(self, module: nn.Module) -> None:
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in module.parameters():
            assert parameter.dtype == torch.float32
            by_shape.setdefault(tuple(parameter.shape), []).append(parameter)
        shapes = sorted(by_shape, key=lambda shape: (-len(shape), shape))  # matrices first
        device = next(module.parameters()).device
        total = sum(p.numel() for p in module.parameters())
        self.weights = torch.empty(total, device=device)
        self.gradients = torch.zeros(total, device=device)
        self.groups: list[ShapeGroup] = []
        start = 0
        for shape in shapes:
            group = ShapeGroup(shape=shape, start=start, count=len(by_shape[shape]))
            self.groups.append(group)
            for parameter, weight, gradient in zip(
                by_shape[shape], group.view(self.weights), group.view(self.gradients), strict=True
            ):
                weight.copy_(parameter.data)
                parameter.data = weight
                parameter.grad = gradient
                start += parameter.numel()
        self.first_vector = next((g.start for g in self.groups if len(g.shape) == 1), total)


class Optimizer:
    """Steps an arena. kind "adamw": all parameters; "muon": matrices by Muon, vectors by AdamW."""

    def __init__(
        self, arena: ParameterArena, *, kind: OptimizerKind, weight_decay: float, momentum: float = 0.95
    ) -> None:
        if kind not in ("adamw", "muon"):
            raise ValueError(f"optimizer must be adamw or muon, got '{kind}'.")
        self.arena, self.kind, self.weight_decay, self.momentum = arena, kind, weight_decay, momentum
        self.first_moment = torch.zeros_like(arena.weights)
        adam_start = 0 if kind == "adamw" else arena.first_vector
        self.second_moment = torch.zeros_like(arena.weights[adam_start:])
        self.adam_start = adam_start
        self.steps = 0

    def clip(self, limit: float) -> Tensor:
        """Scales the gradient to at most this norm; returns the norm before."""
        norm = self.arena.gradients.norm()
        self.arena.gradients.mul_((limit / (norm + 1e-12)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update; clears the gradients."""
        self.steps += 1
        arena = self.arena
        if self.kind == "muon":
            for group in arena.groups:
                if len(group.shape) > 1:
                    self._muon(group, learning_rate)
        for part, decay in self._adam_parts():
            self._adam(part, learning_rate, decay)
        arena.gradients.zero_()

    def reset(self) -> None:
        self.first_moment.zero_()
        self.second_moment.zero_()
        self.steps = 0

    def state(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "steps": self.steps,
            "first_moment": self.first_moment,
            "second_moment": self.second_moment,
        }

    def load_state(self, state: dict[str, object]) -> None:
        """Raises ValueError for the state of another kind of optimiser."""
        if state["kind"] != self.kind:
            raise ValueError(f"the checkpoint was written by optimizer '{state['kind']}', not '{self.kind}'.")
        steps, first, second = state["steps"], state["first_moment"], state["second_moment"]
        assert isinstance(steps, int)
        assert isinstance(first, Tensor) and isinstance(second, Tensor)
        self.steps = steps
        self.first_moment.copy_(first)
        self.second_moment.copy_(second)

    def _adam_parts(self) -> list[tuple[slice, float]]:
        border, end = self.arena.first_vector, self.arena.weights.numel()
        parts = [(slice(border, end), 0.0)]
        if self.kind == "adamw":
            parts.insert(0, (slice(0, border), self.weight_decay))
        return parts

    def _adam(self, part: slice, learning_rate: float, decay: float) -> None:
        arena = self.arena
        weight, gradient = arena.weights[part], arena.gradients[part]
        first = self.first_moment[part]
        second = self.second_moment[part.start - self.adam_start : part.stop - self.adam_start]
        first.lerp_(gradient, 1.0 - _BETAS[0])
        second.lerp_(gradient.square(), 1.0 - _BETAS[1])
        denominator = (second / (1.0 - _BETAS[1] ** self.steps)).sqrt_().add_(_EPS)
        if decay:
            weight.mul_(1.0 - learning_rate * decay)
        weight.addcdiv_(first, denominator, value=-learning_rate / (1.0 - _BETAS[0] ** self.steps))

    def _muon(self, group: ShapeGroup, learning_rate: float) -> None:
        arena = self.arena
        weight, gradient, momentum = (group.view(t) for t in (arena.weights, arena.gradients, self.first_moment))
        momentum.lerp_(gradient, 1.0 - self.momentum)
        direction = orthogonalise(gradient.lerp(momentum, self.momentum))
        scale = _MUON_RMS * max(group.shape) ** 0.5
        weight.mul_(1.0 - learning_rate * self.weight_decay)
        weight.add_(direction.to(weight.dtype), alpha=-learning_rate * scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """U V^T of every matrix [n, r, c], singular values to within 0.7 .. 1.2. bfloat16 on CUDA, float32 elsewhere."""
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (matrices.norm(dim=(-2, -1), keepdim=True).to(x.dtype) + 1e-7)
    a, b, c = _NS
    for _ in range(_NS_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
