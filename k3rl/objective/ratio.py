"""The quantity that multiplies the advantage, by level. All [T], differentiable in ``train_logprobs``."""

from __future__ import annotations

from collections.abc import Callable

import torch

LOG_RATIO_CAP = 20.0
"""A log-ratio beyond this is held there (with zero gradient), so that exp never overflows."""


def compute_log_ratio(train_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``train - rollout`` where trained, 0 elsewhere: a masked value, even NaN, reaches neither loss nor gradient."""
    return torch.where(mask, train_logprobs - rollout_logprobs.to(train_logprobs), 0.0)


def token_ratio(train_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Importance ratio of each token, exp(train - rollout)."""
    log_ratio = compute_log_ratio(train_logprobs, rollout_logprobs, mask)
    return log_ratio.clamp(-LOG_RATIO_CAP, LOG_RATIO_CAP).exp()


def likelihood(train_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """No ratio: the log-likelihood itself, so that an advantage of 1 gives maximum likelihood."""
    del rollout_logprobs
    return torch.where(mask, train_logprobs, 0.0)


RATIOS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "token": token_ratio,
    "likelihood": likelihood,
}
