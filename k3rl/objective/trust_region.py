"""From ratio and advantage to the loss of a token, [T]; lower is better."""

from __future__ import annotations

from collections.abc import Callable

import torch


def unbounded(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """``-ratio * advantage``."""
    del clip_low, clip_high
    return -ratio * advantages


def ppo_clip(ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    """Pessimistic bound with a lower and an upper width (https://arxiv.org/abs/1707.06347 eq. 7; no dual clip)."""
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(-ratio * advantages, -clipped * advantages)


TRUST_REGIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor]] = {
    "none": unbounded,
    "clip": ppo_clip,
}
