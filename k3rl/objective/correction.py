"""Weights that correct a token's loss for off-policy sampling: [T], no gradient, multiplied after the trust region.

A function takes the policy's log-probabilities [T], the batch and the objective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.piece import Piece

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective


def no_correction(logprob: torch.Tensor, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Weight 1: the ratio is taken against the behaviour policy itself, so there is nothing left to correct."""
    return torch.ones_like(logprob.detach())


CORRECTIONS: dict[str, Piece[Callable[[torch.Tensor, ObjectiveBatch, Objective], torch.Tensor]]] = {
    "none": Piece(compute=no_correction, text=lambda o: "", linear=True),
}
