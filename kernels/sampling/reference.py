"""Plain torch: the truth for the sampling kernel.

Letters: M rows, D model width, V vocabulary.
"""

from __future__ import annotations

import torch

from k3rl.kernels.linear_logprob import head_logits


def sample_tokens(
    hidden_MD: torch.Tensor, weight_VD: torch.Tensor, uniforms_M: torch.Tensor, temperature_M: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick one token a row by inverting the cumulative distribution at a given uniform number.

    A row's pick depends on its own logits and number alone, so it is the same alone and in any batch.

    Args:
        hidden_MD: what the output head reads, any float type.
        weight_VD: the output head.
        uniforms_M: float64 in [0, 1).
        temperature_M: float32; 0 means greedy (the lowest id among equal logits).

    Returns:
        ids [M] int64, and their log-probability [M] float32 under softmax(logits / temperature); for greedy rows under
        the softmax at temperature 1.
    """
    logits_MV = head_logits(hidden_MD, weight_VD)
    is_greedy_M = temperature_M == 0
    scale_M = torch.where(is_greedy_M, torch.ones_like(temperature_M), temperature_M)
    logprobs_MV = torch.log_softmax(logits_MV / scale_M[:, None], dim=-1)
    cdf_MV = logprobs_MV.double().exp().cumsum(-1)
    # Scaling by the last entry makes the total exactly 1, so a number just under 1 cannot fall off the end.
    threshold_M1 = uniforms_M[:, None].clamp(max=1 - 2**-53) * cdf_MV[:, -1:]
    # Among logits that are not finite the search runs past the end; any id will do, its logprob is NaN and says so.
    sampled_M = torch.searchsorted(cdf_MV, threshold_M1, right=True).squeeze(-1).clamp(max=cdf_MV.shape[-1] - 1)
    ids_M = torch.where(is_greedy_M, logits_MV.argmax(-1), sampled_M)
    return ids_M, logprobs_MV.gather(-1, ids_M[:, None]).squeeze(-1)
