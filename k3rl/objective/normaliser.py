"""Per-token weights that turn token losses into the loss: ``loss = sum(weights * token_loss)``.

They are computed once from the global batch, before the first backward, so no split of the work can change them.
Rows with nothing trained count in no denominator; a batch with nothing trained has weights 0. All are [T] float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.level import LEVELS, sum_by
from k3rl.objective.piece import Piece

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective

Normalise = Callable[[ObjectiveBatch, "Objective"], torch.Tensor]


def over_tokens(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """1 / trained tokens (DAPO, https://arxiv.org/abs/2503.14476 §3.3)."""
    trained = batch.action_mask.double()
    return trained / trained.sum().clamp(min=1)


def mean_of_means(level: str) -> Normalise:
    """Mean over the rows of a level of the mean over their trained tokens.

    By sequence: GRPO, https://arxiv.org/abs/2402.03300. By trajectory, it does not matter in how many samples one lies.
    By group, no task outweighs another (https://arxiv.org/abs/2510.13786).
    """

    def compute(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
        row, trained = LEVELS[level](batch), batch.action_mask.double()
        tokens = sum_by(row, trained)
        return trained / tokens[row].clamp(min=1) / (tokens > 0).sum().clamp(min=1)

    return compute


def trajectory_sums(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """1 / trajectories: mean over trajectories of the sum over their tokens, which is that of the policy gradient."""
    trained = batch.action_mask.double()
    return trained / (sum_by(batch.trajectory, trained) > 0).sum().clamp(min=1)


def over_constant(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """1 / (trajectories * ``horizon``), blind to how long each is (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    assert objective.horizon is not None
    return trajectory_sums(batch, objective) / objective.horizon


def _mean_over(unit: str) -> Callable[[Objective], str]:
    return lambda o: f"mean over {unit} of the global batch"


NORMALISERS: dict[str, Piece[Normalise]] = {
    "tokens": Piece(compute=over_tokens, text=_mean_over("tokens"), linear=True),
    "sequences": Piece(compute=mean_of_means("sequence"), text=_mean_over("sequences"), linear=True),
    "trajectories": Piece(compute=mean_of_means("trajectory"), text=_mean_over("trajectories"), linear=True),
    "groups": Piece(compute=mean_of_means("group"), text=_mean_over("groups"), linear=True),
    "sums": Piece(compute=trajectory_sums, text=lambda o: "1 / trajectories of the global batch", linear=True),
    "constant": Piece(
        compute=over_constant,
        text=lambda o: f"1 / (trajectories of the global batch * horizon {o.horizon})",
        needs=("horizon",),
        linear=True,
    ),
}
