"""The composed objective: it asks the rows of its pieces, and knows none of them by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from k3rl.errors import TrainingError
from k3rl.metrics import Metrics
from k3rl.objective.advantage import ADVANTAGES, Baseline, Std
from k3rl.objective.batch import ObjectiveBatch, TokenVectors
from k3rl.objective.correction import CORRECTIONS
from k3rl.objective.normaliser import NORMALISERS
from k3rl.objective.piece import Need, Piece
from k3rl.objective.ratio import RATIOS, compute_log_ratio
from k3rl.objective.term import TERMS, Term
from k3rl.objective.trust_region import TRUST_REGIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A function of token vectors and of the batch, and of nothing else.

    ``loss = sum(w * (correction * trust_region(ratio, A))) + sum over terms of coefficient * sum(w * term)``.
    """

    preset: str
    # rows of the tables
    advantage: str
    ratio: str
    trust_region: str = "none"
    correction: str = "none"
    normaliser: str = "tokens"
    kl: str = "k3"
    terms: tuple[str, ...] = ()
    # what the rows read; a preset may have another default
    horizon: int | None = None
    std: Std = "sample"
    baseline: Baseline = "mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_coef: float = 0.5
    value_clip: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    epochs: int = 1

    @property
    def active_terms(self) -> dict[str, Term]:
        """Terms whose coefficient is not 0."""
        return {name: TERMS[name] for name in self.terms if getattr(self, TERMS[name].coef)}

    @property
    def pieces(self) -> tuple[Piece[Any], ...]:
        """The rows that take part."""
        return (
            ADVANTAGES[self.advantage],
            RATIOS[self.ratio],
            TRUST_REGIONS[self.trust_region],
            CORRECTIONS[self.correction],
            NORMALISERS[self.normaliser],
            *self.active_terms.values(),
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """Configuration keys that this objective uses, in order of name."""
        rows = (*self.pieces, *(TERMS[name] for name in self.terms))
        return tuple(sorted({"epochs", "normaliser"}.union(*(row.keys for row in rows))))

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(need for piece in self.pieces for need in piece.needs)

    @property
    def needs_value(self) -> bool:
        return "value" in self.needs

    @property
    def needs_reference(self) -> bool:
        return "reference" in self.needs

    @property
    def is_linear(self) -> bool:
        """The gradient does not depend on the vectors, so the first pass can be left out."""
        return all(piece.linear for piece in self.pieces)

    def prepare(self, batch: ObjectiveBatch, vectors: TokenVectors | None = None) -> ObjectiveBatch:
        """Fill in advantages, returns and global weights; ``vectors`` are those before any step."""
        if self.needs_value and (vectors is None or vectors.value is None):
            raise TrainingError(f"objective {self.preset!r} needs values, and the policy gave none")
        initial = None if vectors is None else vectors.detached()
        found = ADVANTAGES[self.advantage].compute(batch, initial, self)
        return dataclasses.replace(
            batch,
            advantages=torch.where(batch.action_mask, found.advantages, 0.0),
            returns=found.returns,
            num_no_signal=found.num_no_signal,
            weights=NORMALISERS[self.normaliser].compute(batch, self),
            initial=initial,
        )

    def loss(self, vectors: TokenVectors, batch: ObjectiveBatch) -> tuple[torch.Tensor, Metrics]:
        """Scalar loss and its metrics. ``batch`` comes from :meth:`prepare`; diagnostics are taken before any clip."""
        if batch.advantages is None or batch.weights is None:
            raise ValueError("call Objective.prepare before Objective.loss")
        logprob = vectors.logprob
        advantages, weights = batch.advantages.to(logprob), batch.weights.to(logprob)
        region = TRUST_REGIONS[self.trust_region]
        ratio = RATIOS[self.ratio].compute(logprob, batch, self)
        token_loss = region.compute(ratio, advantages, batch, self)
        policy_loss = (weights * token_loss * CORRECTIONS[self.correction].compute(logprob, batch, self)).sum()
        watched = {"entropy": vectors.entropy, "logprob": logprob, **region.watch(ratio.detach(), advantages, self)}
        if vectors.value is not None:
            watched["value"] = vectors.value
        total = policy_loss
        for term in self.active_terms.values():
            token_loss = term.compute(vectors, batch, self)
            total = total + getattr(self, term.coef) * (weights * token_loss).sum()
            if term.metric is not None:
                watched[term.metric] = token_loss
        metrics = Metrics()
        if batch.num_trained:
            metrics.mean("train/policy_loss", float(policy_loss.detach()))
            metrics.mean("train/loss", float(total.detach()))
        if "rollout" in self.needs:
            watched["advantage_abs"] = advantages.abs()
            before = logprob if batch.initial is None else batch.initial.logprob
            _watch_ratio(metrics, compute_log_ratio(logprob.detach(), batch), batch.action_mask)
            _watch_gap(metrics, compute_log_ratio(before.detach(), batch), batch.action_mask)
        for name, values in watched.items():
            _add_token_mean(metrics, name, values, batch.action_mask)
        return total, metrics

    def formula(self) -> str:
        """The resolved formula, one term a line, as printed at the start of a run."""
        policy = CORRECTIONS[self.correction].text(self) + TRUST_REGIONS[self.trust_region].text(self)
        parts = {
            "policy": f"{policy}, r = {RATIOS[self.ratio].text(self)}",
            "A": ADVANTAGES[self.advantage].text(self),
            "w": NORMALISERS[self.normaliser].text(self),
            **{name: term.text(self) for name, term in self.active_terms.items()},
        }
        title = f"objective {self.preset}: sum over trained tokens of w (policy + terms), {self.epochs} epoch(s)"
        return "\n".join([title, *(f"  {name:<7} {text}" for name, text in parts.items())])


def _watch_ratio(metrics: Metrics, log_ratio: torch.Tensor, mask: torch.Tensor) -> None:
    """How far the policy that trains is from the one that sampled, token by token; ``log_ratio`` [T]."""
    wide = log_ratio.double()
    ratio = wide.exp()
    _add_token_mean(metrics, "ratio", ratio, mask)
    _add_token_mean(metrics, "rollout_kl", ratio - 1 - wide, mask)
    if bool(mask.any()):
        metrics.max("train/ratio_max", float(ratio[mask].max()))


def _watch_gap(metrics: Metrics, log_ratio: torch.Tensor, mask: torch.Tensor) -> None:
    """How far rollout and learner disagree; ``log_ratio`` [T] is that before the first step on the batch.

    After a step it would be what was learned; so every epoch gives the same.
    """
    gap = log_ratio.double().abs()
    _add_token_mean(metrics, "logprob_gap", gap, mask)
    if bool(mask.any()):
        metrics.max("train/logprob_gap_max", float(gap[mask].max()))


def _add_token_mean(metrics: Metrics, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
    """``train/<name>``: mean of ``values`` [T] over the trained tokens."""
    trained = values.detach()[mask].double()
    metrics.mean(f"train/{name}", float(trained.sum()), len(trained))
