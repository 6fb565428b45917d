"""What the rollouts of one step say, each number with its own denominator."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from k3rl.errors import EnvError
from k3rl.metrics import Metrics
from k3rl.rewards.compose import compose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3rl.trajectory import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], weights: Mapping[str, float]) -> Metrics:
    """Metrics of sampled trajectories, before any group is dropped."""
    metrics = Metrics()
    for trajectory in trajectories:
        rewards = compose(trajectory, weights)
        if rewards is not None and not np.isnan(rewards).any():
            metrics.mean("rollout/reward", float(rewards.sum()))
        metrics.mean("rollout/absent_frac", float(rewards is None or bool(np.isnan(rewards).any())))
        for name in weights:
            value = trajectory.total_reward([name])
            if value is not None:
                metrics.mean(f"rollout/reward/{name}", value)
        metrics.mean("rollout/turns", trajectory.num_turns)
        metrics.mean("rollout/action_tokens", trajectory.num_action_tokens)
        metrics.max("rollout/tokens_max", trajectory.num_tokens)
        for status in ("completed", "truncated", "failed"):
            metrics.mean(f"rollout/outcome/{status}_frac", trajectory.outcome.status == status)
        calls = trajectory.stats.get("tool_calls", 0.0)
        metrics.mean("rollout/invalid_call_frac", trajectory.stats.get("invalid_calls", 0.0), calls)
    return metrics


def is_infrastructure_failure(trajectory: Trajectory) -> bool:
    """The episode failed, and it was not the policy's fault: nobody knows what it would have been worth."""
    return trajectory.outcome.status == "failed" and trajectory.outcome.cause != "policy"


def check_failures(trajectories: Sequence[Trajectory], max_failed_frac: float) -> None:
    """One failed episode is data; when failing becomes the rule, raise EnvError with the commonest cause."""
    failed = [t.outcome for t in trajectories if is_infrastructure_failure(t)]
    if len(failed) > max_failed_frac * len(trajectories):
        cause, count = Counter(f"{o.cause}: {o.detail}" for o in failed).most_common(1)[0]
        raise EnvError(
            f"{len(failed)} of {len(trajectories)} episodes failed, more than rollout.max_failed_frac = "
            f"{max_failed_frac:g} allows; {count} of them with {cause}"
        )
