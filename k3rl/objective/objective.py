"""The composed objective: it asks the rows of its pieces, and knows none of them by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from k3rl.errors import TrainingError
from k3rl.metrics import Metrics
from k3rl.objective.advantage import ADVANTAGES, Baseline, Spread, Std
from k3rl.objective.batch import ObjectiveBatch, StateKind, TokenVectors
from k3rl.objective.correction import CORRECTIONS, REJECTIONS
from k3rl.objective.kl import REWARD_KL
from k3rl.objective.normaliser import NORMALISERS
from k3rl.objective.piece import Need, Piece
from k3rl.objective.ratio import RATIOS, Anchor, compute_log_ratio
from k3rl.objective.term import TERMS, Term
from k3rl.objective.trust_region import TRUST_REGIONS
from k3rl.objective.watch import add_token_mean, watch_correction, watch_mismatch, watch_ratio

AXES: dict[str, Mapping[str, Piece[Any]]] = {
    "advantage": ADVANTAGES,
    "ratio": RATIOS,
    "trust_region": TRUST_REGIONS,
    "correction": CORRECTIONS,
    "rejection": REJECTIONS,
    "normaliser": NORMALISERS,
}
"""The tables; an objective takes one row of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A function of token vectors and of the batch, and of nothing else.

    ``loss = sum(w * (correction * trust_region(log r, A))) + sum over terms of coefficient * sum(w * term)``.
    """

    preset: str
    # rows of the tables
    advantage: str
    ratio: str = "token"
    trust_region: str = "clip"
    correction: str = "none"
    rejection: str = "none"
    normaliser: str = "tokens"
    terms: tuple[str, ...] = ()
    # what the rows read; a preset may have another default
    horizon: int | None = None
    std: Std = "sample"
    spread: Spread = "group"
    baseline: Baseline = "mean"
    gamma: float = 1.0
    gae_lambda: float = 0.95
    step_weight: float = 1.0
    same_state: StateKind = "observation"
    teacher_cap: float = 5.0
    anchor: Anchor = "rollout"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    divergence: float = 0.2
    truncate_low: float = 0.0
    truncate_high: float = 2.0
    keep_low: float = 0.5
    keep_high: float = 2.0
    count_rejected: bool = True
    value_coef: float = 0.5
    value_clip: float = 0.2
    kl: str = "k3"
    kl_coef: float = 0.0
    reward_kl: str = "k1"
    reward_kl_coef: float = 0.0
    drift_coef: float = 0.0
    entropy_coef: float = 0.0
    epochs: int = 1

    @property
    def active_terms(self) -> dict[str, Term]:
        """Terms whose coefficient is not 0."""
        return {name: TERMS[name] for name in self.terms if getattr(self, TERMS[name].coef)}

    @property
    def pieces(self) -> dict[str, Piece[Any]]:
        """The rows that take part, by the key that makes them do so."""
        chosen = {axis: table[getattr(self, axis)] for axis, table in AXES.items()}
        penalties = {"reward_kl_coef": REWARD_KL} if self.penalises else {}
        return {**chosen, **penalties, **{term.coef: term for term in self.active_terms.values()}}

    @property
    def keys(self) -> tuple[str, ...]:
        """Configuration keys that this objective uses, in order of name."""
        return tuple(sorted({"epochs", *AXES}.union(*(row.keys for row in self._rows))))

    @property
    def _rows(self) -> tuple[Piece[Any], ...]:
        """The rows that take part, and the terms that would with a coefficient."""
        return (*self.pieces.values(), *(TERMS[name] for name in self.terms))

    @property
    def penalises(self) -> bool:
        """A KL is taken off the rewards."""
        return "reward_kl_coef" in ADVANTAGES[self.advantage].keys and self.reward_kl_coef != 0

    @property
    def drops_rejected(self) -> bool:
        """Rejected tokens are as if they were not trained."""
        return "count_rejected" in self.keys and not self.count_rejected

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset(need for piece in self.pieces.values() for need in piece.needs)

    def key_that_needs(self, need: Need) -> str:
        """The first key whose value makes it need that."""
        return next(key for key, piece in self.pieces.items() if need in piece.needs)

    @property
    def gives(self) -> frozenset[Need]:
        """What its rows may need of each other and of the keys."""
        given: set[Need] = {need for row in self._rows for need in row.gives}
        if self.horizon is not None:
            given.add("horizon")
        if "ratio" not in given or self.anchor != "rollout":
            given.add("uncorrected")
        return frozenset(given)

    @property
    def needs_value(self) -> bool:
        return "value" in self.needs

    @property
    def needs_reference(self) -> bool:
        return "reference" in self.needs

    @property
    def is_linear(self) -> bool:
        """The gradient does not depend on the vectors, so the first pass can be left out."""
        return all(piece.linear for piece in self.pieces.values())

    def prepare(self, batch: ObjectiveBatch, vectors: TokenVectors | None = None) -> ObjectiveBatch:
        """Fill in advantages, returns and global weights; ``vectors`` are those before any step."""
        if self.needs_value and (vectors is None or vectors.value is None):
            raise TrainingError(f"objective {self.preset!r} needs values, and the policy gave none")
        batch = dataclasses.replace(batch, initial=None if vectors is None else vectors.detached())
        if self.penalises:
            batch = dataclasses.replace(batch, penalties=self.reward_kl_coef * REWARD_KL.compute(batch, self))
        found = ADVANTAGES[self.advantage].compute(batch, self)
        weights = CORRECTIONS[self.correction].compute(batch, self)
        correction = torch.where(REJECTIONS[self.rejection].compute(batch, self), weights.used, 0.0)
        counted = batch.action_mask & (correction > 0) if self.drops_rejected else batch.action_mask
        return dataclasses.replace(
            batch,
            advantages=torch.where(batch.action_mask, found.advantages, 0.0),
            returns=found.returns,
            num_no_signal=found.num_no_signal,
            weights=NORMALISERS[self.normaliser].compute(dataclasses.replace(batch, action_mask=counted), self),
            correction=correction,
            raw_correction=weights.raw,
        )

    def loss(self, vectors: TokenVectors, batch: ObjectiveBatch) -> tuple[torch.Tensor, Metrics]:
        """Scalar loss and its metrics. ``batch`` comes from :meth:`prepare`; diagnostics are taken before any clip."""
        if batch.advantages is None or batch.weights is None or batch.correction is None:
            raise ValueError("call Objective.prepare before Objective.loss")
        logprob = vectors.logprob
        advantages, weights, correction = (x.to(logprob) for x in (batch.advantages, batch.weights, batch.correction))
        region = TRUST_REGIONS[self.trust_region]
        log_ratio = RATIOS[self.ratio].compute(logprob, batch, self)
        policy_loss = (weights * correction * region.compute(log_ratio, advantages, batch, self)).sum()
        watched = {"entropy": vectors.entropy, "logprob": logprob}
        watched.update(region.watch(log_ratio.detach(), advantages, batch, self))
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
            watch_ratio(metrics, compute_log_ratio(logprob.detach(), batch), batch.action_mask)
            before = logprob if batch.initial is None else batch.initial.logprob
            watch_mismatch(metrics, compute_log_ratio(before.detach().double(), batch), batch)
        if not CORRECTIONS[self.correction].linear or not REJECTIONS[self.rejection].linear:
            watch_correction(metrics, batch)
        if batch.penalties is not None:
            watched["reward_kl"] = batch.penalties / self.reward_kl_coef
        for name, values in watched.items():
            add_token_mean(metrics, name, values, batch.action_mask)
        return total, metrics

    def formula(self) -> str:
        """The resolved formula, one term a line, as printed at the start of a run."""
        factors = REJECTIONS[self.rejection].text(self) + CORRECTIONS[self.correction].text(self)
        policy = factors + TRUST_REGIONS[self.trust_region].text(self)
        counted = ", rejected tokens not counted" if self.drops_rejected else ""
        parts = {
            "policy": f"{policy}, r = {RATIOS[self.ratio].text(self)}",
            "A": ADVANTAGES[self.advantage].text(self),
            "w": NORMALISERS[self.normaliser].text(self) + counted,
            **{name: term.text(self) for name, term in self.active_terms.items()},
        }
        title = f"objective {self.preset}: sum over trained tokens of w (policy + terms), {self.epochs} epoch(s)"
        return "\n".join([title, *(f"  {name:<7} {text}" for name, text in parts.items())])
