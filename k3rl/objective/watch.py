"""What an update reports of itself. Every number is taken before any bound rewrites it."""

from __future__ import annotations

import torch

from k3rl.metrics import Metrics
from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.level import LEVELS, sum_by


def watch_ratio(metrics: Metrics, log_ratio: torch.Tensor, mask: torch.Tensor) -> None:
    """How far the policy that trains is from the one that sampled, token by token; ``log_ratio`` [T]."""
    wide = log_ratio.double()
    ratio = wide.exp()
    add_token_mean(metrics, "ratio", ratio, mask)
    add_token_mean(metrics, "rollout_kl", ratio - 1 - wide, mask)
    if bool(mask.any()):
        metrics.max("train/ratio_max", float(ratio[mask].max()))


def watch_mismatch(metrics: Metrics, log_ratio: torch.Tensor, batch: ObjectiveBatch) -> None:
    """How far rollout and learner disagree; ``log_ratio`` [T] float64 is that before the first step on the batch.

    After a step it would be what was learned; so every epoch gives the same. ``mismatch_kl`` estimates
    KL(rollout || initial) with k1, which may be negative, where ``rollout_kl`` has k3; an effective sample size is a
    share of the tokens, or of the trajectories, that weights ``exp(log_ratio)`` would leave.
    """
    mask, gap = batch.action_mask, log_ratio.abs()
    add_token_mean(metrics, "logprob_gap", gap, mask)
    add_token_mean(metrics, "mismatch_kl", -log_ratio, mask)
    if bool(mask.any()):
        metrics.max("train/logprob_gap_max", float(gap[mask].max()))
        for level in ("token", "trajectory"):
            row = LEVELS[level](batch)
            weights = sum_by(row, log_ratio)[sum_by(row, mask.double()) > 0]
            metrics.mean(f"train/{level}_ess_frac", effective_size(weights), len(weights))


def watch_correction(metrics: Metrics, batch: ObjectiveBatch) -> None:
    """Weights before and after bounds and rejections, and the shares that those changed and left out."""
    assert batch.correction is not None
    assert batch.raw_correction is not None
    found = {
        "correction": batch.correction,
        "correction_raw": batch.raw_correction,
        "correction_bounded_frac": batch.correction != batch.raw_correction,
        "rejected_frac": batch.correction == 0,
    }
    for name, values in found.items():
        add_token_mean(metrics, name, values, batch.action_mask)
    if batch.num_trained:
        metrics.max("train/correction_raw_max", float(batch.raw_correction[batch.action_mask].max()))


def effective_size(log_weights: torch.Tensor) -> float:
    """Effective number of samples behind so many weights, ``(sum w)^2 / sum w^2``."""
    return float((2 * torch.logsumexp(log_weights, 0) - torch.logsumexp(2 * log_weights, 0)).exp())


def add_token_mean(metrics: Metrics, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    """``train/<name>``: mean of ``values`` [T] over the trained tokens."""
    trained = values.detach()[mask].double()
    metrics.mean(f"train/{name}", float(trained.sum()), len(trained))
