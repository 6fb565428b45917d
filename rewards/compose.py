"""Compose reward components by weight. Trajectories were scored before: their components stand on their segments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from k3rl.rewards.base import last_action
from k3rl.rewards.signal import no_signal_reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3rl.trajectory import Summary, Trajectory


def compose(trajectory: Trajectory, weights: Mapping[str, float]) -> np.ndarray | None:
    """Weighted sum of the components on each segment.

    Args:
        trajectory: what was scored.
        weights: weight by component; a component of weight 0 does not count, even when it is absent.

    Returns:
        ``[S]`` float64: 0 where nothing was earned, NaN where a component is absent (on the last action when it was
        never given at all); None when the policy never acted.
    """
    last = last_action(trajectory)
    if last is None:
        return None
    total = np.zeros(len(trajectory.segments))
    for name, weight in weights.items():
        if weight == 0:
            continue
        given = [(i, r) for i, segment in enumerate(trajectory.segments) for r in segment.rewards if r.name == name]
        for i, reward in given:
            total[i] += np.nan if reward.value is None else weight * reward.value
        if not given:
            total[last] = np.nan
    return total


def total_of(summary: Summary, weights: Mapping[str, float]) -> float | None:
    """Weighted sum of a trajectory's components; None when one that counts is absent or the policy never acted."""
    values = [(weight, summary.rewards.get(name)) for name, weight in weights.items() if weight != 0]
    if summary.num_turns == 0 or any(value is None for _, value in values):
        return None
    return sum(weight * value for weight, value in values if value is not None)


def signal_reason(group: Sequence[Summary], weights: Mapping[str, float], signal: str = "total") -> str | None:
    """Why a group teaches nothing, or None when it does: as :func:`no_signal_reason`, with two kinds of ``all_same``.

    ``signal`` names the component that must vary among the trajectories that have it; ``total`` is the weighted sum.
    When nobody got anything the reason is ``none_solved``, when everybody solved the task ``all_solved``.
    """
    wanted = weights if signal == "total" else {signal: 1.0}
    reason = no_signal_reason([total_of(summary, wanted) for summary in group])
    if reason != "all_same":
        return reason
    outcomes = [value for summary in group if (value := summary.rewards.get("outcome")) is not None]
    if outcomes and max(outcomes) <= 0:
        return "none_solved"
    return "all_solved" if outcomes and min(outcomes) >= 1 else reason
