"""Log-probability of targets under a linear head. V is the vocabulary here."""

from __future__ import annotations

import torch


def linear_logprob(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, targets_M: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprob, entropy, log-sum-exp), each [M], of ``softmax(hidden @ weight.T / temperature)``, at least float32."""
    logits_MV = hidden_MD @ weight_VD.t()
    if logits_MV.dtype in (torch.bfloat16, torch.float16):
        logits_MV = logits_MV.float()
    logits_MV = logits_MV / temperature
    lse_M = torch.logsumexp(logits_MV, dim=-1)
    logprob_M = logits_MV.gather(-1, targets_M.unsqueeze(-1)).squeeze(-1) - lse_M
    probs_MV = torch.exp(logits_MV - lse_M.unsqueeze(-1))
    # A token of probability zero with logit -inf adds nothing to the entropy, not 0 * -inf = NaN.
    entropy_M = lse_M - (probs_MV * logits_MV.masked_fill(probs_MV == 0, 0.0)).sum(-1)
    return logprob_M, entropy_M, lse_M
