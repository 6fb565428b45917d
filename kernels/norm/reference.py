"""Root-mean-square normalisation."""

from __future__ import annotations

import torch


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis with float32 statistics, round to the input's dtype, then multiply by ``weight``."""
    wide = inputs.float() if inputs.dtype in (torch.bfloat16, torch.float16) else inputs
    if wide is inputs and weight.dtype == inputs.dtype:
        return torch.nn.functional.rms_norm(inputs, weight.shape, weight, eps)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(inputs.dtype) * weight.to(inputs.dtype)
