"""Named objectives, and how a configuration resolves to one."""

from __future__ import annotations

import dataclasses

from k3rl.config import ObjectiveConfig
from k3rl.errors import ConfigError, suggest
from k3rl.objective.objective import Objective

_TERMS = ("entropy", "kl")

PRESETS: dict[str, Objective] = {
    objective.preset: objective
    for objective in (
        Objective(preset="grpo", advantage="group", ratio="token", trust_region="clip", terms=_TERMS),
        # widths of https://arxiv.org/abs/2507.18071: a mean over a whole sample hardly moves
        Objective(
            preset="gspo",
            advantage="group",
            ratio="sequence",
            trust_region="clip",
            terms=_TERMS,
            normaliser="sequences",
            clip_low=3e-4,
            clip_high=4e-4,
        ),
        Objective(preset="ppo", advantage="gae_turn", ratio="token", trust_region="clip", terms=(*_TERMS, "value")),
        Objective(preset="sft", advantage="one", ratio="likelihood"),
    )
}

_INFINITY = float("inf")
RANGES: dict[str, tuple[float, float]] = {
    "clip_low": (0.0, 1.0),
    "clip_high": (0.0, _INFINITY),
    "gamma": (0.0, 1.0),
    "gae_lambda": (0.0, 1.0),
    "value_coef": (0.0, _INFINITY),
    "value_clip": (0.0, _INFINITY),
    "kl_coef": (0.0, _INFINITY),
    "epochs": (1, _INFINITY),
}
"""Lowest and highest value of a key."""


def resolve(config: ObjectiveConfig, *, horizon: int | None = None) -> Objective:
    """Turn a configuration into an objective.

    ``horizon`` is the longest episode in tokens, for the ``constant`` normaliser. Raises ConfigError for a preset that
    does not exist, for a key that the preset does not use, and for a value out of range.
    """
    preset = PRESETS.get(config.preset)
    if preset is None:
        known = ", ".join(sorted(PRESETS))
        raise ConfigError(
            f"objective.preset: no preset {config.preset!r}; known: {known}.{suggest(config.preset, PRESETS)}"
        )
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "preset"}
    given = {name: value for name, value in given.items() if value is not None}
    objective = dataclasses.replace(preset, horizon=horizon, **given)
    for name, value in given.items():
        if name not in objective.keys:
            used = ", ".join(objective.keys)
            raise ConfigError(f"objective.{name}: preset {config.preset!r} does not use it; it uses: {used}")
        if name in RANGES and not RANGES[name][0] <= value <= RANGES[name][1]:
            low, high = RANGES[name]
            raise ConfigError(f"objective.{name}: must be from {low:g} to {high:g}, got {value}")
    if "horizon" in objective.needs and horizon is None:
        raise ConfigError(
            f"objective.normaliser: {objective.normaliser!r} needs a horizon: the longest episode in tokens"
        )
    return objective
