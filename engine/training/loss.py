"""Cross-entropy of draft blocks with position weights, without ever holding all logits.

The gradient with respect to the hidden states is computed together with the loss, chunk by chunk, so a chunk's logits
die before the next chunk's are made. Shapes: A blocks of the chunk, J = W - 1 predicted slots, H hidden, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BlockLoss:
    """grad_AJH: d(sum of weight * nll) / d hidden, not normalised. nll_AJ, hit_AJ: per slot, zero and false where not
    valid. weight_AJ: the weights used."""

    grad_AJH: Tensor
    nll_AJ: Tensor
    hit_AJ: Tensor
    weight_AJ: Tensor


def position_weights(slots: int, gamma: float, device: str | torch.device = "cpu") -> Tensor:
    """exp(-j / gamma) for slots j = 0 .. slots-1: a late slot counts only if all before it are right."""
    return torch.exp(-torch.arange(slots, dtype=torch.float32, device=device) / gamma)


def acceptance_weights(probability_AJ: Tensor) -> Tensor:
    """What one slot is worth to the accepted length: P(reached) * (1 + expected further slots accepted after it).

    This is d E[accepted] / d log p_j with the factor p_j left out, for drafts drawn independently per slot; leaving it
    out keeps the pull of cross-entropy on slots that are still wrong.
    """
    J = probability_AJ.shape[1]
    reached = torch.cat((torch.ones_like(probability_AJ[:, :1]), probability_AJ.cumprod(1)[:, :-1]), dim=1)
    further = [torch.zeros_like(probability_AJ[:, 0])]
    for j in range(J - 1, 0, -1):
        further.append(probability_AJ[:, j] * (1.0 + further[-1]))
    return reached * (1.0 + torch.stack(further[::-1], dim=1))


def block_loss(
    hidden_AJH: Tensor,
    head_VH: Tensor,
    label_AJ: Tensor,
    valid_AJ: Tensor,
    decay_J: Tensor,
    acceptance_share: float,
    teacher_AJH: Tensor | None = None,
    distill_share: float = 0.0,
) -> BlockLoss:
    """Loss and gradient of one chunk of blocks.

    acceptance_share: 0 weights slots by `decay_J` alone, 1 by `acceptance_weights` alone.
    teacher_AJH, distill_share: the target's final states that predict the labels; its softmax then takes this share of
        the label's one-hot distribution in the gradient. nll stays that of the label.
    """
    return _whole(
        _loss_and_gradient,
        hidden_AJH,
        head_VH,
        label_AJ,
        valid_AJ,
        decay_J,
        acceptance_share,
        teacher_AJH,
        distill_share,
    )


def _whole(inner: Callable[..., tuple[Tensor, ...]], hidden_AJH: Tensor, *arguments: object) -> BlockLoss:
    A, J, H = hidden_AJH.shape
    grad, nll, hit, weight = inner(hidden_AJH.reshape(A * J, H), *arguments)
    return BlockLoss(grad_AJH=grad.view(A, J, H), nll_AJ=nll, hit_AJ=hit, weight_AJ=weight)


def _loss_and_gradient(
    hidden_NH: Tensor,
    head_VH: Tensor,
    label_AJ: Tensor,
    valid_AJ: Tensor,
    decay_J: Tensor,
    acceptance_share: float,
    teacher_AJH: Tensor | None,
    distill_share: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    label_N1 = label_AJ.reshape(-1, 1)
    logits_NV = hidden_NH @ head_VH.T
    wide_NV = logits_NV.float()
    top_N1 = wide_NV.amax(-1, keepdim=True)
    norm_N1 = top_N1 + (wide_NV - top_N1).exp().sum(-1, keepdim=True).log()
    own_N1 = wide_NV.gather(-1, label_N1)
    nll_AJ = (norm_N1 - own_N1).view(valid_AJ.shape) * valid_AJ
    hit_AJ = (own_N1 >= top_N1).view(valid_AJ.shape) & valid_AJ
    weight_AJ = decay_J * (1.0 - acceptance_share)
    if acceptance_share:
        weight_AJ = weight_AJ + acceptance_share * acceptance_weights((-nll_AJ).exp() * valid_AJ)
    weight_AJ = weight_AJ * valid_AJ
    is_label_NV = torch.arange(head_VH.shape[0], device=label_N1.device) == label_N1
    wanted_NV = is_label_NV.float()
    if teacher_AJH is not None:
        taught_NV = (teacher_AJH.reshape(hidden_NH.shape) @ head_VH.T).float().softmax(-1)
        wanted_NV = (1.0 - distill_share) * wanted_NV + distill_share * taught_NV
    grad_NV = ((wide_NV - norm_N1).exp() - wanted_NV) * weight_AJ.reshape(-1, 1)
    return grad_NV.to(hidden_NH.dtype) @ head_VH, nll_AJ, hit_AJ, weight_AJ


def compiled_block_loss() -> Callable[..., BlockLoss]:
    """`block_loss` with its passes over the logits fused."""
    inner = torch.compile(_loss_and_gradient, dynamic=False)

    def run(hidden_AJH: Tensor, *arguments: object) -> BlockLoss:
        return _whole(inner, hidden_AJH, *arguments)

    return run


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int | None, floor: float = 0.0) -> float:
    """Linear warm-up, then a cosine from peak to floor * peak; constant while total_steps is not known."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if total_steps is None:
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done)))
