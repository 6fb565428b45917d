"""How far the policy has moved from the one that the ratio is taken against: the logarithm of the ratio, by level.

A function takes the policy's log-probabilities [T], the batch and the objective, and gives [T], differentiable in the
log-probabilities and 0 where nothing is trained.

Three policies (https://arxiv.org/abs/2110.00641): ``train`` is what learns, ``initial`` is what the learner held
before the first step on the batch, ``rollout`` is what sampled. The key ``anchor`` names the one below the ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from k3rl.errors import TrainingError
from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.level import mean_log
from k3rl.objective.piece import Piece

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective

Anchor = Literal["rollout", "initial"]
LogRatio = Callable[[torch.Tensor, ObjectiveBatch, "Objective"], torch.Tensor]

LOG_RATIO_CAP = 20.0
"""A log-ratio beyond this is held there (with zero gradient) under exp, so that it never overflows."""


def capped_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """``exp`` of what is held within ``LOG_RATIO_CAP``."""
    return log_ratio.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()


def initial_logprobs(batch: ObjectiveBatch) -> torch.Tensor:
    """What the learner said before the first step on the batch, [T]."""
    if batch.initial is None:
        raise TrainingError("the objective needs what the policy said before the first step, and nobody computed it")
    return batch.initial.logprob


ANCHORS: dict[Anchor, Callable[[ObjectiveBatch], torch.Tensor]] = {
    "rollout": lambda batch: batch.rollout_logprobs,
    "initial": initial_logprobs,
}


def compute_log_ratio(logprob: torch.Tensor, batch: ObjectiveBatch, anchor: Anchor = "rollout") -> torch.Tensor:
    """``train - anchor`` where trained, 0 elsewhere: a masked value, even NaN, reaches neither loss nor gradient."""
    return torch.where(batch.action_mask, logprob - ANCHORS[anchor](batch).to(logprob), 0.0)


def token_ratio(logprob: torch.Tensor, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """``train - anchor`` of each token (PPO, https://arxiv.org/abs/1707.06347).

    It corrects the choice of the token itself; the states it is chosen in and what follows stay those of the anchor.
    """
    return compute_log_ratio(logprob, batch, objective.anchor)


def turn_ratio(logprob: torch.Tensor, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Its mean over a turn, the action of an agent."""
    return mean_log(token_ratio(logprob, batch, objective), batch, "turn")


def sequence_ratio(logprob: torch.Tensor, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Its mean over what a sample trains (GSPO, https://arxiv.org/abs/2507.18071)."""
    return mean_log(token_ratio(logprob, batch, objective), batch, "sequence")


def likelihood(logprob: torch.Tensor, batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """No ratio: the log-likelihood itself, so that an advantage of 1 gives maximum likelihood."""
    return torch.where(batch.action_mask, logprob, 0.0)


def _of_two(compute: LogRatio, text: Callable[[Objective], str]) -> Piece[LogRatio]:
    return Piece(compute=compute, text=text, keys=("anchor",), needs=("rollout",), gives=("ratio",))


def _mean_text(unit: str) -> Callable[[Objective], str]:
    return lambda o: f"exp(mean of train - {o.anchor} over the {unit}), with each token's own gradient"


RATIOS: dict[str, Piece[LogRatio]] = {
    "token": _of_two(token_ratio, lambda o: f"exp(train - {o.anchor})"),
    "turn": _of_two(turn_ratio, _mean_text("turn")),
    "sequence": _of_two(sequence_ratio, _mean_text("sample")),
    "likelihood": Piece(compute=likelihood, text=lambda o: "p", linear=True),
}
