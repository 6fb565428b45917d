"""Named combinations of the small functions in this folder, and the objective that they resolve to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k3rl.config import ObjectiveConfig
from k3rl.errors import ConfigError, TrainingError, suggest
from k3rl.metrics import Metrics
from k3rl.objective import advantage as adv
from k3rl.objective.batch import ObjectiveBatch, TokenVectors
from k3rl.objective.correction import CORRECTIONS
from k3rl.objective.kl import KL_ESTIMATORS
from k3rl.objective.normaliser import compute_weights
from k3rl.objective.ratio import RATIOS, compute_log_ratio
from k3rl.objective.trust_region import TRUST_REGIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A resolved objective: a function of token vectors and of the batch, and of nothing else."""

    preset: str
    keys: tuple[str, ...]
    """Configuration keys that this objective uses."""
    advantage: str
    ratio: str
    trust_region: str = "none"
    correction: str = "none"
    kl: str = "k3"
    normaliser: str = "tokens"
    horizon: int | None = None
    std: adv.Std = "none"
    baseline: adv.Baseline = "mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    gamma: float = 1.0
    gae_lambda: float = 1.0
    value_coef: float = 0.0
    value_clip: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    epochs: int = 1

    @property
    def needs_value(self) -> bool:
        return self.advantage.startswith("gae")

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef != 0

    @property
    def is_linear(self) -> bool:
        """The gradient does not depend on the vectors, so the first pass can be left out."""
        linear_loss = self.ratio == "likelihood" and self.trust_region == "none"
        return linear_loss and not (self.needs_value or self.needs_reference)

    def prepare(self, batch: ObjectiveBatch, vectors: TokenVectors | None = None) -> ObjectiveBatch:
        """Fill in advantages, returns and global weights; ``vectors`` (before any step) when values are needed."""
        mask = batch.action_mask
        weights = compute_weights(self.normaliser, mask, batch.sample, batch.trajectory, self.horizon)
        returns: torch.Tensor | None = None
        values: torch.Tensor | None = None
        no_signal = 0
        if self.needs_value:
            if vectors is None or vectors.value is None:
                raise TrainingError(f"objective {self.preset!r} needs values, and the policy gave none")
            estimate = ADVANTAGES_FROM_VALUES[self.advantage]
            raw, returns = estimate(batch, vectors, gamma=self.gamma, gae_lambda=self.gae_lambda)
            advantages = adv.whiten(raw, mask, self.std)
            values = vectors.value.detach()
        elif self.advantage == "group":
            scores = adv.score_trajectories(batch)
            per_trajectory, no_signal = adv.compute_group_advantages(
                scores, batch.group, baseline=self.baseline, std=self.std
            )
            advantages = per_trajectory[batch.trajectory]
        else:
            advantages = torch.ones(batch.num_tokens, dtype=torch.float64)
        advantages = torch.where(mask, advantages, 0.0)
        return dataclasses.replace(
            batch,
            advantages=advantages,
            returns=returns,
            rollout_values=values,
            weights=weights,
            num_no_signal=no_signal,
        )

    def loss(self, vectors: TokenVectors, batch: ObjectiveBatch) -> tuple[torch.Tensor, Metrics]:
        """Scalar loss and its metrics. ``batch`` comes from :meth:`prepare`; diagnostics are taken before any clip."""
        if batch.advantages is None or batch.weights is None:
            raise ValueError("call Objective.prepare before Objective.loss")
        mask = batch.action_mask
        logprob = vectors.logprob
        advantages, weights = batch.advantages.to(logprob), batch.weights.to(logprob)
        ratio = RATIOS[self.ratio](logprob, batch.rollout_logprobs, mask)
        token_loss = TRUST_REGIONS[self.trust_region](ratio, advantages, self.clip_low, self.clip_high)
        log_ratio = compute_log_ratio(logprob, batch.rollout_logprobs, mask)
        total = (weights * token_loss * CORRECTIONS[self.correction](log_ratio)).sum()
        metrics = Metrics()
        _add_token_mean(metrics, "train/entropy", vectors.entropy, mask)
        if batch.num_trained:
            metrics.mean("train/policy_loss", float(total.detach()))
            _add_token_mean(metrics, "train/logprob", logprob, mask)
        if self.ratio == "token":
            self._add_ratio_metrics(metrics, log_ratio.detach(), advantages, batch)
        if self.entropy_coef:
            total = total - self.entropy_coef * (weights * torch.where(mask, vectors.entropy, 0.0)).sum()
        if self.needs_reference:
            total = total + self.kl_coef * self._kl(vectors, batch, weights, metrics)
        if self.needs_value:
            total = total + self.value_coef * self._value_loss(vectors, batch, weights, metrics)
        if batch.num_trained:
            metrics.mean("train/loss", float(total.detach()))
        return total, metrics

    def _kl(
        self, vectors: TokenVectors, batch: ObjectiveBatch, weights: torch.Tensor, metrics: Metrics
    ) -> torch.Tensor:
        if batch.reference_logprobs is None:
            raise TrainingError("objective.kl_coef is not 0, but no reference log-probabilities were given")
        mask = batch.action_mask
        train = torch.where(mask, vectors.logprob, 0.0)
        reference = torch.where(mask, batch.reference_logprobs.to(train), 0.0)
        kl = KL_ESTIMATORS[self.kl](train, reference)
        _add_token_mean(metrics, "train/reference_kl", kl, mask)
        return (weights * kl).sum()

    def _value_loss(
        self, vectors: TokenVectors, batch: ObjectiveBatch, weights: torch.Tensor, metrics: Metrics
    ) -> torch.Tensor:
        if vectors.value is None or batch.returns is None or batch.rollout_values is None:
            raise TrainingError(f"objective {self.preset!r} needs values, and the policy gave none")
        mask = batch.action_mask
        value = torch.where(mask, vectors.value, 0.0)
        returns = torch.where(mask, batch.returns.to(value), 0.0)
        rollout_values = torch.where(mask, batch.rollout_values.to(value), 0.0)
        token_loss = clipped_value_loss(value, rollout_values, returns, self.value_clip)
        _add_token_mean(metrics, "train/value", value, mask)
        _add_token_mean(metrics, "train/value_loss", token_loss, mask)
        return (weights * token_loss).sum()

    def _add_ratio_metrics(
        self, metrics: Metrics, log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch
    ) -> None:
        mask = batch.action_mask
        metrics.sum("train/no_signal_groups", batch.num_no_signal)
        if not batch.num_trained:
            return
        wide = log_ratio.double()
        ratio = wide.exp()
        outside = (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)
        active = ((ratio > 1 + self.clip_high) & (advantages > 0)) | ((ratio < 1 - self.clip_low) & (advantages < 0))
        _add_token_mean(metrics, "train/ratio", ratio, mask)
        metrics.max("train/ratio_max", float(ratio[mask].max()))
        _add_token_mean(metrics, "train/ratio_outside_frac", outside, mask)
        _add_token_mean(metrics, "train/ratio_clipped_frac", active, mask)
        _add_token_mean(metrics, "train/rollout_kl", ratio - 1 - wide, mask)
        _add_token_mean(metrics, "train/logprob_gap", wide.abs(), mask)
        metrics.max("train/logprob_gap_max", float(wide.abs()[mask].max()))
        _add_token_mean(metrics, "train/advantage_abs", advantages.abs(), mask)

    def formula(self) -> str:
        """The resolved formula, one term a line, as printed at the start of a run."""
        ratio = {"token": "r = exp(train - rollout)", "likelihood": "r = log p"}[self.ratio]
        surrogate = "-r A"
        if self.trust_region == "clip":
            surrogate = f"max(-r A, -clip(r, {1 - self.clip_low:g}, {1 + self.clip_high:g}) A)"
        lines = [f"objective {self.preset}: sum over trained tokens of w (policy + terms), {self.epochs} epoch(s)"]
        lines.append(f"  policy  {surrogate}, {ratio}")
        lines.append(f"  A       {self._advantage_formula()}")
        horizon = f", horizon {self.horizon}" if self.normaliser == "constant" else ""
        lines.append(f"  w       mean over {self.normaliser} of the global batch{horizon}")
        if self.needs_value:
            clip = f"clip(V, V_old ± {self.value_clip:g})"
            lines.append(f"  value   {self.value_coef:g} * 0.5 max((V - R)^2, ({clip} - R)^2)")
        if self.kl_coef:
            lines.append(f"  kl      {self.kl_coef:g} * {self.kl}(train || reference)")
        if self.entropy_coef:
            lines.append(f"  entropy -{self.entropy_coef:g} * entropy")
        return "\n".join(lines)

    def _advantage_formula(self) -> str:
        scale = "" if self.std == "none" else f", divided by the {self.std} std"
        if self.advantage == "group":
            return f"score - {self.baseline} of the group{scale}"
        if self.needs_value:
            unit = self.advantage.removeprefix("gae_")
            whitened = scale and f", whitened over tokens by the {self.std} std"
            return f"GAE over {unit}s, gamma {self.gamma:g}, lambda {self.gae_lambda:g}{whitened}"
        return "1"


ADVANTAGES_FROM_VALUES = {"gae_turn": adv.compute_turn_gae, "gae_token": adv.compute_token_gae}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """One row of the table: fixed ``pieces``, and the configuration keys it uses with their defaults."""

    pieces: Mapping[str, str]
    settings: Mapping[str, Any]


_POLICY = {"clip_low": 0.2, "clip_high": 0.2, "normaliser": "tokens", "std": "sample"}
_TERMS = {"kl_coef": 0.0, "entropy_coef": 0.0, "epochs": 1}
_CRITIC = {"gamma": 1.0, "gae_lambda": 0.95, "value_coef": 0.5, "value_clip": 0.2}

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        pieces={"advantage": "group", "ratio": "token", "trust_region": "clip"},
        settings={**_POLICY, "baseline": "mean", **_TERMS},
    ),
    "ppo": Preset(
        pieces={"advantage": "gae_turn", "ratio": "token", "trust_region": "clip"},
        settings={**_POLICY, **_CRITIC, **_TERMS},
    ),
    "sft": Preset(
        pieces={"advantage": "one", "ratio": "likelihood", "trust_region": "none"},
        settings={"normaliser": "tokens", "epochs": 1},
    ),
}


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
    for name in given:
        if name not in preset.settings:
            used = ", ".join(sorted(preset.settings))
            raise ConfigError(f"objective.{name}: preset {config.preset!r} does not use it; it uses: {used}")
    settings = {**preset.settings, **given}
    _check(settings, horizon)
    return Objective(
        preset=config.preset, keys=tuple(sorted(preset.settings)), horizon=horizon, **preset.pieces, **settings
    )


def _check(settings: Mapping[str, Any], horizon: int | None) -> None:
    ranges = {
        "clip_low": (0.0, 1.0),
        "clip_high": (0.0, float("inf")),
        "gamma": (0.0, 1.0),
        "gae_lambda": (0.0, 1.0),
        "value_coef": (0.0, float("inf")),
        "value_clip": (0.0, float("inf")),
        "kl_coef": (0.0, float("inf")),
        "epochs": (1, float("inf")),
    }
    for name, (low, high) in ranges.items():
        if name in settings and not low <= settings[name] <= high:
            raise ConfigError(f"objective.{name}: must be from {low:g} to {high:g}, got {settings[name]}")
    if settings["normaliser"] == "constant" and horizon is None:
        raise ConfigError("objective.normaliser: 'constant' needs a horizon: the longest episode in tokens")


def clipped_value_loss(
    value: torch.Tensor, rollout_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> torch.Tensor:
    """``0.5 max((V - R)^2, (clip(V, V_old ± value_clip) - R)^2)`` per token, [T]."""
    clipped = rollout_values + (value - rollout_values).clamp(-value_clip, value_clip)
    return 0.5 * torch.maximum((value - returns).square(), (clipped - returns).square())


def _add_token_mean(metrics: Metrics, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    trained = values.detach()[mask].double()
    metrics.mean(name, float(trained.sum()), len(trained))
