"""The output head: logits, and the log-probability of targets under them. V is the vocabulary here.

Sampler and learner must see the same logits bit for bit, so both take them from :func:`head_logits`.
"""

from __future__ import annotations

import torch


def head_logits(hidden_MD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """``hidden @ weight.T`` [M, V], multiplied and kept in at least float32: a bf16 logit is 0.015 nats wide."""
    dtype = torch.promote_types(torch.promote_types(hidden_MD.dtype, weight_VD.dtype), torch.float32)
    return hidden_MD.to(dtype) @ weight_VD.to(dtype).t()


def linear_logprob(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, targets_M: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob, entropy, log-sum-exp), each [M], of ``softmax(hidden @ weight.T / temperature)``, at least float32."""
    logits_MV = head_logits(hidden_MD, weight_VD) / temperature
    lse_M = torch.logsumexp(logits_MV, dim=-1)
    logprob_M = logits_MV.gather(-1, targets_M.unsqueeze(-1)).squeeze(-1) - lse_M
    probs_MV = torch.exp(logits_MV - lse_M.unsqueeze(-1))
    # A token of probability zero with logit -inf adds nothing to the entropy, not 0 * -inf = NaN.
    entropy_M = lse_M - (probs_MV * logits_MV.clamp(min=-1e30)).sum(-1)
    return logprob_M, entropy_M, lse_M
