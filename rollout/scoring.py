"""Give trajectories the rewards that a run asks for, each function within its deadline."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from k3rl.rewards.base import absent_on_last_action, evaluate
from k3rl.rewards.scoring import RECORDED, load_reward, with_rewards
from k3rl.rollout.deadline import call_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import RunConfig
    from k3rl.trajectory import Reward, Trajectory

logger = logging.getLogger(__name__)


class Scorer:
    """The reward components of a run. A function that raises or hangs costs its own reward of its own trajectory."""

    def __init__(self, config: RunConfig) -> None:
        paths = config.reward_functions
        # The outcome also when nobody trains on it: it is what an evaluation counts.
        names = dict.fromkeys(("outcome", *config.rewards))
        self._functions = {n: load_reward(n, paths[n]) if n in paths else RECORDED[n] for n in names}
        self._timeout_s = config.rollout.reward_timeout_s

    @property
    def components(self) -> tuple[str, ...]:
        """Names of what :meth:`score` gives."""
        return tuple(self._functions)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """The trajectories with every component on their segments: a value, or absent with a cause."""
        jobs = [(t, name) for t in trajectories for name in self._functions]
        results = iter(call_all([lambda t=t, n=n: self._evaluate(t, n) for t, n in jobs], self._timeout_s))
        return [
            with_rewards(t, {name: self._settled(t, name, next(results)) for name in self._functions})
            for t in trajectories
        ]

    def _evaluate(self, trajectory: Trajectory, name: str) -> list[Reward | None]:
        return evaluate(name, self._functions[name], trajectory)

    def _settled(
        self, trajectory: Trajectory, name: str, result: list[Reward | None] | BaseException
    ) -> list[Reward | None]:
        if not isinstance(result, BaseException):
            return result
        logger.warning("%s has no reward %r: %s", trajectory.key, name, result)
        return absent_on_last_action(name, trajectory, "grader")
