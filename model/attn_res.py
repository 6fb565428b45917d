"""Block attention residuals: what a sublayer reads is a learned mixture of the blocks before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from k3rl.kernels.attn_res import attn_res_mix
from k3rl.model.layers import WHOLE, RMSNorm, linear

if TYPE_CHECKING:
    from collections.abc import Sequence


class AttnRes(nn.Module):
    """Pseudo-query and key norm of one mix; the query starts at zero, which is a plain average."""

    placements: ClassVar = {"norm.weight": WHOLE, "proj.weight": WHOLE}

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.norm, self.proj = RMSNorm(dim, eps), linear(dim, 1)

    def forward(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Mix sources [T, D] each."""
        return attn_res_mix(sources, self.norm.weight, self.proj.weight.squeeze(0), self.norm.eps)


class UnusedAttnRes(nn.Module):
    """The mix of layer 0, which has no source but the stream: its tensors stand in checkpoints and do nothing."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.proj = nn.Module(), nn.Module()
        self.norm.register_buffer("weight", torch.ones(dim))
        self.proj.register_buffer("weight", torch.zeros(1, dim))

    def forward(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The last of ``sources``."""
        return sources[-1]


class PlainResidual(nn.Module):
    """Reads the residual stream as it is: what stands in a mix's place where there is none."""

    def forward(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """The last of ``sources``."""
        return sources[-1]
