"""Give trajectories the rewards that a run asks for, each function within its deadline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from k3rl.rewards.base import absent_on_last_action, evaluate, last_action
from k3rl.rewards.scoring import RECORDED, load_reward, with_rewards
from k3rl.rollout.deadline import call_all
from k3rl.trajectory import Reward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.config import RunConfig
    from k3rl.trajectory import Trajectory


class Scorer:
    """The reward components of a run. A function that raises or hangs costs its own reward of its own trajectory."""

    def __init__(self, config: RunConfig) -> None:
        paths = self._given = config.reward_functions
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
            name: absent_on_last_action(name, trajectory, "grader")
            if isinstance(result, BaseException)
            else self._complete(name, trajectory, result)
            for name, result in results.items()
        }
        return with_rewards(trajectory, components), errors

    def _complete(self, name: str, trajectory: Trajectory, rewards: list[Reward | None]) -> list[Reward | None]:
        """A function that found nothing to reward gave 0: what nobody gave would be absent, and not trained on."""
        last = last_action(trajectory)
        nothing = name in self._given and last is not None and all(reward is None for reward in rewards)
        if not nothing or trajectory.outcome.is_infrastructure_failure:
            return rewards
        return [Reward(name, 0.0) if i == last else None for i in range(len(rewards))]
