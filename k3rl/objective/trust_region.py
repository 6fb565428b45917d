"""From ratio and advantage to the loss of a token, [T]; lower is better.

A function takes ratio [T], advantages [T], the batch and the objective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.piece import Piece

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective


def unbounded(
    ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """``-ratio * advantage``."""
    return -ratio * advantages


def ppo_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """Pessimistic bound with a lower and an upper width (https://arxiv.org/abs/1707.06347 eq. 7; no dual clip)."""
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return torch.maximum(-ratio * advantages, -clipped * advantages)


def watch_nothing(ratio: torch.Tensor, advantages: torch.Tensor, objective: Objective) -> dict[str, torch.Tensor]:
    """No metric."""
    return {}


def watch_clip(ratio: torch.Tensor, advantages: torch.Tensor, objective: Objective) -> dict[str, torch.Tensor]:
    """Where the ratio is outside of the clip, and where the clip is what counts, both [T] bool."""
    high, low = ratio > 1 + objective.clip_high, ratio < 1 - objective.clip_low
    clipped = (high & (advantages > 0)) | (low & (advantages < 0))
    return {"ratio_outside_frac": high | low, "ratio_clipped_frac": clipped}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustRegion(Piece[Callable[[torch.Tensor, torch.Tensor, ObjectiveBatch, "Objective"], torch.Tensor]]):
    """A row that may also say, of each token, what is worth a metric: its mean is logged as ``train/<name>``."""

    watch: Callable[[torch.Tensor, torch.Tensor, Objective], dict[str, torch.Tensor]] = watch_nothing


TRUST_REGIONS: dict[str, TrustRegion] = {
    "none": TrustRegion(compute=unbounded, text=lambda o: "-r A", linear=True),
    "clip": TrustRegion(
        compute=ppo_clip,
        watch=watch_clip,
        text=lambda o: f"max(-r A, -clip(r, {1 - o.clip_low:g}, {1 + o.clip_high:g}) A)",
        keys=("clip_low", "clip_high"),
    ),
}
