"""Gated activations: K3's bounded SiTU-GLU, and SwiGLU, which it becomes as its bounds grow."""

from __future__ import annotations

import torch


def situ_glu(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    """``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``, at least float32 inside.

    The sigmoid takes the uncapped gate. The result, of the gate's dtype, is at most ``beta * linear_beta`` in size.
    """
    narrow = gate.dtype in (torch.bfloat16, torch.float16)
    a, b = (gate.float(), up.float()) if narrow else (gate, up)
    bounded = torch.tanh(a * (1 / beta)) * torch.tanh(b * (1 / linear_beta))
    return (bounded * (beta * linear_beta) * torch.sigmoid(a)).to(gate.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` (https://arxiv.org/abs/2002.05202)."""
    return torch.nn.functional.silu(gate) * up
