"""From log-ratio and advantage to the loss of a token, [T]; lower is better.

A function takes the log-ratio [T] at its level, advantages [T], the batch and the objective. Below, r is the ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from k3rl.objective.batch import ObjectiveBatch
from k3rl.objective.level import mean_log
from k3rl.objective.piece import Piece
from k3rl.objective.ratio import ANCHORS, capped_exp

if TYPE_CHECKING:
    from k3rl.objective.objective import Objective

Watched = dict[str, torch.Tensor]


def score(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """``-log r A``: the score function, whose gradient is ``-A`` times that of the log-probability wherever r is."""
    return -log_ratio * advantages


def unbounded(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """``-r A``: plain importance sampling."""
    return -capped_exp(log_ratio) * advantages


def ppo_clip(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """``max(-r A, -clip(r) A)``: pessimistic, with a lower and an upper width.

    https://arxiv.org/abs/1707.06347 eq. 7; two widths: https://arxiv.org/abs/2503.14476 §3.1. For A < 0 and a large r
    it has no bound (D7 of peers: no dual clip unless asked for).
    """
    ratio = capped_exp(log_ratio)
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return torch.maximum(-ratio * advantages, -clipped * advantages)


def dual_clip(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """The same, and for A < 0 never more than ``-dual_clip A`` (https://arxiv.org/abs/1912.09729)."""
    loss = ppo_clip(log_ratio, advantages, batch, objective)
    return torch.where(advantages < 0, torch.minimum(loss, -objective.dual_clip * advantages), loss)


def clamp(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """``-clip(r) A``: outside of the widths a token has no gradient, whatever the sign of its advantage.

    K2.5, https://arxiv.org/abs/2602.02276 §4.4.2 eq. 1, which K3 keeps. Its formula clips the ratio and its text speaks
    of the log-ratio; here the widths are those of the ratio, as for every other trust region.
    """
    return -capped_exp(log_ratio).clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantages


def cispo(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """``-sg[clip(r)] A log r``: the weight is bounded, and every token keeps its gradient.

    https://arxiv.org/abs/2506.13585. The widths are relative to 1 and both sides exist (peers also have an
    absolute cap c, which is ``clip_low: 1, clip_high: c - 1``).
    """
    weight = capped_exp(log_ratio.detach()).clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return -weight * advantages * log_ratio


def sapo(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """``-(4/tau) sigmoid(tau (r - 1)) A``: a soft gate, whose weight is that of REINFORCE at r = 1 and fades around it.

    https://arxiv.org/abs/2511.20347; tau is ``tau_positive`` where A > 0 and ``tau_negative`` elsewhere.
    """
    tau = torch.where(advantages > 0, objective.tau_positive, objective.tau_negative).to(log_ratio)
    return -4 / tau * torch.sigmoid(tau * (capped_exp(log_ratio) - 1)) * advantages


def dppo(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """``-keep r A``: a token is kept until its probability has moved by ``divergence`` the way its advantage pulls.

    Binary total variation of https://arxiv.org/abs/2602.04879. The ratio itself has no cap.
    """
    keep = ~_has_diverged(log_ratio, advantages, batch, objective)
    return -torch.where(keep, capped_exp(log_ratio), 0.0) * advantages


def geometric_clip(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """``-s A`` with s the geometric mean over the sample of what the clip leaves of its tokens' ratios.

    GMPO, https://arxiv.org/abs/2507.20673: the pessimistic clip of a token, before the mean, with widths of the
    log-ratio.
    """
    clipped = log_ratio.clamp(-objective.clip_low, objective.clip_high)
    pessimistic = torch.where(advantages > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    return -capped_exp(mean_log(pessimistic, batch, "sequence")) * advantages


def _has_diverged(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> torch.Tensor:
    """[T] bool. An advantage of 0 counts as negative."""
    log_ratio = log_ratio.detach()
    before = torch.where(batch.action_mask, ANCHORS[objective.anchor](batch).to(log_ratio), 0.0).exp()
    moved = before * (capped_exp(log_ratio) - 1)
    return torch.where(advantages > 0, moved > objective.divergence, moved < -objective.divergence)


def watch_nothing(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> Watched:
    """No metric."""
    return {}


def watch_clip(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> Watched:
    """Where the ratio is outside of the clip, and where the pessimistic clip is what counts, both [T] bool."""
    ratio = capped_exp(log_ratio)
    return _outside(ratio > 1 + objective.clip_high, ratio < 1 - objective.clip_low, advantages)


def watch_log_clip(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> Watched:
    """The same for widths of the log-ratio."""
    return _outside(log_ratio > objective.clip_high, log_ratio < -objective.clip_low, advantages)


def watch_dual_clip(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> Watched:
    """The same as of the clip, and where the second one counts."""
    beyond = (capped_exp(log_ratio) > objective.dual_clip) & (advantages < 0)
    return {**watch_clip(log_ratio, advantages, batch, objective), "ratio_dual_clipped_frac": beyond}


def watch_clamp(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> Watched:
    """Where the ratio is outside: there the clip always counts."""
    found = watch_clip(log_ratio, advantages, batch, objective)
    return {**found, "ratio_clipped_frac": found["ratio_outside_frac"]}


def watch_dppo(
    log_ratio: torch.Tensor, advantages: torch.Tensor, batch: ObjectiveBatch, objective: Objective
) -> Watched:
    """Where a token is dropped."""
    return {"ratio_clipped_frac": _has_diverged(log_ratio, advantages, batch, objective)}


def _outside(high: torch.Tensor, low: torch.Tensor, advantages: torch.Tensor) -> Watched:
    return {
        "ratio_outside_frac": high | low,
        "ratio_clipped_frac": (high & (advantages > 0)) | (low & (advantages < 0)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustRegion(Piece[Callable[[torch.Tensor, torch.Tensor, ObjectiveBatch, "Objective"], torch.Tensor]]):
    """A row that may also say, of each token, what is worth a metric: its mean is logged as ``train/<name>``."""

    watch: Callable[[torch.Tensor, torch.Tensor, ObjectiveBatch, Objective], Watched] = watch_nothing


def _clip_text(o: Objective) -> str:
    return f"clip(r, {1 - o.clip_low:g}, {1 + o.clip_high:g})"


def _ppo_text(o: Objective) -> str:
    return f"max(-r A, -{_clip_text(o)} A)"


_WIDTHS = ("clip_low", "clip_high")

TRUST_REGIONS: dict[str, TrustRegion] = {
    "score": TrustRegion(compute=score, text=lambda o: "-log(r) A", linear=True),
    "none": TrustRegion(compute=unbounded, text=lambda o: "-r A", needs=("ratio",)),
    "clip": TrustRegion(compute=ppo_clip, watch=watch_clip, text=_ppo_text, keys=_WIDTHS, needs=("ratio",)),
    "dual_clip": TrustRegion(
        compute=dual_clip,
        watch=watch_dual_clip,
        text=lambda o: f"{_ppo_text(o)}, at most {-o.dual_clip:g} A where A < 0",
        keys=(*_WIDTHS, "dual_clip"),
        needs=("ratio",),
    ),
    "clamp": TrustRegion(
        compute=clamp, watch=watch_clamp, text=lambda o: f"-{_clip_text(o)} A", keys=_WIDTHS, needs=("ratio",)
    ),
    "cispo": TrustRegion(
        compute=cispo,
        watch=watch_clamp,
        text=lambda o: f"-sg[{_clip_text(o)}] A log(r)",
        keys=_WIDTHS,
        needs=("ratio",),
    ),
    "sapo": TrustRegion(
        compute=sapo,
        text=lambda o: f"-4/tau sigmoid(tau (r - 1)) A, tau = {o.tau_positive:g} where A > 0, else {o.tau_negative:g}",
        keys=("tau_positive", "tau_negative"),
        needs=("ratio",),
    ),
    "dppo": TrustRegion(
        compute=dppo,
        watch=watch_dppo,
        text=lambda o: f"-r A unless sign(A) (p r - p) > {o.divergence:g}, p = exp({o.anchor})",
        keys=("anchor", "divergence"),
        needs=("ratio",),
    ),
    "geometric_clip": TrustRegion(
        compute=geometric_clip,
        watch=watch_log_clip,
        text=lambda o: (
            f"-s A, s = exp(mean over the sample of log(r) clipped by -{o.clip_low:g}, {o.clip_high:g} as A pulls)"
        ),
        keys=_WIDTHS,
        needs=("ratio",),
    ),
}
