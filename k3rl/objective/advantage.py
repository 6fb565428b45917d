"""Advantage estimators. Pure functions; all arithmetic in float64.

Letters: J trajectories, M steps of one credit chain (turns or tokens), T target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from k3rl.objective.batch import ObjectiveBatch, TokenVectors

Std = Literal["none", "sample", "population"]
Baseline = Literal["mean", "leave_one_out"]
GroupSignal = Literal["varied", "all_same", "all_absent", "too_small"]

EQUAL_REL = 1e-6
"""Rewards that differ by less than this fraction of the largest are equal: what is left is rounding, not signal."""


def group_signal(values: Sequence[float | None]) -> GroupSignal:
    """Say whether a group can teach anything; ``values`` are the chosen reward metric, None or NaN where absent."""
    present = [float(v) for v in values if v is not None and not math.isnan(v)]
    if not present:
        return "all_absent"
    if len(present) < 2:
        return "too_small"
    spread = max(present) - min(present)
    return "all_same" if spread <= EQUAL_REL * max(abs(v) for v in present) else "varied"


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
        if group_signal(present.tolist()) != "varied":
            no_signal += 1
            continue
        centred = present - present.mean()
        if baseline == "leave_one_out":
            centred = centred * (len(rows) / (len(rows) - 1))
        if std != "none":
            centred = centred / present.std(correction=1 if std == "sample" else 0)
        advantages[rows] = centred
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
    """Centre and scale over trained tokens; fewer than two or no spread gives zeros, ``none`` changes nothing."""
    if std == "none":
        return advantages_T
    trained = advantages_T[mask_T]
    out = torch.zeros_like(advantages_T)
    if group_signal(trained.tolist()) == "varied":
        out[mask_T] = (trained - trained.mean()) / trained.std(correction=1 if std == "sample" else 0)
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


def compute_turn_gae(
    batch: ObjectiveBatch, vectors: TokenVectors, *, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE over turns: advantages and returns, both [T] float64.

    The value of a turn is that of its first token's state; its advantage and return stand on all its tokens. A turn
    that several chains share gets the mean over them.
    """
    return _chain_gae(batch, vectors, gamma, gae_lambda, per_token=False)


def compute_token_gae(
    batch: ObjectiveBatch, vectors: TokenVectors, *, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE over trained tokens, observations bridged: advantages and returns, both [T] float64."""
    return _chain_gae(batch, vectors, gamma, gae_lambda, per_token=True)


def _chain_gae(
    batch: ObjectiveBatch, vectors: TokenVectors, gamma: float, gae_lambda: float, *, per_token: bool
) -> tuple[torch.Tensor, torch.Tensor]:
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
        gae = compute_gae(rewards, values.tolist(), gamma=gamma, gae_lambda=gae_lambda, last_value=last_value)
        spread = torch.tensor([1 if per_token else b - a for a, b in ranges for _ in range(b - a if per_token else 1)])
        tokens = torch.cat([torch.arange(a, b) for a, b in ranges])
        total[tokens] += torch.tensor(gae, dtype=torch.float64).repeat_interleave(spread)
        base[tokens] = values.repeat_interleave(spread)
        count[tokens] += 1
    advantages = torch.where(count > 0, total / count.clamp(min=1), 0.0)
    return advantages, advantages + base
