"""The quantity that multiplies the advantage, by level.

A function takes the policy's log-probabilities [T], the batch and the objective, and gives [T], differentiable in the
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.normaliser import sum_by
from k3rl.objective.piece import Piece

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective

LOG_RATIO_CAP = 20.0
"""A log-ratio beyond this is held there (with zero gradient), so that exp never overflows."""


def compute_log_ratio(logprob: torch.Tensor, batch: ObjectiveBatch) -> torch.Tensor:
    """``train - rollout`` where trained, 0 elsewhere: a masked value, even NaN, reaches neither loss nor gradient."""
    return torch.where(batch.action_mask, logprob - batch.rollout_logprobs.to(logprob), 0.0)


def token_ratio(logprob: torch.Tensor, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Importance ratio of each token, exp(train - rollout)."""
    return compute_log_ratio(logprob, batch).clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()


def sequence_ratio(logprob: torch.Tensor, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Geometric mean s of the ratios of a sample's trained tokens, with the gradient of each token's own ratio.

    ``sg[s] * p / sg[p]``: GSPO-token, https://arxiv.org/abs/2507.18071. Where all tokens of a sample have
    one advantage, the gradient is that of s itself.
    """
    log_ratio = compute_log_ratio(logprob, batch)
    wide = log_ratio.detach().double()
    tokens = sum_by(batch.sample, batch.action_mask.double()).clamp(min=1)
    mean = (sum_by(batch.sample, wide) / tokens)[batch.sample].to(log_ratio)
    log_s = mean + (log_ratio - log_ratio.detach())
    return log_s.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()


def likelihood(logprob: torch.Tensor, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """No ratio: the log-likelihood itself, so that an advantage of 1 gives maximum likelihood."""
    return torch.where(batch.action_mask, logprob, 0.0)


RATIOS: dict[str, Piece[Callable[[torch.Tensor, ObjectiveBatch, Objective], torch.Tensor]]] = {
    "token": Piece(compute=token_ratio, text=lambda o: "exp(train - rollout)", needs=("rollout",)),
    "sequence": Piece(
        compute=sequence_ratio,
        text=lambda o: "exp(mean of train - rollout over the sample), with each token's own gradient",
        needs=("rollout",),
    ),
    "likelihood": Piece(compute=likelihood, text=lambda o: "log p", linear=True),
}
