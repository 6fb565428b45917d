"""Which tokens belong together: a level gives each of the T tokens the index of its row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from k3rl.objective.batch import ObjectiveBatch

LEVELS: dict[str, Callable[[ObjectiveBatch], torch.Tensor]] = {
    "token": lambda batch: torch.arange(batch.num_tokens),
    "turn": lambda batch: batch.turn,
    "sequence": lambda batch: batch.sample,
    "trajectory": lambda batch: batch.trajectory,
    "group": lambda batch: batch.group[batch.trajectory],
}
"""A sequence is a sample: one path, of which a trajectory may have several."""


def sum_by(row: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sums of ``values`` [T] over the tokens of each row, [rows], where ``row`` [T] is that of each token."""
    count = int(row.max()) + 1 if len(row) else 0
    return values.new_zeros(count).index_add(0, row, values)


def mean_log(log_ratio: torch.Tensor, batch: ObjectiveBatch, level: str) -> torch.Tensor:
    """Mean of ``log_ratio`` [T] over the trained tokens of a row, on each of them, with each token's own gradient.

    The exponential of it is the geometric mean s of the ratios, and ``sg[s] * p / sg[p]`` for the gradient: GSPO-token,
    https://arxiv.org/abs/2507.18071. Where all tokens of a row have one advantage, the gradient is that of s.
    """
    row = LEVELS[level](batch)
    tokens = sum_by(row, batch.action_mask.double()).clamp(min=1)
    mean = (sum_by(row, log_ratio.detach().double()) / tokens)[row].to(log_ratio)
    return mean + (log_ratio - log_ratio.detach())
