"""A reward function maps a task and its trajectory to per-segment rewards; what is missing is absent, never zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from k3rl.errors import RewardError
from k3rl.trajectory import Reward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.trajectory import AbsentCause, Task, Trajectory


@runtime_checkable
class RewardFunction(Protocol):
    """A named reward. The result has an entry per segment: a Reward, or None where nothing was earned."""

    name: str

    def __call__(self, task: Task, trajectory: Trajectory) -> Sequence[Reward | None]: ...


def validate(function: RewardFunction, task: Task, trajectory: Trajectory) -> list[Reward | None]:
    """Call ``function`` and check what it returns.

    Raises:
        RewardError: it raised, or the result is not an entry per segment, each None or a Reward of its name.
    """
    try:
        rewards = list(function(task, trajectory))
    except Exception as error:
        raise RewardError(f"reward {function.name!r}: {type(error).__name__}: {error}") from error
    if len(rewards) != len(trajectory.segments):
        raise RewardError(f"reward {function.name!r}: {len(rewards)} entries, {len(trajectory.segments)} segments")
    for reward in rewards:
        if reward is not None and (not isinstance(reward, Reward) or reward.name != function.name):
            raise RewardError(f"reward {function.name!r}: {reward!r} is no reward of that name")
    return rewards


def absence_cause(trajectory: Trajectory) -> AbsentCause:
    """Why a reward that nobody recorded is absent: who failed, or ``not_scored``."""
    cause = trajectory.outcome.cause
    return "not_scored" if cause is None or cause == "policy" else cause


def recorded(name: str, trajectory: Trajectory) -> list[Reward | None]:
    """Rewards called ``name`` that the environment recorded, summed per segment; None where there is none."""
    result: list[Reward | None] = []
    for segment in trajectory.segments:
        found = [r for r in segment.rewards if r.name == name]
        missing = next((r for r in found if r.value is None), None)
        total = sum(r.value for r in found if r.value is not None)
        result.append(missing or (Reward(name, total) if found else None))
    return result


def last_action(trajectory: Trajectory) -> int | None:
    """Index of the last action segment; None when the policy never acted."""
    return next((i for i in reversed(range(len(trajectory.segments))) if trajectory.segments[i].kind == "action"), None)
