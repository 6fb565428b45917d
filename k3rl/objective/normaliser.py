"""Per-token weights that turn token losses into the loss: ``loss = sum(weights * token_loss)``.

They are computed once from the global batch, before the first backward, so no split of the work can change them.
Rows with nothing trained count in no denominator; a batch with nothing trained has weights 0. All are [T] float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.piece import Piece

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective


def over_tokens(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """1 / trained tokens."""
    trained = batch.action_mask.double()
    return trained / trained.sum().clamp(min=1)


def over_sequences(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Mean over samples of the mean over their tokens."""
    return _mean_of_means(batch, batch.sample)


def over_trajectories(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Mean over trajectories of the mean over their tokens, in however many samples they lie."""
    return _mean_of_means(batch, batch.trajectory)


def over_constant(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """1 / (trajectories * ``horizon``), blind to how long each is (https://arxiv.org/abs/2503.20783)."""
    assert objective.horizon is not None
    trained = batch.action_mask.double()
    return trained / (sum_by(batch.trajectory, trained) > 0).sum().clamp(min=1) / objective.horizon


def sum_by(row: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sums of ``values`` [T] over the tokens of each row, [rows], where ``row`` [T] is that of each token."""
    count = int(row.max()) + 1 if len(row) else 0
    return values.new_zeros(count).index_add(0, row, values)


def _mean_of_means(batch: ObjectiveBatch, row: torch.Tensor) -> torch.Tensor:
    trained = batch.action_mask.double()
    tokens = sum_by(row, trained)
    return trained / tokens[row].clamp(min=1) / (tokens > 0).sum().clamp(min=1)


NORMALISERS: dict[str, Piece[Callable[[ObjectiveBatch, Objective], torch.Tensor]]] = {
    "tokens": Piece(compute=over_tokens, text=lambda o: "mean over tokens of the global batch", linear=True),
    "sequences": Piece(compute=over_sequences, text=lambda o: "mean over sequences of the global batch", linear=True),
    "trajectories": Piece(
        compute=over_trajectories, text=lambda o: "mean over trajectories of the global batch", linear=True
    ),
    "constant": Piece(
        compute=over_constant,
        text=lambda o: f"1 / (trajectories of the global batch * horizon {o.horizon})",
        needs=("horizon",),
        linear=True,
    ),
}
