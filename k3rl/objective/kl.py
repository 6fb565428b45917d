"""Estimators of KL(train || reference) from sampled tokens (http://joschu.net/blog/kl-approx.html); all [T].

Each is a closed form of two vectors of log-probabilities. What it needs and reads is what the ``kl`` term says.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from k3rl.objective.piece import Piece

EXP_CAP = 10.0
"""Beyond this log-ratio exp continues as its tangent: value and gradient stay finite, and the gradient never dies."""


def k1(train_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Plain log-ratio: unbiased, may be negative."""
    return train_logprobs - reference_logprobs


def k2(train_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio: its gradient is that of the KL."""
    return 0.5 * (train_logprobs - reference_logprobs).square()


def k3(train_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """``exp(d) - d - 1`` with d = reference - train: unbiased and never negative."""
    d = reference_logprobs - train_logprobs
    tangent = math.exp(EXP_CAP) * (1 + d - EXP_CAP)
    return torch.where(d > EXP_CAP, tangent, d.clamp(max=EXP_CAP).exp()) - d - 1


KL_ESTIMATORS: dict[str, Piece[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "k1": Piece(compute=k1, text=lambda o: "k1(train || reference)"),
    "k2": Piece(compute=k2, text=lambda o: "k2(train || reference)"),
    "k3": Piece(compute=k3, text=lambda o: "k3(train || reference)"),
}
