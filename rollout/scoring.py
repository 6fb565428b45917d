"""Give trajectories the rewards that a run asks for, each function within its deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.rewards.base import absent_on_last_action, evaluate
from k3rl.rewards.scoring import RECORDED, load_reward, with_rewards
from k3rl.rollout.deadline import call_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import RunConfig
    from k3rl.trajectory import Reward, Trajectory


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

    def score(self, trajectories: Sequence[Trajectory]) -> list[tuple[Trajectory, dict[str, str]]]:
        """Each trajectory with every component on its segments, and what went wrong, by component."""
        jobs = [(t, name) for t in trajectories for name in self._functions]
        results = iter(call_all([lambda t=t, n=n: self._evaluate(t, n) for t, n in jobs], self._timeout_s))
        return [self._settle(t, {name: next(results) for name in self._functions}) for t in trajectories]

    def _evaluate(self, trajectory: Trajectory, name: str) -> list[Reward | None]:
        return evaluate(name, self._functions[name], trajectory)

    def _settle(
        self, trajectory: Trajectory, results: dict[str, list[Reward | None] | BaseException]
    ) -> tuple[Trajectory, dict[str, str]]:
        errors = {name: str(result) for name, result in results.items() if isinstance(result, BaseException)}
        components = {
            name: absent_on_last_action(name, trajectory, "grader") if isinstance(result, BaseException) else result
            for name, result in results.items()
        }
        return with_rewards(trajectory, components), errors
