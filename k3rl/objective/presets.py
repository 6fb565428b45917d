"""Named objectives, and how a configuration resolves to one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from k3rl.config import ObjectiveConfig
from k3rl.errors import ConfigError, suggest
from k3rl.objective.kl import KL_ESTIMATORS
from k3rl.objective.objective import AXES, Objective
from k3rl.objective.piece import Need

_TERMS = ("entropy", "kl")

PRESETS: dict[str, Objective] = {
    objective.preset: objective
    for objective in (
        # https://arxiv.org/abs/1707.06347
        Objective(preset="ppo", advantage="gae_turn", terms=(*_TERMS, "value")),
        # https://arxiv.org/abs/2402.03300, with the mean over tokens
        Objective(preset="grpo", advantage="group", terms=_TERMS),
        # https://arxiv.org/abs/2503.20783
        Objective(preset="dr_grpo", advantage="group", std="none", normaliser="constant", terms=_TERMS),
        # https://arxiv.org/abs/2503.14476 §3
        Objective(preset="dapo", advantage="group", clip_high=0.28, terms=_TERMS),
        # https://arxiv.org/abs/2402.14740, with the clip that off-policy samples need
        Objective(preset="rloo", advantage="group", baseline="leave_one_out", std="none", terms=_TERMS),
        # https://arxiv.org/abs/2501.03262
        Objective(preset="reinforce_pp", advantage="returns", terms=_TERMS),
        # widths of https://arxiv.org/abs/2507.18071: a mean over a whole sample hardly moves
        Objective(
            preset="gspo",
            advantage="group",
            ratio="sequence",
            normaliser="sequences",
            clip_low=3e-4,
            clip_high=4e-4,
            terms=_TERMS,
        ),
        # https://arxiv.org/abs/2506.13585: no lower bound; the upper one is that of https://arxiv.org/abs/2510.13786
        Objective(preset="cispo", advantage="group", trust_region="cispo", clip_low=1.0, clip_high=4.0, terms=_TERMS),
        # https://arxiv.org/abs/2511.20347
        Objective(preset="sapo", advantage="group", trust_region="sapo", normaliser="sequences", terms=_TERMS),
        # https://arxiv.org/abs/2507.20673
        Objective(
            preset="gmpo",
            advantage="group",
            trust_region="geometric_clip",
            normaliser="sequences",
            clip_low=0.4,
            clip_high=0.4,
            terms=_TERMS,
        ),
        # https://arxiv.org/abs/2505.10978
        Objective(preset="gigpo", advantage="group_and_state", gamma=0.95, terms=_TERMS),
        # mirror descent over whole trajectories, https://arxiv.org/abs/2507.20534; no coefficient is published
        Objective(
            preset="k2",
            advantage="group",
            std="none",
            trust_region="score",
            normaliser="sums",
            drift_coef=0.1,
            terms=(*_TERMS, "trajectory_drift"),
        ),
        # https://arxiv.org/abs/2602.02276 §4.4.2; neither widths nor coefficient are published
        Objective(
            preset="k3",
            advantage="group",
            std="none",
            trust_region="clamp",
            clip_low=0.5,
            clip_high=1.0,
            drift_coef=1e-3,
            terms=(*_TERMS, "drift"),
        ),
        # the teacher's log-ratio as the reward of each token, in the same loop as k3
        Objective(
            preset="opd",
            advantage="teacher",
            trust_region="clamp",
            clip_low=0.5,
            clip_high=1.0,
            drift_coef=1e-3,
            terms=("entropy", "drift"),
        ),
        Objective(preset="sft", advantage="one", ratio="likelihood", trust_region="score"),
    )
}

_INFINITY = float("inf")
_SHARE, _SIZE = (0.0, 1.0), (0.0, _INFINITY)
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("clip_low", "gamma", "gae_lambda", "divergence", "truncate_low", "keep_low"), _SHARE),
    **dict.fromkeys(("clip_high", "teacher_cap", "step_weight"), _SIZE),
    **dict.fromkeys(("value_coef", "value_clip", "kl_coef", "reward_kl_coef", "drift_coef"), _SIZE),
    **dict.fromkeys(("tau_positive", "tau_negative"), (0.01, _INFINITY)),
    **dict.fromkeys(("truncate_high", "keep_high", "dual_clip", "epochs"), (1.0, _INFINITY)),
}
"""Lowest and highest value of a key."""

NAMES = {**AXES, "kl": KL_ESTIMATORS}
"""Keys whose value is a row of a table."""

REFUSALS: dict[Need, str] = {
    "horizon": "objective.normaliser: {o.normaliser!r} needs a horizon: the longest episode in tokens",
    "ratio": "objective.trust_region: {o.trust_region!r} bounds a ratio, and objective.ratio {o.ratio!r} is none",
    "uncorrected": (
        "objective.correction: the ratio against 'rollout' holds the weights of {o.correction!r} already; "
        "set objective.anchor: initial"
    ),
    "critic": "objective.advantage: {o.advantage!r} needs a critic, which {o.preset!r} does not train; take 'ppo'",
    "returns": "objective.advantage: {o.advantage!r} gives the critic nothing to learn; set objective.value_coef: 0",
}
"""What to say when no row gives what another needs."""


def resolve(config: ObjectiveConfig, *, horizon: int | None = None) -> Objective:
    """Turn a configuration into an objective.

    ``horizon`` is the longest episode in tokens, for the ``constant`` normaliser. Raises ConfigError for a preset or a
    row that does not exist, for a key that the objective does not use, for a value out of range, and for rows that do
    not go together.
    """
    _check_name("preset", config.preset, PRESETS)
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name != "preset"}
    given = {name: value for name, value in given.items() if value is not None}
    for name in NAMES.keys() & given.keys():
        _check_name(name, given[name], NAMES[name])
    objective = dataclasses.replace(PRESETS[config.preset], horizon=horizon, **given)
    for name, value in given.items():
        if name not in objective.keys:
            used = ", ".join(objective.keys)
            raise ConfigError(f"objective.{name}: preset {config.preset!r} does not use it; it uses: {used}")
        if name in RANGES and not RANGES[name][0] <= value <= RANGES[name][1]:
            low, high = RANGES[name]
            raise ConfigError(f"objective.{name}: must be from {low:g} to {high:g}, got {value}")
    for need, refusal in REFUSALS.items():
        if need in objective.needs - objective.gives:
            raise ConfigError(refusal.format(o=objective))
    return objective


def _check_name(key: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise ConfigError(
            f"objective.{key}: no {key} {name!r}; known: {', '.join(sorted(known))}.{suggest(name, known)}"
        )
