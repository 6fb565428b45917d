"""Layers that several parts of the model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from k3rl.kernels.norm import rms_norm
from k3rl.kernels.situ import situ_glu, swiglu

if TYPE_CHECKING:
    from k3rl.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """Along which dimension a parameter is cut for each way of spreading a model; None: every rank has all of it.

    Layers name those of their parameters in ``placements``; :mod:`k3rl.model.parallel` reads and applies them.
    """

    tensor: int | None = None
    expert: int | None = None


WHOLE, ROWS, COLUMNS = Placement(), Placement(tensor=0), Placement(tensor=1)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear map without bias."""
    return nn.Linear(inputs, outputs, bias=False)


def output_gate(inputs: int, outputs: int, rank: int | None) -> nn.Module:
    """Projection of an output gate, of full rank or through ``rank`` channels."""
    return linear(inputs, outputs) if rank is None else nn.Sequential(linear(inputs, rank), linear(rank, outputs))


Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From gate and up, of one shape, to the gated activation."""


def activation(config: ModelConfig) -> Activation:
    """The gated activation of a model's feed-forwards."""
    if config.activation == "swiglu":
        return swiglu
    return partial(situ_glu, beta=config.situ_beta, linear_beta=config.situ_linear_beta)


class RMSNorm(nn.Module):
    """RMS normalisation of the last axis."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return rms_norm(inputs, self.weight, self.eps)


class FeedForward(nn.Module):
    """Dense gated feed-forward."""

    placements: ClassVar = {"gate_proj.weight": ROWS, "up_proj.weight": ROWS, "down_proj.weight": COLUMNS}

    def __init__(self, dim: int, width: int, activate: Activation) -> None:
        super().__init__()
        self.activate = activate
        self.gate_proj, self.up_proj, self.down_proj = linear(dim, width), linear(dim, width), linear(width, dim)

    def forward(self, inputs_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activate(self.gate_proj(inputs_TD), self.up_proj(inputs_TD)))


class Elsewhere(nn.Module):
    """Stands where a part of the model is on another rank (:mod:`k3rl.model.pipeline`)."""

    def forward(self, *_: object) -> torch.Tensor:
        """RuntimeError: this rank cannot compute it."""
        raise RuntimeError("this part of the model is on another rank: run the model through its PipelineStage")
