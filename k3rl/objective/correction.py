"""What off-policy sampling is corrected by: weights [T] without gradient, multiplied onto the policy's loss.

With ``w = exp(initial - rollout)``, which is what sampling engine and learner disagree on and what training has changed
since. A correction is for a ratio against ``initial`` (three policies, https://arxiv.org/abs/2505.24298); a ratio
against ``rollout`` holds w already. A rejection leaves tokens out, and is for either.

Weights are fixed before the first step on a batch, float64, and come with what they were before any bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.level import mean_log, sum_by
from k3rl.objective.piece import Piece
from k3rl.objective.ratio import capped_exp, compute_log_ratio, initial_logprobs

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective


class Weights(NamedTuple):
    """What a correction gives."""

    used: torch.Tensor  # [T]
    raw: torch.Tensor  # [T], before any bound


Correct = Callable[[ObjectiveBatch, "Objective"], Weights]
Reject = Callable[[ObjectiveBatch, "Objective"], torch.Tensor]


def log_mismatch(batch: ObjectiveBatch) -> torch.Tensor:
    """``log w`` of each token, [T] float64; 0 where nothing is trained."""
    return compute_log_ratio(initial_logprobs(batch).detach().double(), batch)


def no_correction(batch: ObjectiveBatch, objective: Objective) -> Weights:
    """Weight 1."""
    ones = torch.ones(batch.num_tokens, dtype=torch.float64)
    return Weights(ones, ones)


def token_truncated(batch: ObjectiveBatch, objective: Objective) -> Weights:
    """Truncated importance sampling: w of the token, held within bounds.

    Not truncated, it corrects the choice of each token; the states it is chosen in and what follows stay those of the
    rollout policy. The lower bound is 0 unless given: peers differ. https://arxiv.org/abs/1802.01561 §4.1.
    """
    return _truncated(log_mismatch(batch), objective)


def sequence_truncated(batch: ObjectiveBatch, objective: Objective) -> Weights:
    """The same with the product of w over a sample.

    Not truncated, and with one sample a trajectory, it makes the gradient of a score function exactly on-policy.
    """
    return _truncated(sum_by(batch.sample, log_mismatch(batch))[batch.sample], objective)


def icepop(batch: ObjectiveBatch, objective: Objective) -> Weights:
    """w of the token where it is within the kept range, 0 elsewhere (https://arxiv.org/abs/2510.18855)."""
    raw = capped_exp(log_mismatch(batch))
    return Weights(torch.where(_is_kept(raw, objective), raw, 0.0), raw)


def keep_all(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Nothing is rejected."""
    return torch.ones(batch.num_tokens, dtype=torch.bool)


def keep_tokens(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """Tokens whose w is within the kept range, [T] bool."""
    return _is_kept(capped_exp(log_mismatch(batch)), objective)


def keep_sequences(batch: ObjectiveBatch, objective: Objective) -> torch.Tensor:
    """All tokens of the samples whose geometric mean of w is within the kept range, [T] bool.

    With ``correction: token`` and no truncation it is what peers call masked sequence importance sampling: they say
    that it bounds the tokens' weights too, and their code does not.
    """
    return _is_kept(capped_exp(mean_log(log_mismatch(batch), batch, "sequence")), objective)


def _truncated(log_weights: torch.Tensor, objective: Objective) -> Weights:
    raw = capped_exp(log_weights)
    return Weights(raw.clamp(objective.truncate_low, objective.truncate_high), raw)


def _is_kept(weights: torch.Tensor, objective: Objective) -> torch.Tensor:
    return (weights >= objective.keep_low) & (weights <= objective.keep_high)


def _bounded(weight: str) -> Callable[[Objective], str]:
    return lambda o: f"clip({weight}, {o.truncate_low:g}, {o.truncate_high:g}) * "


def _kept(weight: str) -> Callable[[Objective], str]:
    return lambda o: f"[{o.keep_low:g} <= {weight} <= {o.keep_high:g}] * "


_TOKEN = "exp(initial - rollout)"
_TRUNCATE, _KEEP = ("truncate_low", "truncate_high"), ("keep_low", "keep_high")

CORRECTIONS: dict[str, Piece[Correct]] = {
    "none": Piece(compute=no_correction, text=lambda o: "", linear=True),
    "token": Piece(compute=token_truncated, text=_bounded(_TOKEN), keys=_TRUNCATE, needs=("rollout", "uncorrected")),
    "sequence": Piece(
        compute=sequence_truncated,
        text=_bounded("exp(sum of initial - rollout over the sample)"),
        keys=_TRUNCATE,
        needs=("rollout", "uncorrected"),
    ),
    "icepop": Piece(
        compute=icepop,
        text=lambda o: f"{_kept(_TOKEN)(o)}{_TOKEN} * ",
        keys=(*_KEEP, "count_rejected"),
        needs=("rollout", "uncorrected"),
    ),
}

REJECTIONS: dict[str, Piece[Reject]] = {
    "none": Piece(compute=keep_all, text=lambda o: "", linear=True),
    "token": Piece(compute=keep_tokens, text=_kept(_TOKEN), keys=(*_KEEP, "count_rejected"), needs=("rollout",)),
    "sequence": Piece(
        compute=keep_sequences,
        text=_kept("exp(mean of initial - rollout over the sample)"),
        keys=(*_KEEP, "count_rejected"),
        needs=("rollout",),
    ),
}
"""A rejected token has no policy loss. Whether it counts in the denominators is the key ``count_rejected``."""
