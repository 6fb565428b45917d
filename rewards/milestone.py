"""Milestones: what the environment gave on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.rewards.base import absence_cause, last_action, recorded
from k3rl.trajectory import Reward

if TYPE_CHECKING:
    from k3rl.trajectory import Task, Trajectory


class MilestoneReward:
    """Reads ``milestone`` from the segments.

    A truncated trajectory may have been cut before its first step, so none recorded is 0 there: nothing was reached.
    Otherwise none recorded means that nobody looked: absent.
    """

    name = "milestone"

    def __call__(self, task: Task, trajectory: Trajectory) -> list[Reward | None]:
        """One entry per segment."""
        rewards = recorded(self.name, trajectory)
        last = last_action(trajectory)
        if last is None or (any(rewards) and trajectory.outcome.status != "failed"):
            return rewards
        if trajectory.outcome.status == "truncated":
            rewards[last] = Reward(self.name, 0.0)
        else:
            rewards[last] = Reward.absent(self.name, absence_cause(trajectory))
        return rewards
