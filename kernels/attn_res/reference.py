"""Block attention residuals: a softmax over earlier layers' outputs in place of the residual sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def attn_res_mix(
    sources: Sequence[torch.Tensor], norm_weight_D: torch.Tensor, query_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """Weighted mean of ``sources`` (each [T, D]), in float32, returned in their dtype.

    A source's score is its RMS-normalised value times ``norm_weight * query``; the values are not normalised.
    """
    values_STD = torch.stack(list(sources))
    dtype = values_STD.dtype
    if dtype in (torch.bfloat16, torch.float16):
        values_STD = values_STD.float()
    query_D = norm_weight_D.to(values_STD.dtype) * query_D.to(values_STD.dtype)
    rstd_ST = torch.rsqrt(values_STD.square().mean(-1) + eps)
    weights_ST = torch.softmax((values_STD @ query_D) * rstd_ST, dim=0)
    return (weights_ST.unsqueeze(-1) * values_STD).sum(0).to(dtype)
