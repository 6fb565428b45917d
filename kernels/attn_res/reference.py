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
    dtype = sources[0].dtype
    values = [x.float() for x in sources] if dtype in (torch.bfloat16, torch.float16) else sources
    query_D = norm_weight_D.to(values[0].dtype) * query_D.to(values[0].dtype)
    scores = [(x @ query_D) * torch.rsqrt(x.square().mean(-1) + eps) for x in values]
    weights_TS = torch.softmax(torch.stack(scores, dim=-1), dim=-1)
    # Source by source: stacking them would copy every block at every mix.
    weights = weights_TS.split(1, dim=-1)
    mixed_TD = weights[0] * values[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        mixed_TD = torch.addcmul(mixed_TD, weight, value)
    return mixed_TD.to(dtype)
