"""Per-token weights that turn token losses into the loss: ``loss = sum(weights * token_loss)``.

They are computed once from the global batch, before the first backward, so no split of the work can change them.
Rows with nothing trained count in no denominator; a batch with nothing trained has weights 0.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

Normaliser = Literal["tokens", "sequences", "trajectories", "constant"]
NORMALISERS: tuple[str, ...] = get_args(Normaliser)


def compute_weights(
    normaliser: str, mask: torch.Tensor, sample: torch.Tensor, trajectory: torch.Tensor, horizon: int | None
) -> torch.Tensor:
    """Weights [T] float64.

    ``tokens``: 1 / trained tokens. ``sequences`` and ``trajectories``: mean over samples (trajectories) of the mean
    over their tokens. ``constant``: sum over tokens / (trajectories * ``horizon``), https://arxiv.org/abs/2503.20783.
    """
    trained = mask.double()
    if normaliser == "tokens":
        return trained / trained.sum().clamp(min=1)
    if normaliser == "constant":
        if horizon is None:
            raise ValueError("the constant normaliser needs a horizon")
        return trained / (_tokens_per_row(trained, trajectory) > 0).sum().clamp(min=1) / horizon
    row = sample if normaliser == "sequences" else trajectory
    tokens = _tokens_per_row(trained, row)
    return trained / tokens[row].clamp(min=1) / (tokens > 0).sum().clamp(min=1)


def _tokens_per_row(trained: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    count = int(row.max()) + 1 if len(row) else 0
    return torch.zeros(count, dtype=torch.float64).index_add(0, row, trained)
