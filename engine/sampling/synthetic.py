"""Acceptance by decree, for measuring speed with weights that nobody trained. What is emitted then means nothing.

A mean of L emitted tokens a step accepts the first drafts with probabilities 1, .., 1, then the fraction of L, then 0:
6.5 is 1, 1, 1, 1, 1, 0.5, 0, .. (the law of vLLM's synthetic acceptance length).
"""

import math

import torch
from torch import Tensor

from engine.sampling.noise import STREAM_ACCEPT, uniform_noise


def synthetic_accepted(length: float, seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Drafts to accept, int64 [R]: floor(length) - 1, and one more with the probability of the fraction.

    seed_R, position_R: int64 keys of the coin, so that ranks and repetitions agree. length: at least 1.
    """
    certain = math.floor(length) - 1
    coin_R1 = uniform_noise(
        seed_R, position_R, torch.zeros(1, dtype=torch.int64, device=seed_R.device), stream=STREAM_ACCEPT
    )
    return certain + (coin_R1[:, 0] < length - math.floor(length)).to(torch.int64)
