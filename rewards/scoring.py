"""Score trajectories once, before they are sealed: afterwards every component stands on the segments that earned it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from k3rl.errors import ConfigError, suggest
from k3rl.rewards.milestone import MilestoneReward
from k3rl.rewards.outcome import OutcomeReward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from k3rl.rewards.base import RewardFunction
    from k3rl.trajectory import Reward, Trajectory

RECORDED: dict[str, RewardFunction] = {"outcome": OutcomeReward(), "milestone": MilestoneReward()}
"""Components that read what the environment recorded."""


def load_reward(name: str, path: str) -> RewardFunction:
    """The function at ``package.module:attribute``; a class is made without arguments. ConfigError names the key."""
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing a stranger's module can raise anything
        raise ConfigError(f"reward_functions.{name}: {path!r} cannot be imported: {error}") from error
    found: Any = getattr(module, attribute, None)
    if found is None:
        near = suggest(attribute, vars(module))
        raise ConfigError(f"reward_functions.{name}: {module_name} has no {attribute or 'attribute'!r}.{near}")
    function: Any = found() if isinstance(found, type) else found
    if not callable(function):
        raise ConfigError(f"reward_functions.{name}: {path!r} is a {type(function).__name__} and cannot be called")
    return cast("RewardFunction", function)


def with_rewards(trajectory: Trajectory, components: Mapping[str, Sequence[Reward | None]]) -> Trajectory:
    """``trajectory`` whose segments carry ``components`` (an entry per segment each) and no other reward."""
    segments = tuple(
        replace(segment, rewards=tuple(reward for entries in components.values() if (reward := entries[i]) is not None))
        for i, segment in enumerate(trajectory.segments)
    )
    return replace(trajectory, segments=segments)
