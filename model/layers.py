"""Layers that several parts of the model share."""

from __future__ import annotations

import torch
from torch import nn

from k3rl.kernels.norm import rms_norm
from k3rl.kernels.situ import situ_glu


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map without bias whose weight the model fills later, from its own generator."""
    return nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu")


class RMSNorm(nn.Module):
    """RMS normalisation of the last axis."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return rms_norm(inputs, self.weight, self.eps)


class SituFeedForward(nn.Module):
    """Dense SiTU-GLU feed-forward."""

    def __init__(self, dim: int, width: int, beta: float, linear_beta: float) -> None:
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta
        self.gate_proj, self.up_proj, self.down_proj = linear(dim, width), linear(dim, width), linear(width, dim)

    def forward(self, inputs_TD: torch.Tensor) -> torch.Tensor:
        gated = situ_glu(self.gate_proj(inputs_TD), self.up_proj(inputs_TD), self.beta, self.linear_beta)
        return self.down_proj(gated)
