"""A reward function maps a task and its trajectory to per-segment rewards; what is missing is absent, never zero.

Example:
    >>> def brevity(task, trajectory):  # reward_functions: {brevity: "my_package.rewards:brevity"}
    ...     return [-0.01 * len(s) if s.kind == "action" else None for s in trajectory.segments]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from k3rl.errors import RewardError
from k3rl.trajectory import Reward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from k3rl.trajectory import AbsentCause, Task, Trajectory


class RewardFunction(Protocol):
    """Gives an entry per segment: a number, a Reward (which may be absent), or None where nothing was earned."""

    def __call__(self, task: Task, trajectory: Trajectory, /) -> Sequence[Reward | float | None]: ...


def evaluate(name: str, function: RewardFunction, trajectory: Trajectory) -> list[Reward | None]:
    """What ``function`` says, as rewards called ``name``.

    Raises:
        RewardError: it raised, or the result is not an entry per segment, each None, a finite number or a Reward.
    """
    try:
        entries = list(function(trajectory.task, trajectory))
        rewards = [_named(name, entry) for entry in entries]
    except Exception as error:
        raise RewardError(f"reward {name!r}: {type(error).__name__}: {error}") from error
    if len(rewards) != len(trajectory.segments):
        raise RewardError(f"reward {name!r}: {len(rewards)} entries, {len(trajectory.segments)} segments")
    return rewards


def _named(name: str, entry: Reward | float | None) -> Reward | None:
    if entry is None:
        return None
    return Reward(name, entry.value, entry.cause) if isinstance(entry, Reward) else Reward(name, float(entry))


def absence_cause(trajectory: Trajectory) -> AbsentCause:
    """Why a reward that nobody recorded is absent: who failed, or ``not_scored``."""
    cause = trajectory.outcome.cause
    return "not_scored" if cause is None or cause == "policy" else cause


def absent_on_last_action(name: str, trajectory: Trajectory, cause: AbsentCause) -> list[Reward | None]:
    """Entries of a reward that nobody could give."""
    rewards: list[Reward | None] = [None] * len(trajectory.segments)
    last = last_action(trajectory)
    if last is not None:
        rewards[last] = Reward.absent(name, cause)
    return rewards


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
