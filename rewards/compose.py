"""Compose reward components by weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from k3rl.rewards.base import absence_cause, last_action, validate
from k3rl.rewards.milestone import MilestoneReward
from k3rl.rewards.outcome import OutcomeReward
from k3rl.rewards.signal import no_signal_reason
from k3rl.trajectory import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3rl.metrics import Metrics
    from k3rl.rewards.signal import NoSignal
    from k3rl.trajectory import Trajectory


def compose(trajectory: Trajectory, weights: Mapping[str, float]) -> np.ndarray | None:
    """Weighted sum of the components on each segment.

    Args:
        trajectory: what to score.
        weights: weight by component; a component of weight 0 is not asked for.

    Returns:
        ``[S]`` float64: 0 where nothing was earned, NaN where a component is absent; None when the policy never acted.
    """
    if last_action(trajectory) is None:
        return None
    total = np.zeros(len(trajectory.segments))
    for name, weight in weights.items():
        if weight == 0:
            continue
        for i, reward in enumerate(component(trajectory, name)):
            if reward is not None:
                total[i] += np.nan if reward.value is None else weight * reward.value
    return total


def component(trajectory: Trajectory, name: str) -> list[Reward | None]:
    """Rewards of one component, an entry per segment."""
    function = OutcomeReward() if name == OutcomeReward.name else MilestoneReward(name)
    return validate(function, trajectory.task, trajectory)


def compose_value(trajectory: Trajectory, weights: Mapping[str, float], metrics: Metrics | None = None) -> Reward:
    """Weighted sum over the trajectory, called ``total``; absent with the cause of the first absent component.

    ``metrics`` gets ``reward/<component>`` and ``reward/total`` (means over the trajectories that have them) and
    ``reward/<component>/absent_frac``.
    """
    total, cause = 0.0, None if last_action(trajectory) is not None else absence_cause(trajectory)
    for name, weight in weights.items():
        rewards = [r for r in component(trajectory, name) if r is not None]
        missing = next((r for r in rewards if r.value is None), None)
        value = sum(r.value for r in rewards if r.value is not None)
        absent = missing is not None or not rewards
        if metrics is not None:
            metrics.mean(f"reward/{name}/absent_frac", float(absent))
            if not absent:
                metrics.mean(f"reward/{name}", value)
        if weight == 0:
            continue
        if absent:
            cause = cause or (missing.cause if missing else None) or absence_cause(trajectory)
        total += weight * value
    if cause is not None:
        return Reward.absent("total", cause)
    if metrics is not None:
        metrics.mean("reward/total", total)
    return Reward("total", total)


def signal_reason(group: Sequence[Trajectory], weights: Mapping[str, float], signal: str = "total") -> NoSignal | None:
    """Why a group teaches nothing, or None when it does.

    ``signal`` names the component that must vary among the trajectories that have it; ``total`` is the weighted sum.
    """
    wanted = weights if signal == "total" else {signal: 1.0}
    return no_signal_reason([compose_value(t, wanted).value for t in group])
