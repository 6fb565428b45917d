"""What is added to the policy's loss: ``coefficient * sum(weights * token loss)``; a coefficient of 0 leaves it out.

A function takes what the policy says, the batch and the objective, and gives the loss of each token, [T].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3rl.objective.batch import ObjectiveBatch, TokenVectors
from k3rl.objective.kl import KL_ESTIMATORS, reference_logprobs
from k3rl.objective.level import sum_by
from k3rl.objective.piece import Piece
from k3rl.objective.ratio import compute_log_ratio

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective


def entropy_bonus(vectors: TokenVectors, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Minus the entropy."""
    return -torch.where(batch.action_mask, vectors.entropy, 0.0)


def reference_kl(vectors: TokenVectors, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Estimate of KL(train || reference)."""
    train = torch.where(batch.action_mask, vectors.logprob, 0.0)
    reference = reference_logprobs(batch, "objective.kl_coef is not 0").to(train)
    return KL_ESTIMATORS[objective.kl].compute(train, reference, compute_log_ratio(vectors.logprob, batch))


def drift(vectors: TokenVectors, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """``(log r)^2`` of each token, also where the trust region leaves it no gradient.

    K2.5, https://arxiv.org/abs/2602.02276 §4.4.2 eq. 1; whether it spares clipped tokens is not said there.
    """
    return compute_log_ratio(vectors.logprob, batch, objective.anchor).square()


def trajectory_drift(vectors: TokenVectors, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """``1/2 (log r)^2`` of a whole trajectory, on its tokens in proportion to their part in the sum.

    With the score function, advantages A of trajectories and the normaliser ``sums`` the loss is the mean of
    ``-A L + coef/2 L^2``, L being the log-ratio of a trajectory: the mirror descent of K1.5
    (https://arxiv.org/abs/2501.12599 eq. 3), whose minimum is at L = A / coef. K2 writes ``(A - coef L)^2``, which is
    ``2 coef`` times that and a constant.
    """
    log_ratio = compute_log_ratio(vectors.logprob, batch, objective.anchor)
    whole = sum_by(batch.trajectory, log_ratio.double())[batch.trajectory].to(log_ratio)
    return 0.5 * log_ratio * whole


def value_loss(vectors: TokenVectors, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Clipped squared error of the value head against the returns."""
    assert vectors.value is not None
    assert batch.returns is not None
    assert batch.initial is not None
    assert batch.initial.value is not None
    value = torch.where(batch.action_mask, vectors.value, 0.0)
    returns = torch.where(batch.action_mask, batch.returns.to(value), 0.0)
    initial = torch.where(batch.action_mask, batch.initial.value.to(value), 0.0)
    return clipped_value_loss(value, initial, returns, objective.value_clip)


def clipped_value_loss(
    value: torch.Tensor, initial_value: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> torch.Tensor:
    """``0.5 max((V - R)^2, (clip(V, V_old ± value_clip) - R)^2)`` per token, [T]."""
    clipped = initial_value + (value - initial_value).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((value - returns).square(), (clipped - returns).square())


@dataclass(frozen=True, kw_only=True, slots=True)
class Term(Piece[Callable[[TokenVectors, ObjectiveBatch, "Objective"], torch.Tensor]]):
    """A row with the key that holds its coefficient, and the metric ``train/<metric>`` of its token mean."""

    coef: str
    metric: str | None = None


TERMS: dict[str, Term] = {
    "entropy": Term(
        compute=entropy_bonus,
        text=lambda o: f"-{o.entropy_coef:g} * entropy",
        coef="entropy_coef",
        keys=("entropy_coef",),
        linear=True,
    ),
    "kl": Term(
        compute=reference_kl,
        text=lambda o: f"{o.kl_coef:g} * {KL_ESTIMATORS[o.kl].text(o)}",
        coef="kl_coef",
        keys=("kl", "kl_coef"),
        metric="reference_kl",
        needs=("reference",),
    ),
    "drift": Term(
        compute=drift,
        text=lambda o: f"{o.drift_coef:g} * (train - {o.anchor})^2",
        coef="drift_coef",
        keys=("anchor", "drift_coef"),
        metric="drift",
        needs=("rollout",),
    ),
    "trajectory_drift": Term(
        compute=trajectory_drift,
        text=lambda o: f"{o.drift_coef:g} * 1/2 (train - {o.anchor}) (sum of train - {o.anchor} over the trajectory)",
        coef="drift_coef",
        keys=("anchor", "drift_coef"),
        metric="drift",
        needs=("rollout",),
    ),
    "value": Term(
        compute=value_loss,
        text=lambda o: f"{o.value_coef:g} * 0.5 max((V - R)^2, (clip(V, V_old ± {o.value_clip:g}) - R)^2)",
        coef="value_coef",
        keys=("value_coef", "value_clip"),
        metric="value_loss",
        needs=("value", "returns"),
        gives=("critic",),
    ),
}
