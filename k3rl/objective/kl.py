"""Estimators of KL(train || reference) from sampled tokens (http://joschu.net/blog/kl-approx.html); all [T].

Each is a closed form of the log-probabilities of both and of the log-ratio of ``train`` to ``rollout``. As a loss, its
gradient counts and not its value, and peers give the same names to different gradients; on tokens sampled from
``train`` the expectation of each is

    k1                    0: as a loss it does nothing
    k2, k3_straight       of KL(train || reference)
    k3                    of KL(reference || train), whose minimum is the same and whose path is not
    k1_ratio, k3_ratio    of KL(train || reference), also on tokens sampled from ``rollout``
    k3_score              of KL(train || reference)

each over the states as they are visited: what a token does to the KL of later ones is not in it. That is in the return
when the KL is taken off the reward, where k1 is the one whose gradient is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from k3rl.errors import TrainingError
from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.piece import Piece
from k3rl.objective.ratio import capped_exp, compute_log_ratio, initial_logprobs

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective

EXP_CAP = 10.0
"""Beyond this log-ratio exp continues as its tangent: value and gradient stay finite, and the gradient never dies."""

Estimate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def reference_logprobs(batch: ObjectiveBatch, reason: str) -> torch.Tensor:
    """Those of the reference where trained, 0 elsewhere, [T]; TrainingError, with the reason, when there are none."""
    if batch.reference_logprobs is None:
        raise TrainingError(f"{reason}, but no reference log-probabilities were given")
    return torch.where(batch.action_mask, batch.reference_logprobs, 0.0)


def k1(train: torch.Tensor, reference: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """Plain log-ratio: unbiased, may be negative."""
    return train - reference


def k2(train: torch.Tensor, reference: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """Half the squared log-ratio: its gradient is that of the KL."""
    return 0.5 * (train - reference).square()


def k3(train: torch.Tensor, reference: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp(d) - d - 1`` with d = reference - train: unbiased and never negative."""
    d = reference - train
    tangent = math.exp(EXP_CAP) * (1 + d - EXP_CAP)
    return torch.where(d > EXP_CAP, tangent, d.clamp(max=EXP_CAP).exp()) - d - 1


def k3_straight(train: torch.Tensor, reference: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """The value of k3 with the gradient of k2."""
    square = k2(train, reference, log_ratio)
    return k3(train, reference, log_ratio).detach() + (square - square.detach())


def k3_score(train: torch.Tensor, reference: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """k3 with its score function: ``train / sg[train] * k3``."""
    return (train - train.detach()).exp() * k3(train, reference, log_ratio)


def with_ratio(estimate: Estimate) -> Estimate:
    """Times ``train / rollout``, with its gradient (https://arxiv.org/abs/2512.02556)."""

    def compute(train: torch.Tensor, reference: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
        return capped_exp(log_ratio) * estimate(train, reference, log_ratio)

    return compute


KL_ESTIMATORS: dict[str, Piece[Estimate]] = {
    "k1": Piece(compute=k1, text=lambda o: "k1(train || reference)"),
    "k2": Piece(compute=k2, text=lambda o: "k2(train || reference)"),
    "k3": Piece(compute=k3, text=lambda o: "k3(train || reference)"),
    "k3_straight": Piece(compute=k3_straight, text=lambda o: "k3(train || reference) with the gradient of k2"),
    "k3_score": Piece(compute=k3_score, text=lambda o: "train / sg[train] k3(train || reference)"),
    "k1_ratio": Piece(compute=with_ratio(k1), text=lambda o: "train / rollout k1(train || reference)"),
    "k3_ratio": Piece(compute=with_ratio(k3), text=lambda o: "train / rollout k3(train || reference)"),
}


def reward_kl(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Estimate of KL(initial || reference) at each trained token, [T] float64, to be taken off its reward."""
    reference = reference_logprobs(batch, "objective.reward_kl_coef is not 0")
    log_ratio = compute_log_ratio(initial_logprobs(batch).double(), batch)
    initial = torch.where(batch.action_mask, initial_logprobs(batch).double(), 0.0)
    return KL_ESTIMATORS[objective.reward_kl].compute(initial, reference.double(), log_ratio)


REWARD_KL: Piece[Callable[[ObjectiveBatch, Objective], torch.Tensor]] = Piece(
    compute=reward_kl,
    text=lambda o: f"{o.reward_kl_coef:g} * {o.reward_kl}(initial || reference)",
    needs=("reference",),
)
"""Takes part when its coefficient is not 0."""
