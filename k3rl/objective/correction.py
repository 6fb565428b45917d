"""Weights that correct a token's loss for off-policy sampling: detached, [T], multiplied after the trust region."""

from __future__ import annotations

from collections.abc import Callable

import torch


def no_correction(log_ratio: torch.Tensor) -> torch.Tensor:
    """Weight 1: the ratio is taken against the behaviour policy itself, so there is nothing left to correct."""
    return torch.ones_like(log_ratio.detach())


CORRECTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"none": no_correction}
