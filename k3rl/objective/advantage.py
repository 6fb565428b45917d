"""Advantage estimators. Pure functions; all arithmetic in float64.

A row's function takes the batch, what the policy says before the first step (None when the objective is linear) and
the objective. What it gives where nothing is trained is dropped.

Letters: J trajectories, M steps of one credit chain (turns or tokens), T target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from k3rl.objective.batch import ObjectiveBatch, TokenVectors
from k3rl.objective.piece import Piece
from k3rl.rewards.signal import no_signal_reason

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective

Std = Literal["none", "sample", "population"]
Baseline = Literal["mean", "leave_one_out"]

CORRECTION_OF_STD: dict[Std, int | None] = {"none": None, "sample": 1, "population": 0}
"""What the deviation takes off the count; None: it divides nothing."""

FACTOR_OF_BASELINE: dict[Baseline, Callable[[int], float]] = {
    "mean": lambda n: 1.0,
    "leave_one_out": lambda n: n / (n - 1),
}
"""``score - mean of the others`` is this factor, of the group's size, times ``score - mean of all``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """What an estimator gives."""

    advantages: torch.Tensor  # [T] float64
    returns: torch.Tensor | None = None  # [T] float64, targets of the value head
    num_no_signal: int = 0  # groups whose rewards do not vary


def compute_group_advantages(
    scores_J: torch.Tensor, groups_J: torch.Tensor, *, baseline: Baseline, std: Std
) -> tuple[torch.Tensor, int]:
    """Centre (and scale) each score within its group; also return how many groups carry no signal.

    A NaN score is absent: it is in no baseline, and its advantage is 0. A group whose present scores are fewer than
    two or all equal gives exact zeros. GRPO, https://arxiv.org/abs/2402.03300 §4.1; leave-one-out,
    https://arxiv.org/abs/2402.14740. ``std`` divides by the group's deviation, with n - 1 (sample) or n (population).
    """
    scores = scores_J.double()
    advantages = torch.zeros_like(scores)
    no_signal = 0
    for group in groups_J.unique():
        rows = torch.nonzero((groups_J == group) & ~scores.isnan()).flatten()
        present = scores[rows]
        if no_signal_reason(present.tolist()):
            no_signal += 1
            continue
        centred = (present - present.mean()) * FACTOR_OF_BASELINE[baseline](len(rows))
        correction = CORRECTION_OF_STD[std]
        advantages[rows] = centred if correction is None else centred / present.std(correction=correction)
    return advantages, no_signal


def compute_gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float, gae_lambda: float, last_value: float
) -> list[float]:
    """Generalised advantage estimation over M steps that follow each other (https://arxiv.org/abs/1506.02438 eq. 16).

    ``last_value`` is V of the state after the last step: 0 when the task terminated there, the critic's estimate when
    a limit cut it. Observations are bridged by not being steps.
    """
    advantages = [0.0] * len(rewards)
    running = 0.0
    next_value = last_value
    for i in reversed(range(len(rewards))):
        delta = rewards[i] + gamma * next_value - values[i]
        running = delta + gamma * gae_lambda * running
        advantages[i] = running
        next_value = values[i]
    return advantages


def whiten(advantages_T: torch.Tensor, mask_T: torch.Tensor, std: Std) -> torch.Tensor:
    """Centre and scale over trained tokens; fewer than two or no spread gives zeros, ``none`` changes nothing.

    Nothing is absent here: a NaN is a fault, and makes all of them NaN.
    """
    correction = CORRECTION_OF_STD[std]
    if correction is None:
        return advantages_T
    trained = advantages_T[mask_T]
    out = torch.zeros_like(advantages_T)
    if bool(trained.isnan().any()) or no_signal_reason(trained.tolist()) is None:
        out[mask_T] = (trained - trained.mean()) / trained.std(correction=correction)
    return out


def score_trajectories(batch: ObjectiveBatch) -> torch.Tensor:
    """Sum of the rewards on trained tokens, [J] float64; NaN for a trajectory with an absent reward or nothing trained.

    A reward on a token that is masked out contributes nothing.
    """
    count = len(batch.group)
    rewards = torch.where(batch.action_mask, batch.rewards, 0.0)
    scores = torch.zeros(count, dtype=torch.float64).index_add(0, batch.trajectory, rewards)
    trained = torch.zeros(count, dtype=torch.float64).index_add(0, batch.trajectory, batch.action_mask.double())
    return torch.where(batch.scored & (trained > 0), scores, math.nan)


def one(batch: ObjectiveBatch, vectors: TokenVectors | None, objective: Objective) -> Advantages:
    """1 everywhere."""
    return Advantages(advantages=torch.ones(batch.num_tokens, dtype=torch.float64))


def group_relative(batch: ObjectiveBatch, vectors: TokenVectors | None, objective: Objective) -> Advantages:
    """The trajectory's score against its group, on each of its tokens."""
    advantages_J, no_signal = compute_group_advantages(
        score_trajectories(batch), batch.group, baseline=objective.baseline, std=objective.std
    )
    return Advantages(advantages=advantages_J[batch.trajectory], num_no_signal=no_signal)


def turn_gae(batch: ObjectiveBatch, vectors: TokenVectors | None, objective: Objective) -> Advantages:
    """GAE over turns, whitened.

    The value of a turn is that of its first token's state; its advantage and return stand on all its tokens. A turn
    that several chains share gets the mean over them.
    """
    return _chain_gae(batch, vectors, objective, per_token=False)


def token_gae(batch: ObjectiveBatch, vectors: TokenVectors | None, objective: Objective) -> Advantages:
    """GAE over trained tokens, observations bridged; whitened."""
    return _chain_gae(batch, vectors, objective, per_token=True)


def _chain_gae(
    batch: ObjectiveBatch, vectors: TokenVectors | None, objective: Objective, *, per_token: bool
) -> Advantages:
    assert vectors is not None
    assert vectors.value is not None
    assert vectors.tail_value is not None
    values_T = vectors.value.detach().double()
    all_values = torch.cat([values_T, vectors.tail_value.detach().double()])
    total = torch.zeros(batch.num_tokens, dtype=torch.float64)
    base = torch.zeros_like(total)
    count = torch.zeros_like(total)
    for chain in batch.chains:
        ranges = [tuple(batch.turn_ranges[turn].tolist()) for turn in chain.turns]
        steps = [range(a, b) if per_token else range(a, a + 1) for a, b in ranges]
        rewards = [
            r if i == len(s) - 1 else 0.0 for s, r in zip(steps, chain.rewards, strict=True) for i in range(len(s))
        ]
        at = torch.tensor([i for s in steps for i in s])
        last_value = 0.0 if chain.bootstrap is None else float(all_values[chain.bootstrap])
        values = values_T[at]
        gae = compute_gae(
            rewards, values.tolist(), gamma=objective.gamma, gae_lambda=objective.gae_lambda, last_value=last_value
        )
        spread = torch.tensor([1 if per_token else b - a for a, b in ranges for _ in range(b - a if per_token else 1)])
        tokens = torch.cat([torch.arange(a, b) for a, b in ranges])
        total[tokens] += torch.tensor(gae, dtype=torch.float64).repeat_interleave(spread)
        base[tokens] = values.repeat_interleave(spread)
        count[tokens] += 1
    advantages = torch.where(count > 0, total / count.clamp(min=1), 0.0)
    # the critic learns the returns as they are; only what the policy sees is whitened
    return Advantages(advantages=whiten(advantages, batch.action_mask, objective.std), returns=advantages + base)


def _scale(objective: Objective, verb: str) -> str:
    return "" if CORRECTION_OF_STD[objective.std] is None else f", {verb} by the {objective.std} std"


def _gae_text(objective: Objective, unit: str) -> str:
    whitened = _scale(objective, "whitened over tokens")
    return f"GAE over {unit}, gamma {objective.gamma:g}, lambda {objective.gae_lambda:g}{whitened}"


ADVANTAGES: dict[str, Piece[Callable[[ObjectiveBatch, TokenVectors | None, Objective], Advantages]]] = {
    "one": Piece(compute=one, text=lambda o: "1", linear=True),
    "group": Piece(
        compute=group_relative,
        text=lambda o: f"score - {o.baseline} of the group{_scale(o, 'divided')}",
        keys=("baseline", "std"),
        needs=("group",),
        linear=True,
    ),
    "gae_turn": Piece(
        compute=turn_gae,
        text=lambda o: _gae_text(o, "turns"),
        keys=("gamma", "gae_lambda", "std"),
        needs=("value",),
    ),
    "gae_token": Piece(
        compute=token_gae,
        text=lambda o: _gae_text(o, "tokens"),
        keys=("gamma", "gae_lambda", "std"),
        needs=("value",),
    ),
}
