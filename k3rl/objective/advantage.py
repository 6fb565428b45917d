"""Advantage estimators. Pure functions of the global batch; all arithmetic in float64.

A row's function takes the batch and the objective. What it gives where nothing is trained is dropped. What it needs of
the policy is ``batch.initial``, what that said before the first step (None when the objective is linear).

Letters: J trajectories, M steps of one credit chain (turns or tokens), T target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.kl import REWARD_KL, reference_logprobs
from k3rl.objective.level import sum_by
from k3rl.objective.piece import Piece
from k3rl.objective.ratio import initial_logprobs
from k3rl.rewards.signal import no_signal_reason

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective

Std = Literal["none", "sample", "population"]
Spread = Literal["group", "batch"]
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
    scores_J: torch.Tensor, groups_J: torch.Tensor, *, baseline: Baseline, std: Std, spread: Spread = "group"
) -> tuple[torch.Tensor, int]:
    """Centre (and scale) each score within its group; also return how many groups carry no signal.

    A NaN score is absent: it is in no baseline, and its advantage is 0. A group whose present scores are fewer than
    two or all equal gives exact zeros. GRPO, https://arxiv.org/abs/2402.03300 §4.1; leave-one-out,
    https://arxiv.org/abs/2402.14740. ``std`` divides by the deviation, with n - 1 (sample) or n (population), of the
    group or of all scores of the batch (https://arxiv.org/abs/2508.08221).

    In expectation, leave-one-out without a deviation is the policy gradient; ``mean`` is (n - 1) / n of it; a deviation
    weighs tasks by how unsure their outcome is: with two samples the gradient is that of the probability of beating the
    other one less that of losing to it, divided by the square root of 2.
    """
    scores = scores_J.double()
    advantages = torch.zeros_like(scores)
    correction = CORRECTION_OF_STD[std]
    everyone = scores[~scores.isnan()]
    no_signal = 0
    for group in groups_J.unique():
        rows = torch.nonzero((groups_J == group) & ~scores.isnan()).flatten()
        present = scores[rows]
        if no_signal_reason(present.tolist()):
            no_signal += 1
            continue
        centred = (present - present.mean()) * FACTOR_OF_BASELINE[baseline](len(rows))
        among = present if spread == "group" else everyone
        advantages[rows] = centred if correction is None else centred / among.std(correction=correction)
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
    """Sum of the rewards less penalties of trained tokens, [J] float64.

    NaN for a trajectory with an absent reward or nothing trained. A reward on a token that is masked out contributes
    nothing.
    """
    count = len(batch.group)
    rewards = torch.where(batch.action_mask, batch.rewards - penalties(batch), 0.0)
    scores = torch.zeros(count, dtype=torch.float64).index_add(0, batch.trajectory, rewards)
    trained = torch.zeros(count, dtype=torch.float64).index_add(0, batch.trajectory, batch.action_mask.double())
    return torch.where(batch.scored & (trained > 0), scores, math.nan)


def penalties(batch: ObjectiveBatch) -> torch.Tensor:
    """What each token takes off the reward, [T] float64."""
    return torch.zeros(batch.num_tokens, dtype=torch.float64) if batch.penalties is None else batch.penalties


def one(batch: ObjectiveBatch, objective: Objective) -> Advantages:
    """1 everywhere."""
    return Advantages(advantages=torch.ones(batch.num_tokens, dtype=torch.float64))


def group_relative(batch: ObjectiveBatch, objective: Objective) -> Advantages:
    """The trajectory's score against its group, on each of its tokens."""
    advantages_J, no_signal = compute_group_advantages(
        score_trajectories(batch),
        batch.group,
        baseline=objective.baseline,
        std=objective.std,
        spread=objective.spread,
    )
    return Advantages(advantages=advantages_J[batch.trajectory], num_no_signal=no_signal)


def group_whitened(batch: ObjectiveBatch, objective: Objective) -> Advantages:
    """The trajectory's score less its group's baseline, then whitened over the trained tokens of the whole batch.

    REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262.
    """
    advantages_J, no_signal = compute_group_advantages(
        score_trajectories(batch), batch.group, baseline=objective.baseline, std="none"
    )
    advantages = whiten(advantages_J[batch.trajectory], batch.action_mask, objective.std)
    return Advantages(advantages=advantages, num_no_signal=no_signal)


def token_returns(batch: ObjectiveBatch, objective: Objective) -> Advantages:
    """Discounted return from each trained token on, observations bridged; whitened over the batch.

    REINFORCE++, https://arxiv.org/abs/2501.03262. There is no critic, so nothing is expected after a limit that cut an
    episode. Not whitened, it is the policy gradient; whitened over a large batch, that divided by the deviation of the
    returns; in a small one the batch's mean and deviation hold the sample itself.
    """
    returns, _ = _credit(batch, None, gamma=objective.gamma, gae_lambda=1.0, per_token=True)
    return Advantages(advantages=whiten(returns, batch.action_mask, objective.std))


def turn_gae(batch: ObjectiveBatch, objective: Objective) -> Advantages:
    """GAE over turns, whitened.

    The value of a turn is that of its first token's state; its advantage and return stand on all its tokens. A turn
    that several chains share gets the mean over them. Not whitened and with gamma 1, it is the policy gradient when
    lambda is 1, whatever the values, or when these are right. With lambda 0, what comes after the next state counts as
    the critic says.
    """
    return _gae(batch, objective, per_token=False)


def token_gae(batch: ObjectiveBatch, objective: Objective) -> Advantages:
    """GAE over trained tokens, observations bridged; whitened."""
    return _gae(batch, objective, per_token=True)


def group_and_state(batch: ObjectiveBatch, objective: Objective) -> Advantages:
    """``group`` plus ``step_weight`` times each turn's discounted return against the turns that chose from its state.

    GiGPO, https://arxiv.org/abs/2505.10978. Peers ask the environment what a state is. Here it is read off the
    tokens: ``same_state: observation`` takes turns of a group that answer the same observation for the same, whatever
    came before, and ``path`` only those whose whole context is the same. A turn whose state nobody shares gets no step
    advantage: with leave-one-out and no deviation the step part is the policy gradient with each state's share
    multiplied by the probability that another sample of the group comes by. Equal observations that hide different
    states make the baseline worse and add no bias, unless a sample makes the same one twice: then its baseline holds
    what it did itself. There is no critic: nothing is expected after a limit.
    """
    episode = group_relative(batch, objective)
    returns, _ = _credit(batch, None, gamma=objective.gamma, gae_lambda=1.0, per_token=False)
    steps, _ = compute_group_advantages(
        returns[batch.turn_ranges[:, 0]],
        batch.states[objective.same_state],
        baseline=objective.baseline,
        std=objective.std,
        spread=objective.spread,
    )
    on_tokens = torch.cat([steps, torch.zeros(1, dtype=torch.float64)])[batch.turn]
    return Advantages(
        advantages=episode.advantages + objective.step_weight * on_tokens, num_no_signal=episode.num_no_signal
    )


def teacher(batch: ObjectiveBatch, objective: Objective) -> Advantages:
    """``clip(teacher - initial, -cap, cap)`` of each token: its own part of -KL(train || teacher), and of no later one.

    On-policy distillation as in K3; https://arxiv.org/abs/2306.13649. ``batch.reference_logprobs`` are those of the
    teacher, and each trajectory may have another one. In expectation, and where nothing is clipped, the gradient is
    that of -KL with the states held as they are visited: it leaves out that a token leads to states of another KL.
    """
    gap = reference_logprobs(batch, "the advantage is of a teacher").double() - initial_logprobs(batch).double()
    return Advantages(advantages=gap.clamp(-objective.teacher_cap, objective.teacher_cap))


def _gae(batch: ObjectiveBatch, objective: Objective, *, per_token: bool) -> Advantages:
    assert batch.initial is not None
    assert batch.initial.value is not None
    assert batch.initial.tail_value is not None
    values = torch.cat([batch.initial.value.double(), batch.initial.tail_value.double()])
    advantages, base = _credit(
        batch, values, gamma=objective.gamma, gae_lambda=objective.gae_lambda, per_token=per_token
    )
    # the critic learns the returns as they are; only what the policy sees is whitened
    return Advantages(advantages=whiten(advantages, batch.action_mask, objective.std), returns=advantages + base)


def _credit(
    batch: ObjectiveBatch, values: torch.Tensor | None, *, gamma: float, gae_lambda: float, per_token: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages along the credit chains, and the values below them, both [T]; a step is a token or a turn.

    ``values`` are of every target and then of every sample's end; None: all 0, and a return is what comes out. What
    several chains share gets the mean over them.
    """
    costs = penalties(batch)
    total = torch.zeros(batch.num_tokens, dtype=torch.float64)
    base = torch.zeros_like(total)
    count = torch.zeros_like(total)
    for chain in batch.chains:
        ranges = batch.turn_ranges[list(chain.turns)]
        begins, lengths = ranges[:, 0], ranges[:, 1] - ranges[:, 0]
        tokens = torch.cat([torch.arange(a, b) for a, b in ranges.tolist()])
        at, sizes = (tokens, torch.ones_like(tokens)) if per_token else (begins, lengths)
        # a turn's reward is earned by its last step; each step bears the cost of its tokens
        earned = -costs[tokens]
        earned[lengths.cumsum(0) - 1] += torch.tensor(chain.rewards, dtype=torch.float64)
        rewards = sum_by(torch.arange(len(at)).repeat_interleave(sizes), earned)
        below = torch.zeros(len(at), dtype=torch.float64) if values is None else values[at]
        last_value = 0.0 if values is None or chain.bootstrap is None else float(values[chain.bootstrap])
        gae = compute_gae(rewards.tolist(), below.tolist(), gamma=gamma, gae_lambda=gae_lambda, last_value=last_value)
        total[tokens] += torch.tensor(gae, dtype=torch.float64).repeat_interleave(sizes)
        base[tokens] = below.repeat_interleave(sizes)
        count[tokens] += 1
    return torch.where(count > 0, total / count.clamp(min=1), 0.0), base


def _scale(objective: Objective, verb: str) -> str:
    return "" if CORRECTION_OF_STD[objective.std] is None else f", {verb} by the {objective.std} std"


def _reward(objective: Objective) -> str:
    return f" of rewards - {REWARD_KL.text(objective)}" if objective.reward_kl_coef else ""


def _group_text(o: Objective) -> str:
    among = "" if CORRECTION_OF_STD[o.std] is None else f" of the {o.spread}"
    return f"score{_reward(o)} - {o.baseline} of the group{_scale(o, 'divided')}{among}"


def _gae_text(objective: Objective, unit: str) -> str:
    whitened = _scale(objective, "whitened over tokens")
    discount = f"gamma {objective.gamma:g}, lambda {objective.gae_lambda:g}"
    return f"GAE{_reward(objective)} over {unit}, {discount}{whitened}"


_REWARD = ("reward_kl", "reward_kl_coef")

ADVANTAGES: dict[str, Piece[Callable[[ObjectiveBatch, Objective], Advantages]]] = {
    "one": Piece(compute=one, text=lambda o: "1", linear=True),
    "group": Piece(
        compute=group_relative,
        text=_group_text,
        keys=("baseline", "std", "spread", *_REWARD),
        needs=("group",),
        linear=True,
    ),
    "group_whitened": Piece(
        compute=group_whitened,
        text=lambda o: f"score{_reward(o)} - {o.baseline} of the group{_scale(o, 'whitened over tokens')}",
        keys=("baseline", "std", *_REWARD),
        needs=("group",),
        linear=True,
    ),
    "returns": Piece(
        compute=token_returns,
        text=lambda o: f"return{_reward(o)} over tokens, gamma {o.gamma:g}{_scale(o, 'whitened over tokens')}",
        keys=("gamma", "std", *_REWARD),
        linear=True,
    ),
    "gae_turn": Piece(
        compute=turn_gae,
        text=lambda o: _gae_text(o, "turns"),
        keys=("gamma", "gae_lambda", "std", *_REWARD),
        needs=("value", "critic"),
        gives=("returns",),
    ),
    "gae_token": Piece(
        compute=token_gae,
        text=lambda o: _gae_text(o, "tokens"),
        keys=("gamma", "gae_lambda", "std", *_REWARD),
        needs=("value", "critic"),
        gives=("returns",),
    ),
    "group_and_state": Piece(
        compute=group_and_state,
        text=lambda o: (
            f"{_group_text(o)} + {o.step_weight:g} * the same of returns (gamma {o.gamma:g}) "
            f"among turns of the same {o.same_state}"
        ),
        keys=("baseline", "std", "spread", "gamma", "step_weight", "same_state", *_REWARD),
        needs=("group",),
        linear=True,
    ),
    "teacher": Piece(
        compute=teacher,
        text=lambda o: f"clip(teacher - initial, -{o.teacher_cap:g}, {o.teacher_cap:g})",
        keys=("teacher_cap",),
        needs=("reference",),
    ),
}
