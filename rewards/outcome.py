"""The outcome: what the environment said of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.rewards.base import absence_cause, last_action, recorded
from k3rl.trajectory import Reward

if TYPE_CHECKING:
    from k3rl.trajectory import Task, Trajectory


class OutcomeReward:
    """Reads ``outcome`` from the segments; absent on the last action when nobody graded."""

    name = "outcome"

    def __call__(self, task: Task, trajectory: Trajectory) -> list[Reward | None]:
        """One entry per segment."""
        rewards = recorded(self.name, trajectory)
        last = last_action(trajectory)
        if last is not None and (trajectory.outcome.status == "failed" or not any(rewards)):
            rewards[last] = Reward.absent(self.name, absence_cause(trajectory))
        return rewards
